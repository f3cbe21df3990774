"""Which layers each pipeline stage holds.

Decisions:
- A stage is a global virtual stage number 0..num_stages-1 in model order; which rank holds it, the schedule says.
- The embedding sits on the first stage and the head on the last one; neither counts as a layer.
- By default the split is as even as possible. Left-over layers go to the stages that hold neither the embedding nor the
  head, in model order, then to the first stage. The last stage never has more layers than another one, because the head
  and the loss already make it the most expensive: 7 layers over 4 stages are 2, 2, 2, 1; 5 over 4 are 1, 2, 1, 1.
- An explicit layout is taken as it is, stages without layers included: whoever writes a 0 wants a stage with only the
  embedding or only the head. Layers are never dropped.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from megalite.errors import ConfigError

__all__ = ["StageSpec", "partition_violations", "split_layers"]


@dataclass(frozen=True)
class StageSpec:
    """What one stage holds: global layers first_layer .. first_layer+num_layers-1, perhaps embedding or head."""

    stage: int
    first_layer: int
    num_layers: int
    has_embedding: bool
    has_head: bool

    @property
    def layers(self) -> range:
        """The global layer numbers of this stage."""
        return range(self.first_layer, self.first_layer + self.num_layers)


def partition_violations(num_layers: int, num_stages: int, layout: Sequence[int] | None = None) -> list[str]:
    """Everything that makes this split impossible, one sentence each with its remedy; empty when it is possible."""
    violations = []
    if num_layers < 1:
        violations.append(f"a model needs at least 1 layer, got {num_layers}")
    if num_stages < 1:
        violations.append(f"a pipeline needs at least 1 stage, got {num_stages}")
    if violations:
        return violations
    if layout is not None:
        return _layout_violations(num_layers, num_stages, layout)
    if num_stages > num_layers:
        violations.append(
            f"{num_layers} layers cannot fill {num_stages} pipeline stages (ranks x chunks): use at most {num_layers} "
            "stages, or an explicit layout that names the stages with 0 layers"
        )
    return violations


def _layout_violations(num_layers: int, num_stages: int, layout: Sequence[int]) -> list[str]:
    violations = []
    shown = ",".join(str(count) for count in layout)
    if len(layout) != num_stages:
        violations.append(
            f"the pipeline layout {shown} names {len(layout)} stages, the pipeline has {num_stages} (ranks x chunks): "
            "give one number of layers per stage, in model order"
        )
    if any(count < 0 for count in layout):
        violations.append(f"the pipeline layout {shown} has a negative number of layers: use 0 or more")
    if sum(layout) != num_layers:
        violations.append(
            f"the pipeline layout {shown} places {sum(layout)} layers, the model has {num_layers}: "
            f"{'add' if sum(layout) < num_layers else 'take away'} {abs(num_layers - sum(layout))}"
        )
    return violations


def split_layers(num_layers: int, num_stages: int, layout: Sequence[int] | None = None) -> list[StageSpec]:
    """One StageSpec per stage, in model order; every layer in exactly one of them.

    layout: layers per stage (num_stages numbers that sum to num_layers), or None for the even split described above.
    Raises ConfigError with all reasons when the split is impossible.
    """
    violations = partition_violations(num_layers, num_stages, layout)
    if violations:
        raise ConfigError(violations)
    counts = _even_counts(num_layers, num_stages) if layout is None else list(layout)
    return [
        StageSpec(
            stage=stage,
            first_layer=sum(counts[:stage]),
            num_layers=count,
            has_embedding=stage == 0,
            has_head=stage == num_stages - 1,
        )
        for stage, count in enumerate(counts)
    ]


def _even_counts(num_layers: int, num_stages: int) -> list[int]:
    base, extra = divmod(num_layers, num_stages)
    counts = [base] * num_stages
    # extra < num_stages, so the last stage never gets one
    for stage in [*range(1, num_stages - 1), 0][:extra]:
        counts[stage] += 1
    return counts
