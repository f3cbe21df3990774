"""How many layers each stage gets: Megatron's layout strings, and an automatic split by cost.

Decisions:
- A layout string lists the stages in model order, whatever rank holds them. `E` embedding, `t` layer, `L` head and
  loss, `|` the boundary between two stages, `x*3` and `(xy|)*3` repetition, commas for the eye only. The embedding must
  be in the first stage and the head in the last one, where megalite keeps them; either may be there alone.
- Syntax as in Megatron-LM's --pipeline-model-parallel-layout. `m` (multi-token prediction) is refused: there is none.
- The automatic split makes the busiest rank as light as possible, counting its chunks together, and the embedding and
  the head with them. Of equally good splits it takes the one whose heaviest stage is lightest; layers left over go to
  the earlier stages. The last stage may end up with the head alone; every other stage has a layer.

Costs are relative: only their ratios matter.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass

from megalite.errors import ConfigError

__all__ = ["StageCosts", "balanced_split", "layout_string_violations", "layout_violations", "parse_layout"]

_GROUP = re.compile(r"\(([^()]+)\)\*(\d+)", re.ASCII)
_REPEAT = re.compile(r"([EtLm|])\*(\d+)", re.ASCII)
_MAX_SYMBOLS = 100_000  # a slip such as t*1000000000 must not fill the memory


@dataclass(frozen=True)
class StageCosts:
    """Time of one layer, of the embedding and of the head with the loss, in any unit."""

    layer: float = 1.0
    embedding: float = 0.0
    head: float = 0.0


def layout_violations(layout: str) -> list[str]:
    """Everything that is wrong with a layout string by itself; empty when `parse_layout` can read it."""
    shown = f"pipeline_model_parallel_layout {layout!r}"
    text, problem = _unroll(layout)
    if problem:
        return [f"{shown} {problem}"]
    if "m" in text:
        return [f"{shown} has multi-token prediction layers (m), which megalite does not have: leave them out"]
    unknown = sorted(set(text) - set("EtL|"))
    if unknown:
        return [f"{shown} has {', '.join(map(repr, unknown))}: use E, t, L, |, commas, x*3 and (xy|)*3"]
    violations = []
    stages = text.split("|")
    for letter, what, home, where in (("E", "embedding", stages[0], "first"), ("L", "head", stages[-1], "last")):
        if text.count(letter) != 1 or letter not in home:
            violations.append(f"{shown} needs the {what} {letter} exactly once, in the {where} stage; it has it {text.count(letter)} times")
        elif (letter == "E" and not home.startswith("E")) or (letter == "L" and not home.endswith("L")):
            violations.append(f"{shown} has layers {'before the embedding E' if letter == 'E' else 'behind the head L'}: move them")
    return violations


def parse_layout(layout: str) -> tuple[int, ...]:
    """Layers of each stage in model order. "Et*3|(tt|)*2L" gives 3, 2, 2, 0. Raises ConfigError with all reasons."""
    violations = layout_violations(layout)
    if violations:
        raise ConfigError(violations)
    return tuple(stage.count("t") for stage in _unroll(layout)[0].split("|"))


def layout_string_violations(layout: str, num_ranks: int, num_chunks: int) -> list[str]:
    """The same, and whether the string has a stage for each chunk of each rank."""
    violations = layout_violations(layout)
    num_stages = 0 if violations else len(parse_layout(layout))
    if num_stages and num_stages != num_ranks * num_chunks and num_stages % num_ranks == 0:
        violations.append(
            f"pipeline_model_parallel_layout has {num_stages} stages, {num_stages // num_ranks} for each of {num_ranks} pipeline ranks, "
            f"but {num_chunks} model chunks per rank are set: use --vpp {num_stages // num_ranks}, or a layout of {num_ranks * num_chunks}"
        )
    return violations


def _unroll(layout: str) -> tuple[str, str | None]:
    """The layout without repetitions, or what is wrong with them. Groups do not nest, as in Megatron."""
    text = "".join(layout.split()).replace(",", "")
    for pattern in (_GROUP, _REPEAT):
        size = len(text) + sum(len(match[1]) * int(match[2][:9]) for match in pattern.finditer(text))
        if size > _MAX_SYMBOLS:
            return "", f"stands for more than {_MAX_SYMBOLS} symbols: check the repetitions"
        text = pattern.sub(lambda match: match[1] * int(match[2]), text)
    stray = next((symbol for symbol in text if symbol in "()*0123456789"), None)
    if stray:
        return "", f"has a {stray!r} that belongs to no repetition: write x*3 or (xy|)*3, without nesting"
    return text, None


def balanced_split(num_layers: int, placement: Sequence[int], costs: StageCosts) -> tuple[int, ...]:
    """Layers of each stage, so that the busiest rank is as light as possible. placement[stage]: the stage's rank.

    Raises ConfigError when there are too few layers for the stages, or a cost is not sensible.
    """
    num_stages = len(placement)
    if not (costs.layer > 0 and costs.embedding >= 0 and costs.head >= 0):
        raise ConfigError(f"layer costs must be positive and the ends' not negative, got {costs}")
    if num_layers < max(1, num_stages - 1):
        raise ConfigError(
            f"{num_layers} layers cannot be balanced over {num_stages} pipeline stages: use at most {num_layers + 1} stages "
            "(the last one may hold the head alone), or an explicit layout"
        )
    fixed = [0.0] * num_stages
    fixed[0] += costs.embedding
    fixed[-1] += costs.head
    counts = [1] * (num_stages - 1) + [0] if num_stages > 1 else [0]

    def loads_with_another(stage: int) -> tuple[float, float, int]:
        rank = placement[stage]
        on_rank = sum(fixed[s] + costs.layer * counts[s] for s in range(num_stages) if placement[s] == rank)
        return on_rank, fixed[stage] + costs.layer * counts[stage], stage

    # All layers cost the same, so giving each to where it hurts least is optimal.
    for _ in range(num_layers - sum(counts)):
        counts[min(range(num_stages), key=loads_with_another)] += 1
    return tuple(counts)
