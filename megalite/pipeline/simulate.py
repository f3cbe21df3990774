"""When does each action of a schedule run, how much time is idle, how many activations are alive.

Decisions:
- One event simulation for everybody: `run_orders` executes each rank's list in order; an action starts when its rank
  is free and all that it needs has arrived. By default the sender is never blocked.
- Messages from one rank to another follow each other on their connection, which each occupies for bytes / bandwidth.
- makespan is the last end minus the first start over all ranks; span is the longest time that one rank is occupied from
  its first to its last action. They differ when late ranks also start late. Bubbles are counted on the span.
- Two bubble conventions are in use and easily confused, so both have a name: over the ideal time ((p-1)/m for 1F1B) and
  over the total time ((p-1)/(m+p-1)).
- A forward that the schedule marks as overlapped and the backward behind it run one after the other, unless the cost
  model has a time for the pair: then both start when the inputs of both are there, and end together.

Times have no unit; they are whatever the cost model is in. Costs are per stage (chunk) and micro-batch.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from megalite.errors import ScheduleError
from megalite.pipeline.schedules import Action, CostModel, Kind, Schedule, dependencies, product

__all__ = ["CostModel", "Timeline", "format_table", "num_messages", "peak_activations", "run_orders", "simulate"]

Times = dict[Action, tuple[float, float]]  # (start, finish)


def run_orders(schedule: Schedule, cost: CostModel) -> Times:
    """(start, finish) of every action. Raises ScheduleError when orders wait for each other, or repeat an action."""
    run = _Run(schedule, cost)
    awake = list(range(schedule.num_ranks))
    while awake:
        rank = awake.pop()
        while run.position[rank] < len(schedule.orders[rank]):
            group = run.next_group(rank)
            missing = run.missing(group)
            if missing is not None:
                run.waiting.setdefault(missing, []).append(rank)
                break
            run.execute(rank, group)
            for action in group:
                awake += run.waiting.pop(product(action), [])
    _require_finished(schedule, run.position, run.waiting)
    return run.times


@dataclass
class _Run:
    """State of a simulation: what is done, and when each rank and each connection is free again."""

    schedule: Schedule
    cost: CostModel
    times: Times = field(default_factory=dict)
    done: dict[Action, tuple[int, float]] = field(default_factory=dict)  # product -> (rank, finish)
    arrivals: dict[tuple[Action, int], float] = field(default_factory=dict)  # product on another rank -> time
    waiting: dict[Action, list[int]] = field(default_factory=dict)
    link_free: dict[tuple[int, int], float] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self.position = [0] * self.schedule.num_ranks
        self.clock = [0.0] * self.schedule.num_ranks

    def next_group(self, rank: int) -> tuple[Action, ...]:
        """The rank's next action, or two when the cost model knows their overlapped time."""
        order, number = self.schedule.orders[rank], self.position[rank]
        paired = self.cost.overlapped_pair is not None and order[number] in self.schedule.overlapped
        return order[number : number + 2] if paired else order[number : number + 1]

    def missing(self, group: tuple[Action, ...]) -> Action | None:
        """The first input that is neither done nor made by the group itself."""
        for action in group:
            for need in dependencies(action, self.schedule.num_stages):
                if need not in self.done and need not in group:
                    return need
        return None

    def execute(self, rank: int, group: tuple[Action, ...]) -> None:
        start = self.clock[rank]
        for action in group:
            if action in self.times:
                raise ScheduleError(f"rank {rank}, action {self.position[rank]}: {self.schedule.label(action)} runs twice")
            for need in dependencies(action, self.schedule.num_stages):
                owner, end = self.done.get(need, (rank, 0.0))
                start = max(start, end if owner == rank else self.arrivals[need, rank])
        duration = self.cost.overlapped_pair if len(group) == 2 else self.cost.duration(group[0])
        assert duration is not None, "pairs only exist when the cost model has their time"
        self.clock[rank] = finish = start + duration
        for action in group:
            self.times[action] = (start, finish)
            self.done[product(action)] = (rank, finish)
            self.send(rank, action, finish)
        self.position[rank] += len(group)

    def send(self, rank: int, action: Action, finish: float) -> None:
        """Put the result on its way when it is needed on another rank."""
        if action.kind is Kind.WEIGHT_GRAD:
            return
        target_stage = action.stage + (1 if action.kind is Kind.FORWARD else -1)
        if not 0 <= target_stage < self.schedule.num_stages:
            return
        target = self.schedule.placement[target_stage]
        if target == rank:
            return
        leaves = max(finish, self.link_free.get((rank, target), 0.0))
        self.link_free[rank, target] = leaves + self.cost.transfer_time
        arrival = leaves + self.cost.transfer_time + self.cost.latency
        self.arrivals[product(action), target] = arrival
        if not self.cost.overlap_communication:
            self.clock[rank] = max(self.clock[rank], arrival)


