"""Reads REGEX=FACTOR settings: factors of the learning rate or the weight decay for the parameters that a regular expression is found in.

Decisions
- The last "=" separates, so an expression may hold one. `re.search` decides: no anchors are added.
- Of several expressions that are found in a name the last one counts; factors are not multiplied with each other.
- An expression that is found in no name of the model is an error when the names are known: a typing mistake would otherwise train
  the model with the wrong settings.
"""

from __future__ import annotations

import difflib
import math
import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from megalite.errors import ConfigError

__all__ = ["Multipliers"]

_MOST_SHOWN = 5


@dataclass(frozen=True)
class Multipliers:
    """(expression, factor) pairs of the setting `name`, in the order given."""

    name: str
    pairs: tuple[tuple[re.Pattern[str], float], ...]

    @classmethod
    def parse(cls, entries: Sequence[str], name: str) -> Multipliers:
        """Raises ConfigError with every entry that is not REGEX=FACTOR with a factor of 0 or more."""
        pairs, violations = [], []
        for entry in entries:
            expression, separator, text = entry.rpartition("=")
            if not separator or not expression:
                violations.append(f"{name} {entry!r} is not REGEX=FACTOR, such as 'embedding=0.1'")
                continue
            try:
                factor = float(text)
            except ValueError:
                factor = math.nan
            if not 0 <= factor < math.inf:
                violations.append(f"{name} {entry!r}: the factor {text!r} is not a number of 0 or more")
            try:
                pairs.append((re.compile(expression), factor))
            except re.error as error:
                violations.append(f"{name} {entry!r}: {expression!r} is not a regular expression ({error})")
        if violations:
            raise ConfigError(violations)
        return cls(name, tuple(pairs))

    def factor_of(self, parameter: str) -> float | None:
        """The factor of the parameter with this logical name; None where no expression is found in it."""
        for expression, factor in reversed(self.pairs):
            if expression.search(parameter):
                return factor
        return None

    def check_names(self, parameters: Iterable[str]) -> None:
        """Raises ConfigError for every expression that is found in none of the model's names, with names that are near to it."""
        names = sorted(parameters)
        unused = [expression.pattern for expression, _ in self.pairs if not any(map(expression.search, names))]
        if unused:
            raise ConfigError(
                [f"{self.name}: {pattern!r} is found in no parameter's name; near it are {_near(pattern, names)}" for pattern in unused]
            )


def _near(pattern: str, names: Sequence[str]) -> str:
    """A few names like the pattern. Layers have the same names but for their numbers: only the first of each kind is looked at."""
    kinds: dict[str, str] = {}
    for name in names:
        kinds.setdefault(re.sub(r"\d+", "N", name), name)
    literal = re.sub(r"[^\w.]|\\.", "", pattern)
    scores = {name: max(_likeness(literal, part) for part in (name, *name.split("."))) for name in kinds.values()}
    nearest = sorted(scores, key=lambda name: -scores[name])
    return ", ".join(nearest[:_MOST_SHOWN])


def _likeness(a: str, b: str) -> float:
    return difflib.SequenceMatcher(None, a, b).ratio()
