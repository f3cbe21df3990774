"""When each action really ran: the measured counterpart of the simulator's timeline.

Decisions
- An action's time begins when its inputs are here, so waiting for a neighbour shows as a gap, as in the simulation.
- Recording costs two clock readings an action (two events on a GPU, read when the step is written); nothing is sent
  before `collect`.
- Ranks have clocks of their own. Each compares its clock with the first pipeline rank's by a few round trips: of the
  shortest one the middle is taken as the same moment. The error is at most half of that round trip.
- One JSON line per action, times in seconds since the first action of the trace: see `TraceWriter`.
"""

from __future__ import annotations

import json
import time
from collections.abc import Iterable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, TextIO

import torch

from megalite import comm
from megalite.grid import Axis
from megalite.pipeline.schedules import Action, Schedule

__all__ = ["ActionClock", "TimedAction", "TraceWriter", "clock_offset"]

ROUND_TRIPS = 9


@dataclass(frozen=True)
class TimedAction:
    """One action and when it ran, in seconds of the first pipeline rank's clock."""

    step: int
    rank: int
    action: Action
    start_s: float
    end_s: float

    def to_dict(self) -> dict[str, Any]:
        kind, stage, microbatch = self.action
        place = {"kind": "action", "step": self.step, "rank": self.rank, "action": str(kind), "stage": stage, "microbatch": microbatch}
        return {**place, "start_s": round(self.start_s, 7), "end_s": round(self.end_s, 7)}


@dataclass
class ActionClock:
    """Records the actions of this rank. offset_s: what to add to this rank's clock to get the first rank's."""

    rank: int
    device: torch.device
    offset_s: float = 0.0
    _open: list[tuple[int, Action, Any, Any]] = field(default_factory=list)
    _base: tuple[float, Any] | None = None

    def start(self) -> Any:
        """A mark of this moment, for `end`."""
        if self.device.type != "cuda":
            return time.perf_counter()
        event = torch.cuda.Event(enable_timing=True)
        if self._base is None:
            torch.cuda.synchronize(self.device)
            base = torch.cuda.Event(enable_timing=True)
            base.record()
            self._base = (time.perf_counter(), base)
        event.record()
        return event

    def end(self, step: int, action: Action, started: Any) -> None:
        """The action that began at `started` is over (on a GPU: enqueued)."""
        self._open.append((step, action, started, self.start()))

    def take(self) -> list[TimedAction]:
        """Everything recorded since the last call. Waits for the device."""
        records = self.recorded()
        self.clear()
        return records

    def recorded(self) -> list[TimedAction]:
        """What `take` will give. Waits for the device."""
        if self.device.type == "cuda":
            torch.cuda.synchronize(self.device)
        return [TimedAction(step, self.rank, action, self._seconds(start), self._seconds(end)) for step, action, start, end in self._open]

    def clear(self) -> None:
        """Forget what was recorded."""
        self._open.clear()

    def _seconds(self, mark: Any) -> float:
        if isinstance(mark, float):
            return mark + self.offset_s
        assert self._base is not None
        return self._base[0] + self._base[1].elapsed_time(mark) / 1e3 + self.offset_s


def clock_offset(axis: Axis, device: torch.device) -> float:
    """Seconds to add to this rank's `time.perf_counter` to get that of the axis' first rank. Collective.

    Raises CommError when a peer does not answer.
    """
    best = (float("inf"), 0.0)
    for peer in range(1, axis.size):
        for _ in range(ROUND_TRIPS):
            if axis.is_first:
                box = torch.empty(1, dtype=torch.float64, device=device)
                comm.start_recv(box, axis, peer).wait()
                comm.start_send(torch.tensor([time.perf_counter()], dtype=torch.float64, device=device), axis, peer).wait()
            elif axis.rank == peer:
                box = torch.empty(1, dtype=torch.float64, device=device)
                asked = time.perf_counter()
                comm.start_send(box.fill_(asked), axis, 0).wait()
                answer = comm.start_recv(box, axis, 0).wait().item()
                answered = time.perf_counter()
                best = min(best, (answered - asked, answer - (asked + answered) / 2))
    return best[1]


class TraceWriter:
    """Writes the trace of all pipeline ranks to one JSON-lines file.

    First a line {"kind": "meta", "schedule", "num_ranks", "num_microbatches", "num_chunks", "placement"}, then one
    {"kind": "action", "step", "rank", "action": "F"|"B"|"I"|"W", "stage", "microbatch", "start_s", "end_s"} per action.
    """

    def __init__(self, path: Path, schedule: Schedule) -> None:
        path.parent.mkdir(parents=True, exist_ok=True)
        self._file: TextIO = path.open("w", encoding="utf-8")
        self._first: float | None = None
        meta = {
            "kind": "meta",
            "schedule": schedule.name,
            "num_ranks": schedule.num_ranks,
            "num_microbatches": schedule.num_microbatches,
            "num_chunks": schedule.num_chunks,
            "placement": list(schedule.placement),
        }
        self._file.write(json.dumps(meta) + "\n")

    def write(self, actions: Iterable[TimedAction]) -> None:
        ordered = sorted(actions, key=lambda item: (item.step, item.start_s, item.rank))
        if ordered and self._first is None:
            self._first = ordered[0].start_s
        for item in ordered:
            assert self._first is not None
            shifted = TimedAction(item.step, item.rank, item.action, item.start_s - self._first, item.end_s - self._first)
            self._file.write(json.dumps(shifted.to_dict()) + "\n")
        self._file.flush()

    def close(self) -> None:
        self._file.close()
