"""Pipeline schedules as data: for each rank, the list of actions it computes, in order.

Decisions:
- A schedule never touches a tensor. The same object is lowered (transfers are added), verified, simulated and executed.
- Stages are global virtual stage numbers 0 .. p*v-1 in model order; `placement` says which rank holds each. The
  schedules here place round robin: chunk c of rank r is stage c*p + r.
- Backward passes of a stage run in ascending micro-batch order in every schedule, GPipe included. Gradients are
  therefore added up in one order, and a run's numbers do not depend on its schedule.
- Interleaved 1F1B walks through groups of N micro-batches, N >= p. N = p needs the least memory but only fits when p
  divides m; without an explicit group size we take the smallest N that fits m, so that every m >= p can run.

Letters: p ranks, r one of them, v model chunks per rank, m micro-batches per step, N group size.
"""

from __future__ import annotations

import string
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from enum import StrEnum
from typing import NamedTuple

from megalite.errors import ScheduleError

__all__ = [
    "SCHEDULES",
    "Action",
    "Kind",
    "Recipe",
    "Schedule",
    "build_schedule",
    "dependencies",
    "forward_only",
    "gpipe",
    "interleaved_one_f_one_b",
    "one_f_one_b",
    "product",
    "schedule_violations",
]


class Kind(StrEnum):
    """What an action computes. A backward is one B, or its two halves I (what the previous stage waits for) and W."""

    FORWARD = "F"
    BACKWARD = "B"
    INPUT_GRAD = "I"
    WEIGHT_GRAD = "W"


class Action(NamedTuple):
    """One computation: `kind` for one micro-batch on one global stage."""

    kind: Kind
    stage: int
    microbatch: int


@dataclass(frozen=True)
class Schedule:
    """Who computes what in which order.

    placement[stage] is the rank of a stage; orders[rank] are its actions. `has_backward` is False for evaluation.
    """

    name: str
    num_ranks: int
    num_microbatches: int
    num_chunks: int
    placement: tuple[int, ...]
    orders: tuple[tuple[Action, ...], ...]
    has_backward: bool = True

    @property
    def num_stages(self) -> int:
        return len(self.placement)

    def stages_of(self, rank: int) -> tuple[int, ...]:
        """The global stages on this rank in model order: its chunks."""
        return tuple(stage for stage, owner in enumerate(self.placement) if owner == rank)

    def label(self, action: Action) -> str:
        """Short name of an action inside its rank: kind, micro-batch and, with several chunks, the chunk's letter."""
        text = f"{action.kind}{action.microbatch}"
        if self.num_chunks == 1:
            return text
        if not 0 <= action.stage < self.num_stages:
            return f"{text}?"
        chunk = self.placement[: action.stage].count(self.placement[action.stage])
        return text + (string.ascii_lowercase[chunk] if chunk < 26 else f".{chunk}")


def product(action: Action) -> Action:
    """What others can wait for: I gives the same input gradient as B, so both are filed under B."""
    return action._replace(kind=Kind.BACKWARD) if action.kind == Kind.INPUT_GRAD else action


def dependencies(action: Action, num_stages: int) -> list[Action]:
    """The products that must exist before this action can start; see `product`."""
    kind, stage, microbatch = action
    if kind == Kind.FORWARD:
        return [Action(Kind.FORWARD, stage - 1, microbatch)] if stage > 0 else []
    if kind == Kind.WEIGHT_GRAD:
        return [Action(Kind.BACKWARD, stage, microbatch)]
    needed = [Action(Kind.FORWARD, stage, microbatch)]
    if stage < num_stages - 1:
        needed.append(Action(Kind.BACKWARD, stage + 1, microbatch))
    return needed


# ---- generators ------------------------------------------------------------------------------------------------------


def gpipe(num_ranks: int, num_microbatches: int) -> Schedule:
    """All forwards, then all backwards. Raises ScheduleError for numbers below 1."""
    _require("gpipe", num_ranks, num_microbatches, 1)
    warmups = [num_microbatches] * num_ranks
    return _one_chunk("gpipe", num_ranks, num_microbatches, warmups)


