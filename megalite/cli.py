"""From the command line to a `RunConfig`: defaults < preset < --config file < flags.

Decisions
- One flag per field, without sections, in Megatron's spelling; other spellings go through `aliases.ALIASES`, the table
  that TOML keys go through as well. Abbreviations are not flags.
- Names are settled here, all wrong ones in one message; values are parsed, and the help is written, by tyro.
- A flag that is repeated in the same spelling counts the last time, so that a script can end in "$@". Two spellings of
  one setting are an error.
- A user's mistake ends the program with exit code 2 and without a traceback, printed once per node.
"""

from __future__ import annotations

import os
import sys
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from pathlib import Path
from types import NoneType
from typing import Any, NoReturn, get_args, get_origin

from megalite.aliases import ALIASES, UNSUPPORTED, Alias, resolve_alias
from megalite.cli_help import parse_values, show_help
from megalite.config import RunConfig
from megalite.config_io import assign, field_types, implied_violations, read_sections, read_toml, suggest
from megalite.errors import ConfigError
from megalite.presets import apply_preset
from megalite.validate import launched_ranks, validate

__all__ = ["parse_and_validate", "parse_run_config", "read_run_config"]

CONFIG = "config"  # the one flag that is not a setting: a TOML file of settings


def parse_run_config(argv: Sequence[str], prog: str, description: str) -> RunConfig:
    """The run that a command line describes, not yet validated. Exits with code 2 on a mistake, with 0 after --help."""
    try:
        return read_run_config(argv, prog, description)
    except ConfigError as error:
        _exit(prog, error)


def parse_and_validate(argv: Sequence[str], prog: str, description: str) -> RunConfig:
    """As `parse_run_config`, and checked for the number of ranks that torchrun launched (1 without torchrun)."""
    config = parse_run_config(argv, prog, description)
    try:
        validate(config, launched_ranks(os.environ))
    except ConfigError as error:
        _exit(prog, error)
    return config


def read_run_config(argv: Sequence[str], prog: str, description: str) -> RunConfig:
    """As `parse_run_config`, but raises ConfigError for wrong names; wrong values and --help still exit."""
    if any(token in ("-h", "--help") for token in argv):
        show_help(prog, description)
    flags = _Flags.read(argv, field_types(RunConfig))
    base = _base(flags.single("preset"), flags.single(CONFIG))
    parsed = parse_values(flags.canonical(), base, prog, description, speaks=_speaks())
    config = assign(base, {name: parsed[name] for name in flags.values if name != CONFIG})
    missing = implied_violations(config, flags.implied)
    if missing:
        raise ConfigError(missing)
    return config


def _base(preset: str | None, config_file: str | None) -> RunConfig:
    """What stands before the flags: defaults, preset, file."""
    document = {} if config_file is None else _read_file(config_file)
    named = document.get("preset")
    if isinstance(named, str) and named != "None":
        if preset not in (None, named):
            raise ConfigError(f"{config_file} is for preset {named!r}, the command line says {preset!r}: keep one")
        preset = named
    base = RunConfig() if preset is None else apply_preset(RunConfig(), preset)
    try:
        return read_sections(base, document)
    except ConfigError as error:
        raise ConfigError([f"{config_file}: {text}" for text in error.violations]) from error


def _read_file(path: str) -> dict[str, Any]:
    try:
        return read_toml(Path(path).read_text(encoding="utf-8"))
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"--config {path} cannot be read: {error}") from error
    except ConfigError as error:
        raise ConfigError(f"{path}: {error}") from error


