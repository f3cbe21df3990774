"""How long a rank computes, without the time in which it waits for others: what can be told, and by which means.

In training with collectives all ranks take the same time for a step; a slow rank is the one that waits least.

- On a CPU a thread looks every few milliseconds where the training thread stands. Looks that find it in a collective (ours, FSDP2's) or in
  waiting for its device do not count as its own time; looks during a save do not count at all. It costs the training thread nothing but
  the interpreter lock for some microseconds. Waiting for data counts as own time: a rank whose disk is slow is slow.
- On a GPU the host says nothing about its device. There the actions of the pipeline are timed by events (`ActionClock`), and an action
  counts as the median of its kind and stage in the interval: the few that contain FSDP2's collectives of the step, or a pause, do not
  show. Inside a tp group, and with --zero 3, every action contains collectives, so all ranks that share them look equally slow: a slow
  GPU is told from other tp groups of its stage, not inside its own.
"""

from __future__ import annotations

import statistics
import sys
import threading
import time
from collections import defaultdict
from types import FrameType

import torch

from megalite.grid import Progress
from megalite.pipeline.trace import ActionClock, TimedAction

__all__ = ["ActionMeter", "SampledMeter", "is_waiting", "place"]

LOOK_EVERY_S = 0.01
FEWEST_LOOKS = 30  # at its own work, before a rank is judged: the error of its time is then about 1 / sqrt(30)
FEWEST_ACTIONS = 3
_WAITING = ("/megalite/comm.py", "/torch/distributed/", "/torch/cuda/")
_COMPUTING = ("/torch/distributed/tensor/", "/torch/distributed/checkpoint/")  # DTensor's arithmetic, and writing files


def is_waiting(frame: FrameType) -> bool:
    """Whether a thread whose innermost frame this is waits for other ranks, or for its device."""
    file = frame.f_code.co_filename
    return any(part in file for part in _WAITING) and not any(part in file for part in _COMPUTING)


def place(frame: FrameType) -> str:
    """Where a thread stands, in words: its innermost line, and the innermost one of ours if that is another."""
    words = _words(frame)
    ours: FrameType | None = frame
    while ours is not None and "/megalite/" not in ours.f_code.co_filename:
        ours = ours.f_back
    return words if ours is None or ours is frame else f"{words}, from {_words(ours)}"


def _words(frame: FrameType) -> str:
    return f"{'/'.join(frame.f_code.co_filename.split('/')[-2:])}:{frame.f_lineno} in {frame.f_code.co_name}"


class SampledMeter:
    """Watches the thread that makes it, until `close`."""

    def __init__(self, progress: Progress) -> None:
        self._progress, self._target = progress, threading.get_ident()
        self._end = threading.Event()
        self._thread = threading.Thread(target=self._look, name="own time", daemon=True)
        self._own_s = 0.0
        self._own_looks = 0
        self._thread.start()

    def read(self) -> tuple[float, bool]:
        """Seconds of its own since the last `reset`, and whether that is enough to judge by."""
        return self._own_s, self._own_looks >= FEWEST_LOOKS

    def reset(self) -> None:
        self._own_s, self._own_looks = 0.0, 0

    def close(self) -> None:
        self._end.set()
        self._thread.join()

    def _look(self) -> None:
        before = time.perf_counter()
        while not self._end.wait(LOOK_EVERY_S):
            now = time.perf_counter()
            frame = sys._current_frames().get(self._target)
            if frame is not None and not self._progress.is_long and not is_waiting(frame):
                self._own_looks += 1
                self._own_s += now - before
            before = now


class ActionMeter:
    """Adds up the actions of a clock. is_shared: somebody else empties the clock, after each `reset`."""

    def __init__(self, clock: ActionClock, is_shared: bool) -> None:
        self._clock, self._is_shared = clock, is_shared

    def read(self) -> tuple[float, bool]:
        """Seconds of the actions recorded so far, and whether that is enough to judge by. Waits for the device."""
        return typical_seconds(self._clock.recorded())

    def reset(self) -> None:
        if not self._is_shared:
            self._clock.clear()

    def close(self) -> None:
        self.reset()


def typical_seconds(actions: list[TimedAction]) -> tuple[float, bool]:
    """The sum over actions if each took the median of its kind and stage; whether each median is one of enough actions."""
    by_kind: dict[tuple[str, int], list[float]] = defaultdict(list)
    for timed in actions:
        by_kind[str(timed.action.kind), timed.action.stage].append(timed.end_s - timed.start_s)
    total = sum(len(times) * statistics.median(times) for times in by_kind.values())
    return total, bool(by_kind) and min(map(len, by_kind.values())) >= FEWEST_ACTIONS


def new_meter(
    progress: Progress, device: torch.device, rank: int, clock: ActionClock | None
) -> tuple[SampledMeter | ActionMeter, ActionClock | None]:
    """The meter for a rank on `device`, and the clock for its pipeline runtime. clock: what the runtime has already."""
    if device.type != "cuda":
        return SampledMeter(progress), clock
    own = clock or ActionClock(rank, device)
    return ActionMeter(own, is_shared=clock is not None), own
