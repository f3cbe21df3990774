"""A measured step beside the predicted one: reads a trace of the runtime and simulates the same orders with its times.

The trace is a JSON-lines file. First line: {"kind": "meta", "schedule", "num_ranks", "num_microbatches", "num_chunks",
"placement"}. Then {"kind": "action", "step", "rank", "action", "stage", "microbatch", "start_s", "end_s"} per action, in
seconds of one clock. Lines with another kind are passed over.

Decisions:
- The prediction uses the measured medians of F, B, I and W of each stage over all steps but the first (which warms up),
  or over the only one. What it cannot explain is the schedule's doing or the machine's: that is the point of comparing.
- A message takes as long as the shortest time ever seen between an action's end on one rank and the start of the one
  that waits for it on another, or 0 where clocks put the start before the end.
- Bubbles of the measured step count its own busy time, so that a slow action is not mistaken for idle time.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from statistics import median
from typing import Any

from megalite.errors import DataError
from megalite.pipeline.schedules import Action, CostModel, Kind, Schedule, dependencies, product
from megalite.pipeline.simulate import Timeline, Times, simulate

__all__ = ["Comparison", "compare", "read_trace"]


@dataclass(frozen=True)
class Comparison:
    """Step `step` of a trace as it was (times from 0) and as the simulator predicts it from the medians; seconds."""

    step: int
    measured: Timeline
    predicted: Timeline

    @property
    def measured_bubble(self) -> float:
        """Idle share of the measured span, for the rank that works most."""
        busy = max(sum(self.measured.finish[a] - self.measured.start[a] for a in order) for order in self.measured.schedule.orders)
        return max(0.0, self.measured.span - busy) / self.measured.span if self.measured.span else 0.0


def read_trace(path: Path) -> tuple[Schedule, dict[int, Times]]:
    """(the schedule's numbers and the order of each rank in the last complete step, {step: times of its actions}).

    Raises DataError naming the line when the file cannot be read or is not such a trace.
    """
    try:
        lines = path.read_text(encoding="utf-8").splitlines()
    except (OSError, UnicodeDecodeError) as error:
        raise DataError(f"cannot read trace {path}: {error}") from error
    records = [(number, _record(path, number, line)) for number, line in enumerate(lines, 1) if line.strip()]
    if not records or records[0][1].get("kind") != "meta":
        raise DataError(f'{path}: line 1: a trace begins with a line {{"kind": "meta", "schedule": ...}}')
    steps: dict[int, Times] = {}
    placement = _field(path, 1, records[0][1], "placement")
    for number, record in records[1:]:
        if record.get("kind") == "action":
            step, action, times = _action(path, number, record)
            if not 0 <= action.stage < len(placement) or placement[action.stage] != record["rank"]:
                raise DataError(f"{path}: line {number}: stage {action.stage} does not live on rank {record['rank']}: {placement}")
            if steps.setdefault(step, {}).setdefault(action, times) is not times:
                raise DataError(
                    f"{path}: line {number}: {action.kind}{action.microbatch} of stage {action.stage} is there twice in step {step}"
                )
    if not steps:
        raise DataError(f"{path} has no actions: record at least one step")
    return _schedule(path, records[0][1], steps), steps


def _record(path: Path, number: int, line: str) -> dict[str, Any]:
    try:
        record = json.loads(line)
    except json.JSONDecodeError as error:
        raise DataError(f"{path}: line {number}: not JSON: {error.msg}") from error
    if not isinstance(record, dict):
        raise DataError(f"{path}: line {number}: not a JSON object")
    return record


def _field(path: Path, number: int, record: Mapping[str, Any], name: str) -> Any:
    if name not in record:
        raise DataError(f"{path}: line {number}: there is no {name!r}")
    return record[name]


def _action(path: Path, number: int, record: Mapping[str, Any]) -> tuple[int, Action, tuple[float, float]]:
    names = ("step", "rank", "action", "stage", "microbatch", "start_s", "end_s")
    step, _, kind, stage, microbatch, start, end = (_field(path, number, record, name) for name in names)
    try:
        action = Action(Kind(kind), int(stage), int(microbatch))
        times = (float(start), float(end))
    except (TypeError, ValueError) as error:
        raise DataError(f"{path}: line {number}: {error}") from error
    if not times[0] <= times[1] < float("inf"):
        raise DataError(f"{path}: line {number}: an action cannot run from {start} to {end}")
    return int(step), action, times


def _schedule(path: Path, meta: Mapping[str, Any], steps: Mapping[int, Times]) -> Schedule:
    numbers = {name: _field(path, 1, meta, name) for name in ("num_ranks", "num_microbatches", "num_chunks")}
    placement = tuple(meta["placement"])
    most = max(map(len, steps.values()))
    times = steps[max(step for step in steps if len(steps[step]) == most)]
    orders = _orders(times, placement, numbers["num_ranks"])
    has_backward = any(action.kind is not Kind.FORWARD for action in times)
    return Schedule(str(_field(path, 1, meta, "schedule")), **numbers, placement=placement, orders=orders, has_backward=has_backward)


def _orders(times: Times, placement: tuple[int, ...], num_ranks: int) -> tuple[tuple[Action, ...], ...]:
    by_start = sorted(times, key=lambda action: times[action])
    return tuple(tuple(action for action in by_start if placement[action.stage] == rank) for rank in range(num_ranks))


def compare(path: Path, step: int | None = None) -> Comparison:
    """Step `step` of the trace (by default the last complete one) against the simulation of its orders.

    Raises DataError for a trace that cannot be read or a step that it does not hold completely, ScheduleError when the
    recorded orders cannot have run.
    """
    schedule, steps = read_trace(path)
    most = max(map(len, steps.values()))
    complete = [number for number in sorted(steps) if len(steps[number]) == most]
    chosen = complete[-1] if step is None else step
    if chosen not in complete:
        raise DataError(f"{path} does not hold all of step {chosen}: use one of {complete}")
    times = steps[chosen]
    schedule = replace(schedule, orders=_orders(times, schedule.placement, schedule.num_ranks))
    cost = _median_costs(schedule, [steps[number] for number in (complete[1:] or complete)])
    first = min(start for start, _ in times.values())
    measured = Timeline(
        schedule,
        cost,
        {action: start - first for action, (start, _) in times.items()},
        {action: end - first for action, (_, end) in times.items()},
    )
    return Comparison(chosen, measured, simulate(schedule, cost))


def _median_costs(schedule: Schedule, steps: Iterable[Times]) -> CostModel:
    steps = list(steps)
    durations: dict[tuple[Kind, int], list[float]] = {}
    for times in steps:
        for action, (start, end) in times.items():
            durations.setdefault((action.kind, action.stage), []).append(end - start)

    def per_stage(kind: Kind) -> tuple[float, ...]:
        return tuple(median(durations.get((kind, stage), [0.0])) for stage in range(schedule.num_stages))

    forward, backward, input_grad, weight_grad = map(per_stage, Kind)
    latency = _shortest_message(schedule, steps)
    return CostModel(forward, input_grad, weight_grad, latency, backward=backward)


def _shortest_message(schedule: Schedule, steps: Iterable[Times]) -> float:
    shortest = float("inf")
    for times in steps:
        ends = {product(action): (action, end) for action, (_, end) in times.items() if action.kind is not Kind.WEIGHT_GRAD}
        for action, (start, _) in times.items():
            for need in dependencies(action, schedule.num_stages):
                if need in ends and schedule.placement[need.stage] != schedule.placement[action.stage]:
                    shortest = min(shortest, start - ends[need][1])
    return max(0.0, shortest) if shortest < float("inf") else 0.0
