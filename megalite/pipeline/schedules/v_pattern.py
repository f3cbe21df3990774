"""V-Half and V-Min: V placement with half or a third of 1F1B's activation memory, built from a repeated block.

A block is six unit slots per micro-batch on each rank: F0 F1 I1 I0 and two W (chunk 0 is the stage on the way down).
Micro-batch k uses the block shifted by 6k. The slots of F0, F1, I1, I0 on rank r are given by the pattern, W take what
is free. Source: Pipeline Parallelism with Controllable Memory, arXiv 2405.15362, and the authors' planner
(sail-sg/zero-bubble-pipeline-parallelism), whose steps are followed here:
1. Weight gradients fill the free slots, oldest first. The highest memory of any rank is the limit for all that follows.
2. Outside the steady phase, each action moves to the earliest free slot after its inputs that keeps the limit. The
   steady phase lasts from rank 0's first I0 to its last F0. Then idle slots are squeezed out.
3. The same once more for the actions behind the steady phase, with the weight gradients put in afresh afterwards.

Decisions: when rank 0's last F0 comes before its first I0 (few micro-batches) there is no steady phase. I and W of a
stage are in ascending micro-batch order, because each takes its slots in that order.

Letters: p ranks, r one of them, m micro-batches per step.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence

from megalite.pipeline.schedules.actions import Action, Kind, Schedule, v_placement
from megalite.pipeline.schedules.classic import refuse
from megalite.pipeline.schedules.constraints import number_violations

__all__ = ["v_half", "v_min"]

F0, F1, I1, I0, W, FREE = 0, 1, 2, 3, 4, -1
_BLOCK = 6

Pattern = Callable[[int, int], tuple[int, int, int, int]]  # (p, r) -> slots of F0, F1, I1, I0
Row = list[int]  # what one rank does in each slot
Item = tuple[int, int, int, int]  # (slot, rank, what, number of its kind on this rank)


def v_half(num_ranks: int, num_microbatches: int) -> Schedule:
    """Peak of about p chunk activations per rank, half of 1F1B's in layers; about half of its bubble. Any m."""
    return _build("v-half", num_ranks, num_microbatches, _half_pattern)


def v_min(num_ranks: int, num_microbatches: int) -> Schedule:
    """Peak of about 2p/3 chunk activations per rank, a third of 1F1B's; about two thirds of its bubble. Any m."""
    return _build("v-min", num_ranks, num_microbatches, _min_pattern)


def _half_pattern(num_ranks: int, rank: int) -> tuple[int, int, int, int]:
    shift = 3 if num_ranks % 2 == 0 else 0
    return 2 * rank, 3 * num_ranks - 2 - rank, 3 * num_ranks + shift + 2 * rank - 1, 6 * num_ranks + shift - 2 - rank


def _min_pattern(num_ranks: int, rank: int) -> tuple[int, int, int, int]:
    shift = 2 if num_ranks % 3 == 0 else 0
    return rank, 2 * num_ranks - 1 - rank, 2 * num_ranks + shift + rank, 4 * num_ranks + shift - 1 - rank


def _build(name: str, num_ranks: int, num_microbatches: int, pattern: Pattern) -> Schedule:
    refuse(name, number_violations(num_ranks, num_microbatches, 2))
    rows = [_with_weights(_repeat(pattern(num_ranks, rank), num_microbatches)) for rank in range(num_ranks)]
    rows = _squeeze(_compress(rows, only_end=False))
    rows = _compress([_without_weights(row) for row in rows], only_end=True)
    rows = _squeeze([_with_weights(row) for row in rows])
    orders = tuple(_actions(_without_weights(row), rank, num_ranks) for rank, row in enumerate(rows))
    return Schedule(name, num_ranks, num_microbatches, 2, v_placement(num_ranks), orders)


def _repeat(slots: Sequence[int], num_microbatches: int) -> Row:
    row = [FREE] * (max(slots) + _BLOCK * (num_microbatches - 1) + 1)
    for what, slot in enumerate(slots):
        for first in range(slot, slot + _BLOCK * num_microbatches, _BLOCK):
            assert row[first] == FREE, "the slots of a pattern are distinct modulo the block"
            row[first] = what
    return row


def _without_weights(row: Row) -> Row:
    bare = [FREE if what == W else what for what in row]
    while bare[-1] == FREE:
        bare.pop()
    return bare


def _with_weights(row: Row) -> Row:
    """One W in each free slot while any is due, the rest behind the end."""
    filled, due = [], 0
    for what in row:
        if what == FREE and due:
            filled.append(W)
            due -= 1
        else:
            filled.append(what)
            due += what in (I1, I0)
    return filled + [W] * due


