"""Automatic zero-bubble schedules: ZB-1p and ZB-2p, planned greedily for given times under a memory limit.

The search is the heuristic of Zero Bubble Pipeline Parallelism (arXiv 2401.10241, section 3) with the choices of the
authors' published planner (sail-sg/zero-bubble-pipeline-parallelism). It is deterministic: eight plans, one for each
combination of three yes-or-no options, of which the first with the shortest span is kept.

A plan is made in waves; wave i runs micro-batch i's input gradient on every rank, from the last rank to the first:
- Wave 0 fills the time until the first input gradient can arrive with forwards, as far as memory permits, so that each
  rank holds fewer forwards than the one before it. Option `delay_first`: the last of them may overrun that time.
- Later waves give each rank one more forward. Option `prefer_backward`: a rank that is two or more forwards ahead of
  its successor skips one when the successor's next input gradient would otherwise have to wait.
- Weight gradients are placed when memory forbids a forward; while the next input arrives later than they take; and in
  a smaller gap when that gap would become the longest idle time of all ranks, or always with option `fill_small_gaps`.

Comparisons between times decide what is placed, and equal times are common, so times are whole numbers here: with
binary fractions a plan for decimal costs would depend on rounding errors.

Memory is counted in micro-batch activations of one stage: F takes 1, I gives back 1/2, W the other half.
Letters: p ranks, m micro-batches per step.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from itertools import product as combinations

from megalite.errors import ScheduleError
from megalite.pipeline.schedules.actions import Action, Kind, Schedule, round_robin
from megalite.pipeline.schedules.classic import refuse
from megalite.pipeline.schedules.constraints import number_violations
from megalite.pipeline.schedules.costs import Cost, CostModel

__all__ = ["zb_auto"]


def zb_auto(num_ranks: int, num_microbatches: int, memory_factor: int, cost: CostModel | None = None) -> Schedule:
    """ZB-1p (memory_factor 1) or ZB-2p (2): the best plan that holds at most memory_factor * p micro-batch activations.

    cost: the times to plan for, by default all equal and messages free. Raises ScheduleError for numbers below 1,
    ConfigError for per-stage costs of another length.
    """
    name, cost = f"zb-{memory_factor}p", cost or CostModel()
    refuse(name, number_violations(num_ranks, num_microbatches, 1))
    if memory_factor < 1:
        raise ScheduleError(f"pipeline schedule {name}: the memory limit must be at least 1 activation per rank, use 1 or more")
    cost.check_stages(num_ranks)
    exact = _whole_numbers(cost)
    best: _Plan | None = None
    for options in combinations((True, False), repeat=3):
        plan = _Plan(num_microbatches, memory_factor * num_ranks, exact, [_Rank(rank) for rank in range(num_ranks)])
        plan.run(*options)
        if best is None or plan.span < best.span:
            best = plan
    assert best is not None
    orders = tuple(tuple(rank.order) for rank in best.ranks)
    return Schedule(name, num_ranks, num_microbatches, 1, round_robin(num_ranks, 1), orders)


def _whole_numbers(cost: CostModel) -> CostModel:
    """The same costs times a power of ten, rounded: 12 digits or more of the largest one."""
    message = cost.latency + cost.transfer_time
    costs = (cost.forward, cost.input_grad, cost.weight_grad)
    largest = max(message, *(max(value) if isinstance(value, tuple) else value for value in costs))
    scale = 10.0 ** (12 - math.floor(math.log10(largest))) if largest else 1.0

    def whole(value: Cost) -> Cost:
        return tuple(round(number * scale) for number in value) if isinstance(value, tuple) else round(value * scale)

    return CostModel(*map(whole, costs), latency=round(message * scale))


@dataclass
class _Rank:
    """One rank's plan so far: its actions, when it is free again, what it holds and how long it was idle."""

    number: int
    order: list[Action] = field(default_factory=list)
    free_at: float = 0
    memory: float = 0.0
    idle: float = 0
    count: dict[Kind, int] = field(default_factory=lambda: dict.fromkeys(Kind, 0))
    ends: dict[Kind, list[float]] = field(default_factory=lambda: {kind: [] for kind in Kind})

    def next(self, kind: Kind) -> Action:
        return Action(kind, self.number, self.count[kind])

    @property
    def has_weight_grad(self) -> bool:
        return self.count[Kind.WEIGHT_GRAD] < self.count[Kind.INPUT_GRAD]


_MEMORY = {Kind.FORWARD: 1.0, Kind.INPUT_GRAD: -0.5, Kind.WEIGHT_GRAD: -0.5}