def one_f_one_b(num_ranks: int, num_microbatches: int) -> Schedule:
    """1F1B: p-1-r forwards to fill the pipeline, then forward and backward in turn. Any m, also m < p."""
    _require("1f1b", num_ranks, num_microbatches, 1)
    warmups = [min(num_ranks - 1 - rank, num_microbatches) for rank in range(num_ranks)]
    return _one_chunk("1f1b", num_ranks, num_microbatches, warmups)


def interleaved_one_f_one_b(num_ranks: int, num_microbatches: int, num_chunks: int, group_size: int | None = None) -> Schedule:
    """Interleaved 1F1B: v chunks per rank, micro-batches in groups of N that pass chunk 0, then chunk 1, and so on.

    group_size: N; by default the smallest one that fits. A larger N holds (v-1)(N-p) more chunk activations per rank.
    Raises ScheduleError unless v >= 2, p <= N <= m, and the last group is full or has at least p micro-batches.
    """
    _require("interleaved-1f1b", num_ranks, num_microbatches, num_chunks)
    if group_size is None:
        group_size = next(n for n in range(num_ranks, num_microbatches + 1) if _fits(num_ranks, num_microbatches, n))
    elif not _fits(num_ranks, num_microbatches, group_size):
        raise ScheduleError(_group_violation(num_ranks, num_microbatches, group_size))
    table = _virtual_table(num_microbatches, num_chunks, group_size)
    orders = []
    for rank in range(num_ranks):
        forwards = [Action(Kind.FORWARD, chunk * num_ranks + rank, mb) for chunk, mb in table]
        backwards = [Action(Kind.BACKWARD, (num_chunks - 1 - chunk) * num_ranks + rank, mb) for chunk, mb in table]
        warmup = min(2 * (num_ranks - rank - 1) + (num_chunks - 1) * group_size, len(table))
        orders.append(_alternate(forwards, backwards, warmup))
    placement = _round_robin(num_ranks, num_chunks)
    return Schedule("interleaved-1f1b", num_ranks, num_microbatches, num_chunks, placement, tuple(orders))


def forward_only(num_ranks: int, num_microbatches: int, num_chunks: int = 1) -> Schedule:
    """Evaluation: the forwards of an interleaved pipeline, no backwards. Any m and v; the last group may be short."""
    violations = _number_violations(num_ranks, num_microbatches, num_chunks)
    if violations:
        raise ScheduleError("; ".join(violations))
    table = _virtual_table(num_microbatches, num_chunks, num_ranks)
    orders = tuple(tuple(Action(Kind.FORWARD, chunk * num_ranks + rank, mb) for chunk, mb in table) for rank in range(num_ranks))
    placement = _round_robin(num_ranks, num_chunks)
    return Schedule("forward-only", num_ranks, num_microbatches, num_chunks, placement, orders, has_backward=False)


def _one_chunk(name: str, num_ranks: int, num_microbatches: int, warmups: Sequence[int]) -> Schedule:
    orders = []
    for rank, warmup in enumerate(warmups):
        forwards = [Action(Kind.FORWARD, rank, mb) for mb in range(num_microbatches)]
        backwards = [Action(Kind.BACKWARD, rank, mb) for mb in range(num_microbatches)]
        orders.append(_alternate(forwards, backwards, warmup))
    return Schedule(name, num_ranks, num_microbatches, 1, _round_robin(num_ranks, 1), tuple(orders))


def _alternate(forwards: Sequence[Action], backwards: Sequence[Action], warmup: int) -> tuple[Action, ...]:
    """`warmup` forwards, then forward and backward in turn, then the backwards that are left."""
    order = list(forwards[:warmup])
    for forward, backward in zip(forwards[warmup:], backwards, strict=False):
        order += [forward, backward]
    return (*order, *backwards[len(forwards) - warmup :])


def _virtual_table(num_microbatches: int, num_chunks: int, group_size: int) -> list[tuple[int, int]]:
    """(chunk, micro-batch) in forward order. m=3, v=2, N=2: (0,0) (0,1) (1,0) (1,1) (0,2) (1,2)."""
    return [
        (chunk, microbatch)
        for first in range(0, num_microbatches, group_size)
        for chunk in range(num_chunks)
        for microbatch in range(first, min(first + group_size, num_microbatches))
    ]


def _round_robin(num_ranks: int, num_chunks: int) -> tuple[int, ...]:
    return tuple(range(num_ranks)) * num_chunks


