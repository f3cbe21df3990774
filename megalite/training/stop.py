"""Ends a run before its last step: a signal, a time limit, a step interval. All ranks stop after the same step.

| what                              | then                          | exit code |
|-----------------------------------|-------------------------------|-----------|
| --exit-interval                   | save, end                     | 0         |
| --exit-duration-in-mins           | save, end                     | 0         |
| SIGUSR1 to any rank               | save, end                     | 0         |
| SIGTERM to any rank (or torchrun) | save, end                     | 143       |

Decisions
- Signals reach ranks at different times, and clocks differ. So every step starts a reduction of one small number on the host, which is
  read one step later: nobody waits for it, and all ranks read the same.
- SIGTERM's code is that of a process it has killed, so schedulers and torchrun see a run that has not come to its end.
- torchrun sends SIGTERM on, and kills ranks that are there 30 seconds later: a save must fit into that.
- Evaluations end early too; what they have so far is not reported.
"""

from __future__ import annotations

import signal
import time
from collections.abc import Iterator
from contextlib import contextmanager
from types import FrameType
from typing import Any

import torch

from megalite import comm
from megalite.config_output import OutputConfig
from megalite.grid import Axis

__all__ = ["Stop"]

_NONE, _DURATION, _USR1, _TERM = range(4)
_SIGNALS = {signal.SIGUSR1: _USR1, signal.SIGTERM: _TERM}
_REASONS = {_DURATION: "the time limit is reached", _USR1: "SIGUSR1 was received", _TERM: "SIGTERM was received"}


class Stop:
    """world: all ranks. reason: why the run stops, None while it goes on; the same on every rank."""

    def __init__(self, output: OutputConfig, world: Axis) -> None:
        self._output, self._world = output, world
        self._began = time.monotonic()
        self._signal = self._agreed = _NONE
        self._pending: comm.Pending | None = None
        self.reason: str | None = None

    @property
    def exit_code(self) -> int:
        return 128 + signal.SIGTERM if self._agreed == _TERM else 0

    def request(self, signum: int, _frame: FrameType | None = None) -> None:
        """A signal's handler."""
        self._signal = max(self._signal, _SIGNALS[signal.Signals(signum)])

    @contextmanager
    def signals(self) -> Iterator[None]:
        """Listen to SIGTERM and SIGUSR1 inside; for the main thread."""
        before: dict[int, Any] = {number: signal.signal(number, self.request) for number in _SIGNALS}
        try:
            yield
        finally:
            for number, handler in before.items():
                signal.signal(number, handler)

    def poll(self, step: int | None = None) -> bool:
        """Whether to stop, of which each rank's wish was asked one call ago. Collective. step: steps made, None inside an evaluation."""
        if self._pending is not None:
            self._agreed = max(self._agreed, int(self._pending.wait().item()))
        self._pending = comm.start_all_reduce(torch.tensor([float(self._wish())]), self._world, "max")
        if self._agreed:
            self.reason = _REASONS[self._agreed]
        elif step is not None and self._output.exit_interval is not None and step % self._output.exit_interval == 0:
            self.reason = f"step {step} is a multiple of --exit-interval {self._output.exit_interval}"
        return self.reason is not None

    def finish(self) -> None:
        """Take in what is still on its way, so that every rank has made the same collectives."""
        if self._pending is not None:
            self._pending.wait()
            self._pending = None

    def _wish(self) -> int:
        limit = self._output.exit_duration_in_mins
        is_late = limit is not None and time.monotonic() - self._began >= 60 * limit
        return max(self._signal, _DURATION if is_late else _NONE)