@dataclass
class _Flags:
    """Settings on the command line: field name -> its values as text, or a bool for a switch."""

    types: Mapping[str, Any]
    values: dict[str, list[str] | bool] = field(default_factory=dict)
    spelled: dict[str, str] = field(default_factory=dict)
    implied: dict[str, str] = field(default_factory=dict)

    @classmethod
    def read(cls, argv: Sequence[str], types: Mapping[str, tuple[str | None, Any]]) -> _Flags:
        """Raises ConfigError listing every token that has no meaning."""
        flags = cls({name: kind for name, (_, kind) in types.items()} | {CONFIG: str | None})
        problems: list[str] = []
        starts = [index for index, token in enumerate(argv) if token.startswith("--")]
        if argv and 0 not in starts:
            problems.append(f"unexpected argument {argv[0]!r}: settings are written --name value")
        for start, end in pairwise([*starts, len(argv)]):
            token, *inline = argv[start].split("=", 1)
            try:
                flags.add(token, inline + list(argv[start + 1 : end]))
            except ConfigError as error:
                problems += error.violations
        if problems:
            raise ConfigError(problems)
        return flags

    def add(self, token: str, texts: list[str]) -> None:
        """One flag as written and the texts after it. Raises ConfigError."""
        key = token.removeprefix("--").replace("-", "_")
        negated = key not in self.types and key.startswith("no_") and self._is_switch(key[3:])
        key, switched = (key[3:], False) if negated else (key, True)
        if key in UNSUPPORTED:
            raise ConfigError(f"{token} is not a setting of megalite: {UNSUPPORTED[key]}")
        if key not in self.types and key not in ALIASES:
            raise ConfigError(f"unknown flag {token}{self._suggest(token)}")
        name, spelling, value = key, key, self._value(token, key, switched, texts)
        if key in ALIASES:
            alias = ALIASES[key]
            if alias.implied:
                self.implied[token] = alias.setting
                return
            name, value = _through_table(key, value, token)
        earlier = self.spelled.get(name, spelling)
        if earlier != spelling:
            raise ConfigError(f"{_dashed(earlier)} and {_dashed(spelling)} are the same setting: keep one of them")
        self.spelled[name], self.values[name] = spelling, value

    def single(self, name: str) -> str | None:
        """The text of a setting that is needed before the others are parsed."""
        value = self.values.get(name)
        return value[0] if isinstance(value, list) and value[0] != "None" else None

    def canonical(self) -> list[str]:
        """The command line with every setting under its field's name."""
        tokens: list[str] = []
        for name, value in self.values.items():
            if isinstance(value, bool):
                tokens.append(_dashed(name if value else f"no_{name}"))
            else:
                tokens += [_dashed(name), *value]
        return tokens

    def _is_switch(self, key: str) -> bool:
        alias = ALIASES.get(key, Alias(key))
        return alias.is_switch or _is_bool(self.types.get(alias.setting if not alias.values else key))

    def _value(self, token: str, key: str, switched: bool, texts: list[str]) -> list[str] | bool:
        if self._is_switch(key):
            if texts:
                raise ConfigError(f"{token} takes no value, got {' '.join(texts)!r}: write {token} alone")
            return switched
        if get_origin(_bare(self.types[ALIASES.get(key, Alias(key)).setting])) is tuple:
            if not texts:
                raise ConfigError(f"{token} needs one value or more after it")
        elif len(texts) != 1:
            shown = f", got {len(texts)}: {' '.join(texts)}" if texts else ""
            raise ConfigError(f"{token} needs one value after it{shown}")
        return texts

    def _suggest(self, token: str) -> str:
        known = [*self.types, *ALIASES]
        known += [f"no_{name}" for name in known if self._is_switch(name)]
        return suggest(token, [_dashed(name) for name in known])


def _dashed(name: str) -> str:
    return f"--{name.replace('_', '-')}"


def _through_table(key: str, value: list[str] | bool, token: str) -> tuple[str, list[str] | bool]:
    """The field and the value that an alias stands for, as text again."""
    alias = ALIASES[key]
    if not alias.values:
        return alias.setting, value
    written = value if isinstance(value, bool) else _as_key(value[0], alias)
    name, meant = resolve_alias(key, written, token)
    return name, meant if isinstance(meant, bool) else [str(meant)]


def _as_key(text: str, alias: Alias) -> Any:
    """The table's key that is written `text`, or the text itself."""
    return next((key for key in alias.values if str(key) == text), text)


def _bare(kind: Any) -> Any:
    """X for X | None."""
    parts = [part for part in get_args(kind) if part is not NoneType]
    return parts[0] if NoneType in get_args(kind) and len(parts) == 1 else kind


def _is_bool(kind: Any) -> bool:
    return _bare(kind) is bool


def _speaks() -> bool:
    """Whether this process says what is wrong: of all ranks of a node, which find the same mistake, the first."""
    return os.environ.get("LOCAL_RANK", "0") == "0"


SILENT_RANKS_WAIT_S = 10.0


def _exit(prog: str, error: ConfigError) -> NoReturn:
    if _speaks():
        sys.stderr.write(f"{prog}: {error}\n({prog} --help lists all settings)\n")
    else:  # a launcher ends all ranks when one has ended: it must not be this one before the message is out
        time.sleep(SILENT_RANKS_WAIT_S)
    raise SystemExit(2)