def _peak(row: Row, implicit_weights: bool) -> int:
    """Most chunk activations in any slot; with implicit weights, a free slot is a W while any is due."""
    alive = peak = due = 0
    for what in row:
        if what in (F0, F1):
            alive += 1
            peak = max(peak, alive)
        elif what == W:
            alive -= 1
        elif what == FREE:
            if due and implicit_weights:
                alive -= 1
                due -= 1
        else:
            due += 1
    return peak


def _items(rows: Sequence[Row]) -> list[Item]:
    """Everything in the table by slot, then rank."""
    found: list[Item] = []
    for rank, row in enumerate(rows):
        numbers = [0] * 5
        for slot, what in enumerate(row):
            if what != FREE:
                found.append((slot, rank, what, numbers[what]))
                numbers[what] += 1
    return sorted(found)


def _inputs(rank: int, what: int, number: int, num_ranks: int) -> Iterable[tuple[int, int, int]]:
    """(rank, what, number) that must come earlier, for the four kinds that the pattern places."""
    neighbour = rank - 1 if what in (F0, I1) else rank + 1
    if 0 <= neighbour < num_ranks:
        yield neighbour, what, number
    if what > F0:
        yield rank, what - 1, number
    if number > 0:
        yield rank, what, number - 1


def _compress(rows: list[Row], only_end: bool) -> list[Row]:
    """Move actions outside the steady phase to earlier free slots (with only_end: those behind it only)."""
    rows = [list(row) for row in rows]
    limit = max(_peak(row, implicit_weights=only_end) for row in rows)
    items = _items(rows)
    last_forward = max(number for _, _, what, number in items if what == F0)
    slot_of: dict[tuple[int, int, int], int] = {}
    gradients: list[list[int]] = [[] for _ in rows]  # slots of I1 and I0 so far
    begun = steady = forwards_done = False
    for slot, rank, what, number in items:
        if rank == 0 and what == I0 and not begun:
            begun, steady = True, not forwards_done
        in_steady = steady
        if rank == 0 and what == F0 and number == last_forward:
            forwards_done, steady = True, False
        if not in_steady and (begun or not only_end):
            earliest = _earliest(slot_of, gradients[rank], (rank, what, number), len(rows))
            slot = _move(rows[rank], slot, earliest, limit, only_end)
        slot_of[rank, what, number] = slot
        if what in (I1, I0):
            gradients[rank].append(slot)
    return rows


def _earliest(slot_of: dict[tuple[int, int, int], int], gradients: list[int], item: tuple[int, int, int], num_ranks: int) -> int:
    rank, what, number = item
    if what == W:
        before = [sorted(gradients)[number]] + ([slot_of[rank, W, number - 1]] if number else [])
    else:
        before = [slot_of[key] for key in _inputs(rank, what, number, num_ranks)]
    return 1 + max(before, default=-1)


def _move(row: Row, slot: int, earliest: int, limit: int, implicit_weights: bool) -> int:
    """Put the action of this slot into the first free slot from `earliest` on that keeps the limit; returns its slot."""
    what = row[slot]
    for candidate in range(earliest, slot):
        if row[candidate] == FREE:
            row[slot], row[candidate] = FREE, what
            if _peak(row, implicit_weights) <= limit:
                return candidate
            row[slot], row[candidate] = what, FREE
    return slot


def _squeeze(rows: Sequence[Row]) -> list[Row]:
    """Run every rank's order as early as possible in unit time, messages free."""
    ends: dict[tuple[int, int, int], int] = {}
    squeezed: list[Row] = [[] for _ in rows]
    for _, rank, what, number in _items(rows):
        inputs = _inputs(rank, what, number, len(rows)) if what != W else ()
        start = max([len(squeezed[rank]), *(ends[key] for key in inputs)])
        squeezed[rank] += [FREE] * (start - len(squeezed[rank])) + [what]
        ends[rank, what, number] = start + 1
    return squeezed


def _actions(row: Row, rank: int, num_ranks: int) -> tuple[Action, ...]:
    """The rank's order; of the weight gradients that are due, chunk 1's come first."""
    kinds = {F0: Kind.FORWARD, F1: Kind.FORWARD, I1: Kind.INPUT_GRAD, I0: Kind.INPUT_GRAD}
    stages = {F0: rank, I0: rank, F1: 2 * num_ranks - 1 - rank, I1: 2 * num_ranks - 1 - rank}
    numbers, weights = [0] * 4, {I1: 0, I0: 0}
    order: list[Action] = []

    def weight_grad() -> None:
        source = next((what for what in (I1, I0) if weights[what] < numbers[what]), None)
        if source is not None:
            order.append(Action(Kind.WEIGHT_GRAD, stages[source], weights[source]))
            weights[source] += 1

    for what in row:
        if what == FREE:
            weight_grad()
        else:
            order.append(Action(kinds[what], stages[what], numbers[what]))
            numbers[what] += 1
    while any(weights[what] < numbers[what] for what in (I1, I0)):
        weight_grad()
    return tuple(order)
