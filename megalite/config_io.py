"""Reading and writing configurations as plain values and as TOML; knows dataclasses, not what their fields mean.

Decisions
- A key is a field's name in snake_case or with dashes, or an alias (`aliases.ALIASES`); it stands in its section or,
  since field names are unique, at the top level. A setting given twice is an error, whatever the spellings.
- Values are never converted behind the user's back: an int is taken for a float, and nothing else.
- All problems of a document are collected into one ConfigError.
- TOML has no null. The string "None" stands for it where a field may be unset (as on the command line).
"""

from __future__ import annotations

import json
import math
import tomllib
from collections.abc import Mapping
from dataclasses import fields, is_dataclass, replace
from difflib import get_close_matches
from types import NoneType, UnionType
from typing import Any, Literal, TypeVar, Union, get_args, get_origin, get_type_hints

from megalite.aliases import ALIASES, UNSUPPORTED, Alias, resolve_alias
from megalite.errors import ConfigError

__all__ = ["assign", "field_types", "implied_violations", "read_sections", "read_toml", "suggest", "write_toml"]

NONE = "None"
NO_ALIAS = Alias("")
T = TypeVar("T")


def field_types(config: Any) -> dict[str, tuple[str | None, Any]]:
    """For every setting of a nested dataclass (instance or class): field name -> (section or None, type)."""
    table: dict[str, tuple[str | None, Any]] = {}
    for name, hint in get_type_hints(config if isinstance(config, type) else type(config)).items():
        if not is_dataclass(hint):
            table[name] = (None, hint)
            continue
        for inner, inner_hint in get_type_hints(hint).items():
            assert inner not in table, f"field {inner} exists in two sections"
            table[inner] = (name, inner_hint)
    return table


def read_toml(text: str) -> dict[str, Any]:
    """Raises ConfigError for text that is not TOML."""
    try:
        return tomllib.loads(text)
    except tomllib.TOMLDecodeError as error:
        raise ConfigError(f"this is not TOML: {error}") from error


def read_sections(base: T, data: Mapping[str, Any]) -> T:
    """`base` with the values of `data`: sections {"model": {...}} and flat keys may be mixed.

    Raises ConfigError listing all unknown keys, wrong types and settings given twice.
    """
    types = field_types(base)
    problems: list[str] = []
    sections = {section for section, _ in types.values() if section is not None}
    values: dict[str, Any] = {}
    spelled: dict[str, str] = {}
    implied: dict[str, str] = {}
    for section, key, value in _entries(data, sections, problems):
        shown = f"{section}.{key}" if section else key
        try:
            name, value = _lookup(section, key, value, types)
            if ALIASES.get(key.replace("-", "_"), NO_ALIAS).implied:
                implied[shown] = name
                continue
            if name in spelled:
                raise ConfigError(f"{spelled[name]!r} and {shown!r} are the same setting: keep one of them")
            spelled[name] = shown
            values[name] = _convert(shown, value, types[name][1])
        except ConfigError as error:
            problems += error.violations
    config = assign(base, values)
    problems += implied_violations(config, implied)
    if problems:
        raise ConfigError(problems)
    return config


def implied_violations(config: Any, implied: Mapping[str, str]) -> list[str]:
    """Switches (as written -> field) that are only right together with a field that is not set."""
    types = field_types(config)
    return [
        f"{shown!r} says nothing by itself: set {name!r} as well"
        for shown, name in implied.items()
        if getattr(getattr(config, types[name][0] or ""), name) is None
    ]


def assign(base: T, values: Mapping[str, Any]) -> T:
    """`base` with the named settings replaced, wherever their section is; values have their field's type."""
    changes: dict[str, Any] = {}
    by_section: dict[str, dict[str, Any]] = {}
    types = field_types(base)
    for name, value in values.items():
        section = types[name][0]
        target = changes if section is None else by_section.setdefault(section, {})
        target[name] = value
    changes |= {section: replace(getattr(base, section), **inner) for section, inner in by_section.items()}
    return replace(base, **changes)  # type: ignore[type-var]


def suggest(name: str, known: list[str]) -> str:
    """ ", did you mean ...?" or nothing."""
    close = get_close_matches(name, known, n=1, cutoff=0.6)
    return f", did you mean {close[0]!r}?" if close else ""


