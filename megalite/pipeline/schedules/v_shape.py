"""Schedules on the V placement with a fixed pattern: ZB-V and DualPipeV. Rank r holds stages r and 2p-1-r.

Decisions:
- DualPipeV's blocks "forward of one micro-batch and backward of another, overlapped" are written as two consecutive
  actions, F then B, and remembered in `Schedule.overlapped`. The cost model may give such a pair a time of its own.
- Both keep I, B and W of a stage in ascending micro-batch order, as published.
- ZB-V with m < 2p-1 is the schedule for 2p-1 without the surplus micro-batches. DualPipeV refuses m < 2p, because no
  order is published for it.

Sources: ZB-V: Pipeline Parallelism with Controllable Memory, arXiv 2405.15362, and Zero Bubble, arXiv 2401.10241.
DualPipeV: deepseek-ai/DualPipe; the idea: DeepSeek-V3, arXiv 2412.19437.

Letters: p ranks, r one of them, m micro-batches per step. Chunk 0 is the stage on the way down, chunk 1 on the way back.
"""

from __future__ import annotations

from collections import deque

from megalite.pipeline.schedules.actions import Action, Kind, Schedule, v_placement
from megalite.pipeline.schedules.classic import refuse
from megalite.pipeline.schedules.constraints import dualpipe_violations, number_violations

__all__ = ["dualpipe_v", "zb_v"]


class _Order:
    """One rank's actions; `run(kind, chunk)` appends the next micro-batch of that kind and chunk."""

    def __init__(self, num_ranks: int, rank: int) -> None:
        self.stages = (rank, 2 * num_ranks - 1 - rank)
        self.count: dict[tuple[Kind, int], int] = {}
        self.actions: list[Action] = []
        self.waiting: deque[Action] = deque()  # weight gradients in the order of their input gradients
        self.overlapped: list[Action] = []

    def run(self, kind: Kind, chunk: int) -> Action:
        # B and I take turns on one counter: both are the backward of the next micro-batch
        counter = (Kind.BACKWARD if kind is Kind.INPUT_GRAD else kind, chunk)
        number = self.count.get(counter, 0)
        self.count[counter] = number + 1
        action = Action(kind, self.stages[chunk], number)
        self.actions.append(action)
        if kind is Kind.INPUT_GRAD:
            self.waiting.append(action._replace(kind=Kind.WEIGHT_GRAD))
        return action

    def forward(self, chunk: int) -> None:
        self.run(Kind.FORWARD, chunk)

    def backward(self, chunk: int, split: bool = False) -> None:
        self.run(Kind.INPUT_GRAD if split else Kind.BACKWARD, chunk)

    def weight(self, chunk: int | None = None) -> None:
        """The oldest weight gradient that waits, of this chunk or of any."""
        action = next(waiting for waiting in self.waiting if chunk is None or waiting.stage == self.stages[chunk])
        self.waiting.remove(action)
        self.actions.append(action)

    def pair(self, forward_chunk: int, overlapped: bool = True) -> None:
        """A forward of one chunk and a full backward of the other, as one block or one after the other."""
        action = self.run(Kind.FORWARD, forward_chunk)
        self.backward(1 - forward_chunk)
        if overlapped:
            self.overlapped.append(action)


def zb_v(num_ranks: int, num_microbatches: int) -> Schedule:
    """No bubble at equal times and m >= 2p-1 with 1F1B's memory (2p chunk activations) on every rank. Any m."""
    refuse("zb-v", number_violations(num_ranks, num_microbatches, 2))
    planned = max(num_microbatches, 2 * num_ranks - 1)
    orders = tuple(
        tuple(action for action in _zb_v_order(num_ranks, rank, planned) if action.microbatch < num_microbatches)
        for rank in range(num_ranks)
    )
    return Schedule("zb-v", num_ranks, num_microbatches, 2, v_placement(num_ranks), orders)


def _zb_v_order(num_ranks: int, rank: int, num_microbatches: int) -> list[Action]:
    order = _Order(num_ranks, rank)
    split = {"split": True}
    for _ in range(2 * (num_ranks - rank) - 1):
        order.forward(0)
    for _ in range(rank):
        order.forward(1)
        order.forward(0)
    for _ in range(num_ranks - rank):
        order.forward(1)
        order.backward(1, **split)
        order.weight(1)
    while order.count[Kind.FORWARD, 1] < num_microbatches:
        if order.count[Kind.FORWARD, 0] < num_microbatches:
            order.forward(0)
        order.backward(0, **split)
        order.weight(0)
        order.forward(1)
        order.backward(1, **split)
        order.weight(1)
    for _ in range(rank):
        order.backward(0, **split)
        order.backward(1, **split)
    for _ in range(num_ranks - rank):
        order.backward(0, **split)
        order.weight(0)
    chunks = [stage == order.stages[0] for _, stage, _ in order.waiting]
    for chunk in (1, 0):
        for _ in range(chunks.count(chunk == 0)):
            order.weight(chunk)
    return order.actions


def dualpipe_v(num_ranks: int, num_microbatches: int) -> Schedule:
    """Overlapped forward and backward blocks, 2p+1 chunk activations per rank. Raises ScheduleError for m < 2p."""
    numbers = (num_ranks, num_microbatches, 2)
    refuse("dualpipe-v", number_violations(*numbers) or dualpipe_violations(*numbers))
    built = [_dualpipe_v_order(num_ranks, rank, num_microbatches) for rank in range(num_ranks)]
    return Schedule(
        "dualpipe-v",
        *numbers,
        placement=v_placement(num_ranks),
        orders=tuple(tuple(order.actions) for order in built),
        overlapped=frozenset(action for order in built for action in order.overlapped),
    )


def _dualpipe_v_order(num_ranks: int, rank: int, num_microbatches: int) -> _Order:
    order = _Order(num_ranks, rank)
    below = num_ranks - rank - 1  # ranks that a micro-batch passes between this rank's two stages, on each way
    for _ in range(2 * below):
        order.forward(0)
    for _ in range(rank + 1):
        order.forward(0)
        order.forward(1)
    for _ in range(below):
        order.backward(1, split=True)
        order.weight()
        order.forward(1)
    for number in range(num_microbatches - 2 * num_ranks + rank + 1):
        # on the last rank the first backward of chunk 1 is the start of all backwards: nothing to overlap it with
        order.pair(0, overlapped=number > 0 or below > 0)
        order.pair(1)
    for _ in range(below):
        order.backward(1)
        order.pair(1)
    _dualpipe_v_end(order, rank, below)
    return order


def _dualpipe_v_end(order: _Order, rank: int, below: int) -> None:
    """The last backwards: from the middle on in halves, so that the previous rank waits less."""
    split, middle = False, (rank + 1) // 2
    for number in range(rank + 1):
        split = split or (number == middle and rank % 2 == 1)
        order.backward(1, split)
        split = split or (number == middle and rank % 2 == 0)
        order.backward(0, split)
    for _ in range(below):
        order.weight()
        order.backward(0, split=True)
    while order.waiting:
        order.weight()