@dataclass
class _Plan:
    num_microbatches: int
    limit: float
    cost: CostModel
    ranks: list[_Rank]
    longest_idle: float = 0

    @property
    def span(self) -> float:
        first_ends = [(rank, rank.ends[Kind.FORWARD][0]) for rank in self.ranks]
        return max(rank.free_at - end + self.cost.duration(Action(Kind.FORWARD, rank.number, 0)) for rank, end in first_ends)

    @property
    def message(self) -> float:
        return self.cost.latency  # that of the whole message, see _whole_numbers

    def run(self, delay_first: bool, prefer_backward: bool, fill_small_gaps: bool) -> None:
        self.first_wave(delay_first)
        for microbatch in range(1, self.num_microbatches):
            for rank in self.forwards_of_wave(prefer_backward):
                self.make_room(rank)
                self.fill_gap(rank, Kind.FORWARD, fill_small_gaps)
                self.place(rank, Kind.FORWARD)
            for rank in reversed(self.ranks):
                assert rank.count[Kind.INPUT_GRAD] == microbatch
                self.fill_gap(rank, Kind.INPUT_GRAD, fill_small_gaps)
                if rank.number == 0 and rank.count[Kind.FORWARD] == self.num_microbatches:
                    while rank.has_weight_grad:
                        self.place(rank, Kind.WEIGHT_GRAD)
                self.place(rank, Kind.INPUT_GRAD)
        for rank in self.ranks:
            while rank.has_weight_grad:
                self.place(rank, Kind.WEIGHT_GRAD)

    def place(self, rank: _Rank, kind: Kind) -> None:
        """Append the rank's next action of this kind, at the earliest time that its order and its input allow."""
        action = rank.next(kind)
        start = max(rank.free_at, self.arrival(action))
        if rank.count[Kind.FORWARD]:
            rank.idle += start - rank.free_at
            self.longest_idle = max(self.longest_idle, rank.idle)
        rank.free_at = start + self.cost.duration(action)
        rank.ends[kind].append(rank.free_at)
        rank.memory += _MEMORY[kind]
        rank.count[kind] += 1
        rank.order.append(action)

    def arrival(self, action: Action) -> float:
        """When the tensor from the neighbouring rank is there; 0 when none is needed."""
        kind, stage, microbatch = action
        source = stage - 1 if kind is Kind.FORWARD else stage + 1
        if kind is Kind.WEIGHT_GRAD or not 0 <= source < len(self.ranks):
            return 0
        return self.ranks[source].ends[kind][microbatch] + self.message

    def first_wave(self, delay_first: bool) -> None:
        for rank in self.ranks:
            self.place(rank, Kind.FORWARD)
        extra = [0] * len(self.ranks)
        arrival: float = 0  # of the first input gradient, worked out from the last rank to the first
        for rank in reversed(self.ranks):
            busy = rank.free_at
            if rank is not self.ranks[-1]:
                busy, extra[rank.number] = self.forwards_before(rank, arrival, delay_first)
            arrival = max(busy, arrival) + self.cost.duration(Action(Kind.INPUT_GRAD, rank.number, 0)) + self.message
        for rank in range(1, len(self.ranks)):
            if 1 + extra[rank] < self.num_microbatches:
                extra[rank] = max(0, min(extra[rank], extra[rank - 1] - 1))
        for rank in self.ranks:
            for _ in range(extra[rank.number]):
                self.place(rank, Kind.FORWARD)
        for rank in reversed(self.ranks):
            self.place(rank, Kind.INPUT_GRAD)

    def forwards_before(self, rank: _Rank, arrival: float, delay_first: bool) -> tuple[float, int]:
        """(end of them, number of forwards) that fit behind the first one until `arrival`, and into memory."""
        busy, memory, number = rank.free_at, rank.memory, 0
        while 1 + number < self.num_microbatches and memory + 1 <= self.limit:
            duration = self.cost.duration(Action(Kind.FORWARD, rank.number, 1 + number))
            if (busy + duration > arrival) if delay_first else (busy >= arrival):
                break
            busy, memory, number = busy + duration, memory + 1, number + 1
        return busy, number

    def forwards_of_wave(self, prefer_backward: bool) -> list[_Rank]:
        """The ranks that run one more forward now; none in front of a rank that does not."""
        wants = [
            rank.count[Kind.FORWARD] < self.num_microbatches and not (prefer_backward and self.better_skip(rank)) for rank in self.ranks
        ]
        for number in range(len(wants) - 2, -1, -1):
            wants[number] = wants[number] and wants[number + 1]
        return [rank for rank, wanted in zip(self.ranks, wants, strict=True) if wanted]

    def better_skip(self, rank: _Rank) -> bool:
        """Whether another forward would delay the input gradient that the successor is about to send."""
        if rank is self.ranks[-1]:
            return False
        successor = self.ranks[rank.number + 1]
        if rank.count[Kind.FORWARD] < successor.count[Kind.FORWARD] + 2:
            return False
        steps = [successor.next(kind) for kind in (Kind.FORWARD, Kind.INPUT_GRAD)]
        gradient = successor.free_at + sum(map(self.cost.duration, steps)) + self.message
        if rank.free_at >= gradient:
            return True
        ready = rank.free_at + self.cost.duration(rank.next(Kind.FORWARD))
        memory, done = rank.memory + 1, rank.count[Kind.WEIGHT_GRAD]
        while memory > self.limit and done < rank.count[Kind.INPUT_GRAD]:
            ready += self.cost.duration(Action(Kind.WEIGHT_GRAD, rank.number, done))
            memory, done = memory - 0.5, done + 1
        if ready <= gradient:
            return False
        return gradient - rank.free_at <= self.longest_idle - rank.idle

    def make_room(self, rank: _Rank) -> None:
        """Weight gradients until another forward fits into memory."""
        while rank.memory + 1 > self.limit:
            assert rank.has_weight_grad, "a limit of p activations always leaves room after a weight gradient"
            self.place(rank, Kind.WEIGHT_GRAD)

    def fill_gap(self, rank: _Rank, kind: Kind, fill_small_gaps: bool) -> None:
        """Weight gradients while the rank would wait for the input of its next action of this kind."""
        arrival = self.arrival(rank.next(kind))
        while rank.has_weight_grad:
            duration = self.cost.duration(rank.next(Kind.WEIGHT_GRAD))
            if rank.free_at + duration > arrival:
                break
            self.place(rank, Kind.WEIGHT_GRAD)
        gap = arrival - rank.free_at
        if rank.has_weight_grad and gap > 0 and (fill_small_gaps or gap > self.longest_idle - rank.idle):
            self.place(rank, Kind.WEIGHT_GRAD)