def _require_finished(schedule: Schedule, position: list[int], waiting: Mapping[Action, list[int]]) -> None:
    stuck = []
    for needed, ranks in waiting.items():
        for rank in ranks:
            action = schedule.orders[rank][position[rank]]
            stuck.append(
                f"  rank {rank} stops at action {position[rank]}, {schedule.label(action)} of stage {action.stage}, "
                f"which waits for {needed.kind}{needed.microbatch} of stage {needed.stage}"
            )
    if stuck:
        raise ScheduleError(
            f"schedule {schedule.name} never finishes: these ranks wait for each other, or for an action that nobody "
            "has\n" + "\n".join(sorted(stuck))
        )


@dataclass(frozen=True)
class Timeline:
    """A simulated step: start and finish of every action, and what follows from them."""

    schedule: Schedule
    cost: CostModel
    start: Mapping[Action, float]
    finish: Mapping[Action, float]

    @property
    def makespan(self) -> float:
        """Last end minus first start over all ranks."""
        return max(self.finish.values()) - min(self.start.values())

    @property
    def span(self) -> float:
        """Longest time from a rank's first start to its own last end."""
        return max(self.finish[order[-1]] - self.start[order[0]] for order in self.schedule.orders if order)

    @property
    def ideal(self) -> float:
        """Work of the busiest rank: the span without any bubble."""
        return max(sum(map(self.cost.duration, order)) for order in self.schedule.orders)

    @property
    def bubble_over_ideal(self) -> float:
        """Idle share of the ideal time: (p-1)/m for 1F1B with equal stages."""
        return (self.span - self.ideal) / self.ideal if self.ideal else 0.0

    @property
    def bubble_over_total(self) -> float:
        """Idle share of the total time: (p-1)/(m+p-1) for 1F1B with equal stages."""
        return (self.span - self.ideal) / self.span if self.span else 0.0

    @property
    def peaks(self) -> tuple[int, ...]:
        """Per rank: most chunk activations alive at once when one is freed at the end of B or W."""
        return peak_activations(self.schedule)

    @property
    def peaks_at_input_grad(self) -> tuple[int, ...]:
        """Per rank: the same when an activation is freed at the end of B or I already."""
        return peak_activations(self.schedule, Kind.INPUT_GRAD)

    @property
    def messages(self) -> int:
        """Tensors sent between different ranks in one step."""
        return num_messages(self.schedule)


def simulate(schedule: Schedule, cost: CostModel | None = None) -> Timeline:
    """Run a schedule under a cost model (default: F = I = W = 1, no latency).

    Raises ScheduleError when it never finishes, ConfigError when a per-stage cost has another number of stages.
    """
    cost = cost or CostModel()
    cost.check_stages(schedule.num_stages)
    times = run_orders(schedule, cost)
    start = {action: begin for action, (begin, _) in times.items()}
    return Timeline(schedule, cost, start, {action: end for action, (_, end) in times.items()})


def peak_activations(schedule: Schedule, freed_at: Kind = Kind.WEIGHT_GRAD) -> tuple[int, ...]:
    """Per rank: most chunk activations alive at once. Only the order matters, because a rank does one thing at a time.

    freed_at: the half of a split backward at whose end an activation is freed; an undivided B always frees it. Without
    backwards each forward frees its own.
    """
    freeing = (Kind.BACKWARD, freed_at) if schedule.has_backward else (Kind.FORWARD,)
    peaks = []
    for order in schedule.orders:
        alive = peak = 0
        for action in order:
            alive += action.kind == Kind.FORWARD
            peak = max(peak, alive)
            alive -= action.kind in freeing
        peaks.append(peak)
    return tuple(peaks)


def num_messages(schedule: Schedule) -> int:
    """Tensors sent between different ranks in one step: one per micro-batch, direction and boundary between ranks."""
    boundaries = sum(a != b for a, b in zip(schedule.placement, schedule.placement[1:], strict=False))
    return boundaries * schedule.num_microbatches * (2 if schedule.has_backward else 1)


def format_table(subject: Schedule | Timeline) -> str:
    """A schedule as one line of actions per rank; a timeline as one column per rank and one row per event time."""
    return _format_timeline(subject) if isinstance(subject, Timeline) else _format_orders(subject)


def _format_orders(schedule: Schedule) -> str:
    return "\n".join(f"r{rank} " + " ".join(schedule.label(action) for action in order) for rank, order in enumerate(schedule.orders))


def _format_timeline(timeline: Timeline) -> str:
    """A cell holds the action that starts at that time, `|` while it goes on, `.` when the rank is idle."""
    orders, label = timeline.schedule.orders, timeline.schedule.label
    # rounded, so that 0.1 added three times and 0.3 share a row
    rounded = {action: (round(begin, 9), round(timeline.finish[action], 9)) for action, begin in timeline.start.items()}
    rows = sorted({time for interval in rounded.values() for time in interval})
    columns = []
    for order in orders:
        cells = dict.fromkeys(rows, ".")
        for action in order:
            begin, end = rounded[action]
            cells.update({time: "|" for time in rows if begin < time < end})
            cells[begin] = label(action)
        columns.append(cells)
    lines = ["time".rjust(8) + "".join(f"rank {rank}".rjust(9) for rank in range(len(orders)))]
    for row in rows[:-1]:
        lines.append(f"{row:8g}" + "".join(cells[row].rjust(9) for cells in columns))
    return "\n".join(lines)
