"""The part of the command line that tyro does: parse values by the fields' types, and write the help.

Decisions
- The flags are the fields of the configuration, the help is the sentence under each field, and the defaults that it
  shows are those of `base`. Other spellings of a flag are listed with it.
- tyro is imported late: configuration and validation work without it.
"""

from __future__ import annotations

import ast
import inspect
import os
import sys
import textwrap
from collections.abc import Sequence
from dataclasses import field, fields, is_dataclass, make_dataclass
from types import NoneType
from typing import Annotated, Any, NoReturn, get_args, get_origin, get_type_hints

from megalite.aliases import ALIASES
from megalite.config import RunConfig
from megalite.presets import PRESETS

__all__ = ["field_sentences", "parse_values", "show_help"]


def parse_values(tokens: Sequence[str], base: RunConfig, prog: str, description: str, *, speaks: bool) -> dict[str, Any]:
    """Every setting's value after the flags in `tokens` (canonical names only); `base` where there is no flag.

    Exits with code 2 and a message (if `speaks`) on a value of the wrong type, and with 0 after --help.
    """
    import tyro

    config_flag = Annotated[
        str | None, tyro.conf.arg(help="TOML file of settings; flags win over it.", metavar="FILE", help_behavior_hint="")
    ]
    flags = make_dataclass(
        "Settings",
        [*_flag_fields(base), ("config", config_flag, field(default=None))],
        namespace={"__doc__": description},
    )
    parsed = tyro.cli(
        flags,
        prog=prog,
        description=description,
        args=list(tokens),
        config=(tyro.conf.OmitArgPrefixes,),
        console_outputs=speaks,
    )
    values: dict[str, Any] = {}
    for entry in fields(parsed):
        value = getattr(parsed, entry.name)
        values |= {inner.name: getattr(value, inner.name) for inner in fields(value)} if is_dataclass(value) else {}
        values[entry.name] = value
    return values


def show_help(prog: str, description: str) -> NoReturn:
    """Print all settings and exit with 0, also when a pager closes the pipe before the end."""
    try:
        parse_values(["--help"], RunConfig(), prog, description, speaks=True)
        sys.stdout.flush()
    except BrokenPipeError:
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())  # or the interpreter complains once more
    raise SystemExit(0)


def field_sentences(config: type) -> dict[str, str]:
    """The docstring under each field of a dataclass."""
    tree = ast.parse(textwrap.dedent(inspect.getsource(config))).body[0]
    assert isinstance(tree, ast.ClassDef)
    sentences = {}
    for line, below in zip(tree.body, tree.body[1:], strict=False):
        if isinstance(line, ast.AnnAssign) and isinstance(line.target, ast.Name) and isinstance(below, ast.Expr):
            assert isinstance(below.value, ast.Constant)
            sentences[line.target.id] = " ".join(str(below.value.value).split())
    return sentences


def _flag_fields(base: Any) -> list[tuple[str, Any, Any]]:
    """(name, annotated type, default) for make_dataclass; a section becomes a dataclass and so a group of the help."""
    import tyro

    sentences, hints = field_sentences(type(base)), get_type_hints(type(base))
    entries: list[tuple[str, Any, Any]] = []
    for entry in fields(base):
        value, kind = getattr(base, entry.name), hints[entry.name]
        if is_dataclass(value):
            section = make_dataclass(kind.__name__, _flag_fields(value), namespace={"__doc__": kind.__doc__})
            entries.append((entry.name, section, field(default_factory=section)))
            continue
        hint = "" if value is None or value == () else None
        if bool in get_args(kind) and NoneType in get_args(kind):
            # only the two switches; "not set" is what leaving out both means
            kind, value = bool, bool(value)
        text = sentences[entry.name] + (f" One of {', '.join(PRESETS)}." if entry.name == "preset" else "")
        argument = tyro.conf.arg(help=text + _other_spellings(entry.name), help_behavior_hint=hint, metavar=_metavar(kind))
        entries.append((entry.name, Annotated[kind, argument], field(default=value)))
    return entries


def _metavar(kind: Any) -> str | None:
    """ "INT|None" for a setting that may be left open; None: what tyro writes for the type is plain enough."""
    choices = [choice for choice in get_args(kind) if choice is not NoneType]
    if NoneType not in get_args(kind) or len(choices) != 1:
        return None
    choice, values = choices[0], get_args(choices[0])
    if get_origin(choice) is tuple:
        name = values[0].__name__.upper()
        return f"{name} [{name} ...]|None"
    return f"{{{','.join(values)}}}|None" if values else f"{choice.__name__.upper()}|None"


def _other_spellings(name: str) -> str:
    """ "Also --tp." for what the alias table has for this field."""
    spellings = []
    for alias_name, alias in ALIASES.items():
        flag = f"--{alias_name.replace('_', '-')}"
        if alias.setting != name or alias_name == name or alias.implied:
            continue
        if not alias.is_switch and alias.values:
            spellings.append(f"{flag} {{{','.join(str(key) for key in alias.values)}}}")
        elif alias.is_switch:
            spellings.append(f"{flag} ({'off' if alias.values[True] is False else alias.values[True]})")
        else:
            spellings.append(flag)
    return f" Also {', '.join(spellings)}." if spellings else ""
