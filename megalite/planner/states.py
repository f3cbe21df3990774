"""Bytes of weights, gradients and optimizer state of a rank, and of what data parallelism gathers and reduces.

Decisions
- The table in `data_parallel.shard` as arithmetic: one line here per column there. A rank's slice of a parameter is
  ceil(rows / dp_shard) rows: the fullest rank is predicted.
- Master weights, their gradients and (by default) the state are fp32: with AdamW 16 bytes per parameter for one rank, and 16 / N with
  ZeRO 3 over N ranks (Rajbhandari et al. 2020, arXiv:1910.02054, counts 16-bit copies beside them: here these are the gathered weights).
- Gathering and reducing pass through flat buffers of one unit. With ZeRO 3 two units are gathered at a time, the one at work and the
  next; else all of them stay for the step.
- Pure Python: shapes in, bytes out.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise
from math import prod

__all__ = ["ParameterShape", "Sharding", "StateMemory", "state_memory"]

_MASTER = 4  # bytes of an element of a master weight or its gradient


@dataclass(frozen=True, kw_only=True)
class ParameterShape:
    """unit: what it is gathered with; shape: this tp rank's part; state_itemsize: bytes of optimizer state per element."""

    unit: str
    shape: tuple[int, ...]
    state_itemsize: float
    is_trained: bool = True

    @property
    def numel(self) -> int:
        return prod(self.shape)

    def slice_numel(self, ranks: int) -> int:
        """Elements of the largest of `ranks` slices of dimension 0."""
        return -(-self.shape[0] // ranks) * prod(self.shape[1:]) if self.shape else 1


@dataclass(frozen=True, kw_only=True)
class Sharding:
    """Data parallelism as numbers. Itemsizes: bytes of an element in the computation, and in sums over ranks."""

    zero: int
    dp_shard: int
    dp_replicate: int
    compute_itemsize: int
    reduce_itemsize: int

    @property
    def is_wrapped(self) -> bool:
        """One rank in fp32 is left alone."""
        return self.dp_shard * self.dp_replicate > 1 or self.compute_itemsize != _MASTER


@dataclass(frozen=True, kw_only=True)
class StateMemory:
    """Bytes. gradients: as the optimizer finds them; waiting: whole gradients that ZeRO 1 adds up before it cuts them; gathered: weights
    that a step holds beside the masters; buffers: what one unit's collective needs for a moment."""

    weights: int
    gradients: int
    optimizer: int
    waiting: int
    gathered: int
    buffers: int


def state_memory(parameters: Sequence[ParameterShape], sharding: Sharding) -> StateMemory:
    """parameters: of all stages of the rank, units in order of use."""
    ranks = sharding.dp_shard if sharding.zero > 0 else 1
    trained = [parameter for parameter in parameters if parameter.is_trained]
    gradients = _MASTER * sum(parameter.slice_numel(ranks) for parameter in trained)
    whole = sum(parameter.numel for parameter in trained)
    units = _unit_sizes(parameters)
    largest = max(units, default=0)
    gathered = buffers = waiting = 0
    if sharding.is_wrapped:
        pairs = [first + second for first, second in pairwise(units)]
        at_a_time = max(pairs, default=largest) if sharding.zero == 3 else sum(units)
        gathered = sharding.compute_itemsize * at_a_time
        buffers = largest * (sharding.compute_itemsize + sharding.reduce_itemsize)
        waiting = max(0, sharding.reduce_itemsize * whole - gradients) if sharding.zero < 2 else 0
    return StateMemory(
        weights=_MASTER * sum(parameter.slice_numel(ranks) for parameter in parameters),
        gradients=gradients,
        optimizer=round(sum(parameter.state_itemsize * parameter.slice_numel(ranks) for parameter in trained)),
        waiting=waiting,
        gathered=gathered,
        buffers=buffers,
    )


def _unit_sizes(parameters: Sequence[ParameterShape]) -> list[int]:
    sizes: dict[str, int] = {}
    for parameter in parameters:
        sizes[parameter.unit] = sizes.get(parameter.unit, 0) + parameter.numel
    return list(sizes.values())
