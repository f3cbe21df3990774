"""Schedules with an undivided backward on the round-robin placement: GPipe, 1F1B, interleaved 1F1B, looped BFS.

Decisions:
- Backwards of a stage run in ascending micro-batch order, although the papers of GPipe and of breadth-first pipelines
  run them in descending order. Gradients are then added up in one order whatever the schedule; the makespan is the same.
- Interleaved 1F1B walks through groups of N micro-batches, N >= p. N = p needs the least memory but only fits when p
  divides m; without an explicit group size we take the smallest N that fits m, so that every m >= p can run.

Sources: GPipe arXiv 1811.06965; 1F1B (PipeDream-flush) and interleaved 1F1B arXiv 2104.04473; N as a setting
arXiv 2407.21783; looped BFS arXiv 2211.05953.

Letters: p ranks, r one of them, v model chunks per rank, m micro-batches per step, N group size.
"""

from __future__ import annotations

from collections.abc import Sequence

from megalite.errors import ScheduleError
from megalite.pipeline.schedules.actions import Action, Kind, Schedule, round_robin
from megalite.pipeline.schedules.constraints import (
    group_size_violations,
    interleaved_violations,
    number_violations,
    smallest_group,
)

__all__ = ["forward_only", "gpipe", "interleaved_one_f_one_b", "looped_bfs", "one_f_one_b", "refuse"]


def gpipe(num_ranks: int, num_microbatches: int) -> Schedule:
    """All forwards, then all backwards. Raises ScheduleError for numbers below 1."""
    refuse("gpipe", number_violations(num_ranks, num_microbatches, 1))
    return _one_chunk("gpipe", num_ranks, num_microbatches, [num_microbatches] * num_ranks)


def one_f_one_b(num_ranks: int, num_microbatches: int) -> Schedule:
    """1F1B: p-1-r forwards to fill the pipeline, then forward and backward in turn. Any m, also m < p."""
    refuse("1f1b", number_violations(num_ranks, num_microbatches, 1))
    warmups = [min(num_ranks - 1 - rank, num_microbatches) for rank in range(num_ranks)]
    return _one_chunk("1f1b", num_ranks, num_microbatches, warmups)


def interleaved_one_f_one_b(num_ranks: int, num_microbatches: int, num_chunks: int, group_size: int | None = None) -> Schedule:
    """Interleaved 1F1B: v chunks per rank, micro-batches in groups of N that pass chunk 0, then chunk 1, and so on.

    group_size: N; by default the smallest one that fits. A larger N holds (v-1)(N-p) more chunk activations per rank.
    Raises ScheduleError unless v >= 2, p <= N <= m, and the last group is full or has at least p micro-batches.
    """
    numbers = (num_ranks, num_microbatches, num_chunks)
    refuse("interleaved-1f1b", number_violations(*numbers) or interleaved_violations(*numbers))
    if group_size is None:
        group_size = smallest_group(num_ranks, num_microbatches)
    refuse("interleaved-1f1b", group_size_violations(num_ranks, num_microbatches, group_size))
    table = _virtual_table(num_microbatches, num_chunks, group_size)
    warmups = [min(2 * (num_ranks - rank - 1) + (num_chunks - 1) * group_size, len(table)) for rank in range(num_ranks)]
    return _looped("interleaved-1f1b", numbers, table, warmups)


def looped_bfs(num_ranks: int, num_microbatches: int, num_chunks: int) -> Schedule:
    """Breadth first: all forwards of chunk 0, of chunk 1, ...; then all backwards of the last chunk, ... of chunk 0."""
    numbers = (num_ranks, num_microbatches, num_chunks)
    refuse("looped-bfs", number_violations(*numbers))
    table = _virtual_table(num_microbatches, num_chunks, num_microbatches)
    return _looped("looped-bfs", numbers, table, [len(table)] * num_ranks)


def forward_only(num_ranks: int, num_microbatches: int, num_chunks: int = 1, placement: tuple[int, ...] | None = None) -> Schedule:
    """Evaluation: forwards without backwards, for any m, v and placement (by default round robin).

    On the round-robin placement the order is that of the interleaved schedule, and its last group may be short.
    Elsewhere each rank follows the wavefront stage + micro-batch, which every dependency increases; at equal heights
    the deeper stage comes first.
    """
    refuse("forward-only", number_violations(num_ranks, num_microbatches, num_chunks))
    if placement is None or placement == round_robin(num_ranks, num_chunks):
        table = _virtual_table(num_microbatches, num_chunks, num_ranks)
        orders = tuple(tuple(Action(Kind.FORWARD, chunk * num_ranks + rank, mb) for chunk, mb in table) for rank in range(num_ranks))
        placement = round_robin(num_ranks, num_chunks)
    else:
        wave = sorted(
            (Action(Kind.FORWARD, stage, mb) for stage in range(len(placement)) for mb in range(num_microbatches)),
            key=lambda action: (action.stage + action.microbatch, action.microbatch),
        )
        orders = tuple(tuple(action for action in wave if placement[action.stage] == rank) for rank in range(num_ranks))
    return Schedule("forward-only", num_ranks, num_microbatches, num_chunks, placement, orders, has_backward=False)


def refuse(name: str, violations: Sequence[str]) -> None:
    """Raise ScheduleError when there are any."""
    if violations:
        raise ScheduleError("; ".join(f"pipeline schedule {name}: {text}" for text in violations))


def _one_chunk(name: str, num_ranks: int, num_microbatches: int, warmups: Sequence[int]) -> Schedule:
    table = [(0, microbatch) for microbatch in range(num_microbatches)]
    return _looped(name, (num_ranks, num_microbatches, 1), table, warmups)


def _looped(name: str, numbers: tuple[int, int, int], table: Sequence[tuple[int, int]], warmups: Sequence[int]) -> Schedule:
    """Forwards in the order of the table; backwards in the same order with the chunks counted from the other end."""
    num_ranks, num_microbatches, num_chunks = numbers
    orders = []
    for rank, warmup in enumerate(warmups):
        forwards = [Action(Kind.FORWARD, chunk * num_ranks + rank, mb) for chunk, mb in table]
        backwards = [Action(Kind.BACKWARD, (num_chunks - 1 - chunk) * num_ranks + rank, mb) for chunk, mb in table]
        orders.append(_alternate(forwards, backwards, warmup))
    return Schedule(name, num_ranks, num_microbatches, num_chunks, round_robin(num_ranks, num_chunks), tuple(orders))


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