def write_toml(config: Any) -> str:
    """All settings, one table per section; equal after `read_sections(any base, read_toml(text))`."""
    lines, tables = [], []
    for entry in fields(config):
        value = getattr(config, entry.name)
        if is_dataclass(value):
            tables += ["", f"[{entry.name}]"]
            tables += [f"{inner.name} = {_toml_value(getattr(value, inner.name))}" for inner in fields(value)]
        else:
            lines.append(f"{entry.name} = {_toml_value(value)}")
    return "\n".join([*lines, *tables]) + "\n"


def _entries(data: Mapping[str, Any], sections: set[str], problems: list[str]) -> list[tuple[str | None, str, Any]]:
    entries: list[tuple[str | None, str, Any]] = []
    for key, value in data.items():
        if key in sections and isinstance(value, Mapping):
            entries += [(key, inner, inner_value) for inner, inner_value in value.items()]
        elif key in sections:
            hint = f"; name a preset with preset = {value!r}" if key == "model" else ""
            problems.append(f"{key!r} is a section of settings, got {value!r}{hint}")
        elif isinstance(value, Mapping):
            problems.append(f"unknown section [{key}]{suggest(key, sorted(sections))}")
        else:
            entries.append((None, key, value))
    return entries


def _lookup(section: str | None, key: str, value: Any, types: Mapping[str, tuple[str | None, Any]]) -> tuple[str, Any]:
    """The field that a key means, and the value it gives to it."""
    name = key.replace("-", "_")
    shown = f"{section}.{key}" if section else key
    if name in UNSUPPORTED:
        raise ConfigError(f"{shown!r} is not a setting of megalite: {UNSUPPORTED[name]}")
    if name in ALIASES:
        name, value = resolve_alias(name, value, shown)
    if name not in types:
        known = [*types, *ALIASES]
        raise ConfigError(f"unknown key {shown!r}{suggest(name, known)}")
    home = types[name][0]
    if section is not None and home != section:
        place = f"section [{home}]" if home else "the top level"
        raise ConfigError(f"{key!r} is not in section [{section}]: move it to {place}")
    return name, value


def _convert(shown: str, value: Any, wanted: Any) -> Any:
    """`value` as the field's type; raises ConfigError naming key, value and wanted type."""
    if get_origin(wanted) in (Union, UnionType):
        inner = [part for part in get_args(wanted) if part is not NoneType]
        assert len(inner) == 1, "a field has one type, perhaps with None"
        return None if value is None or value == NONE else _convert(shown, value, inner[0])
    if get_origin(wanted) is Literal:
        if type(value) is str and value in get_args(wanted):
            return value
        close = suggest(value, list(get_args(wanted))) if isinstance(value, str) else ""
        raise ConfigError(f"{shown} = {value!r} is not one of {', '.join(get_args(wanted))}{close}")
    if get_origin(wanted) is tuple and isinstance(value, list | tuple):
        return tuple(_convert(f"{shown}[{index}]", item, get_args(wanted)[0]) for index, item in enumerate(value))
    if wanted is float and type(value) is int:
        return float(value)
    if wanted in (int, float, bool, str) and type(value) is wanted:
        return value
    raise ConfigError(f"{shown} = {value!r} has the wrong type: {_describe(wanted)} is wanted")


def _describe(wanted: Any) -> str:
    names = {int: "a whole number", float: "a number", bool: "true or false", str: "a string in quotes"}
    if get_origin(wanted) is tuple:
        return "a list, each entry " + _describe(get_args(wanted)[0])
    return names[wanted]


def _toml_value(value: Any) -> str:
    if value is None:
        return f'"{NONE}"'
    if isinstance(value, bool):
        return "true" if value else "false"
    if isinstance(value, float):
        # repr gives the shortest text that reads back to the same bits; TOML writes inf and nan as Python does
        text = repr(value)
        return text if "." in text or not math.isfinite(value) else _with_point(text)
    if isinstance(value, tuple):
        return "[" + ", ".join(_toml_value(item) for item in value) + "]"
    if isinstance(value, str):
        # JSON escapes are TOML escapes, except DEL, which JSON leaves as it is and TOML refuses
        return json.dumps(value, ensure_ascii=False).replace("\x7f", "\\u007f")
    return str(value)


def _with_point(text: str) -> str:
    mantissa, exponent = text.split("e")
    return f"{mantissa}.0e{exponent}"