# ---- constraints and registry ----------------------------------------------------------------------------------------


def _number_violations(num_ranks: int, num_microbatches: int, num_chunks: int) -> list[str]:
    numbers = {"pipeline ranks": num_ranks, "micro-batches": num_microbatches, "model chunks per rank": num_chunks}
    return [f"a schedule needs at least 1 of {what}, got {number}" for what, number in numbers.items() if number < 1]


def _one_chunk_violations(num_ranks: int, num_microbatches: int, num_chunks: int) -> list[str]:
    if num_chunks == 1:
        return []
    return [f"this schedule has one model chunk per rank, got {num_chunks}: use a virtual pipeline size of 1, or schedule interleaved-1f1b"]


def _interleaved_violations(num_ranks: int, num_microbatches: int, num_chunks: int) -> list[str]:
    violations = []
    if num_chunks == 1:
        violations.append("interleaving needs at least 2 model chunks per rank, got 1: use schedule 1f1b")
    if num_microbatches < num_ranks:
        violations.append(
            f"interleaving needs at least as many micro-batches as pipeline ranks, got {num_microbatches} for "
            f"{num_ranks} ranks: use {num_ranks} or more micro-batches (larger global batch or smaller micro-batch), "
            f"at most {num_microbatches} ranks, or schedule 1f1b"
        )
    return violations


def _fits(num_ranks: int, num_microbatches: int, group_size: int) -> bool:
    """With a group shorter than p, chunk 1 is due before micro-batch 0 has come round: ranks idle or deadlock."""
    if not num_ranks <= group_size <= num_microbatches:
        return False
    rest = num_microbatches % group_size
    return rest == 0 or rest >= num_ranks


def _group_violation(num_ranks: int, num_microbatches: int, group_size: int) -> str:
    groups = [n for n in range(num_ranks, num_microbatches + 1) if _fits(num_ranks, num_microbatches, n)]
    nearby = range(max(1, num_microbatches - group_size), num_microbatches + 2 * max(group_size, 1))
    usable = [m for m in nearby if _fits(num_ranks, m, group_size)][:6]
    remedy = f"use a group size out of {groups}" + (f", or one of {usable} micro-batches" if usable else "")
    return (
        f"group size {group_size} does not fit {num_microbatches} micro-batches on {num_ranks} pipeline ranks (it must "
        f"lie between the two, and the last group must be full or hold at least {num_ranks}): {remedy}"
    )


@dataclass(frozen=True)
class Recipe:
    """How to build a schedule from (num_ranks, num_microbatches, num_chunks), and what is wrong with such numbers."""

    build: Callable[[int, int, int], Schedule]
    violations: Callable[[int, int, int], list[str]]


SCHEDULES: Mapping[str, Recipe] = {
    "gpipe": Recipe(lambda p, m, v: gpipe(p, m), _one_chunk_violations),
    "1f1b": Recipe(lambda p, m, v: one_f_one_b(p, m), _one_chunk_violations),
    "interleaved-1f1b": Recipe(interleaved_one_f_one_b, _interleaved_violations),
}


def schedule_violations(name: str, num_ranks: int, num_microbatches: int, num_chunks: int) -> list[str]:
    """Why this schedule cannot be built, one sentence each with its remedy; empty when it can."""
    if name not in SCHEDULES:
        return [f"unknown pipeline schedule {name!r}: use one of {', '.join(SCHEDULES)}"]
    numbers = (num_ranks, num_microbatches, num_chunks)
    violations = _number_violations(*numbers) or SCHEDULES[name].violations(*numbers)
    return [f"pipeline schedule {name}: {text}" for text in violations]


def _require(name: str, num_ranks: int, num_microbatches: int, num_chunks: int) -> None:
    violations = schedule_violations(name, num_ranks, num_microbatches, num_chunks)
    if violations:
        raise ScheduleError("; ".join(violations))


def build_schedule(name: str, num_ranks: int, num_microbatches: int, num_chunks: int) -> Schedule:
    """The named schedule. Raises ScheduleError for an unknown name or numbers that it cannot run."""
    _require(name, num_ranks, num_microbatches, num_chunks)
    return SCHEDULES[name].build(num_ranks, num_microbatches, num_chunks)
