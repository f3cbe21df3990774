"""Ends a run that stands still, soon and with the name of the rank that the others wait for.

Progress of a rank is: a step made, another action of the pipeline, another batch of an evaluation, another phase (`progress.doing`), or
another collective of ours begun or waited for. A rank without any for longer than its limit compares itself with the others
(`blame`); the first rank that comes to a verdict announces it, every rank that can still run writes the stacks of its threads, its action
and its last collective to standard error, and all leave with a non-zero exit code.

| the limit is                      | when                                                                    |
|-----------------------------------|-------------------------------------------------------------------------|
| --watchdog-seconds                | as a rule                                                               |
| 5 x the median step               | where that is more                                                      |
| 10 x that                         | until the first step is made, and while any rank saves                  |
| none                              | before training begins (building, loading) and after it                 |

Decisions
- Threads watch, so that a training thread that hangs in a collective, or anywhere outside the interpreter lock, is no obstacle. Where
  native code holds the lock, Python's fault handler writes the stacks after the limit from a thread of its own, and the others see silence.
- The training thread pays nothing: what is read here are attributes that it sets anyway.
- A process that was itself stopped for a while knows nothing of that time and begins to count anew.
- Where the store does not answer, the process that holds it is to blame: that of rank 0, or under torchrun the launcher of the first node.
- Collectives inside FSDP2 are not ours and so not the "last collective"; the stacks show them.
"""

from __future__ import annotations

import faulthandler
import socket
import statistics
import sys
import threading
import time
import traceback
from collections import deque
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from datetime import timedelta
from types import FrameType

from megalite.errors import CommError
from megalite.training.blame import Entry, blame, is_silent, table
from megalite.training.board import Board
from megalite.training.launch import Launch, end_process
from megalite.training.own_time import is_waiting, place
from megalite.training.setup import Run

__all__ = ["Watchdog", "limit_s", "watch"]

MEDIANS = 5
PATIENCE = 10
_STEPS = 51  # of which the median is taken
_STORE_TIMEOUT = timedelta(seconds=5)
_WAIT_FOR_OTHERS = 3.0  # seconds in which the others write their stacks
_LEAVE_AFTER_FAILURE = 10.0  # seconds in which a rank notices by itself that another one has failed


@contextmanager
def watch(run: Run, launch: Launch) -> Iterator[None]:
    """Watch over training inside, where --watchdog-seconds asks for it; for the training thread of every rank."""
    if run.config.output.watchdog_seconds is None:
        yield
        return
    watchdog = Watchdog(run, launch, run.config.output.watchdog_seconds)
    watchdog.start()
    try:
        yield
    finally:
        watchdog.stop()


def limit_s(seconds: float, durations: deque[float], is_long: bool) -> float:
    """Seconds without progress that are too many. durations: of the last steps. See the table above."""
    limit = max(seconds, MEDIANS * statistics.median(durations)) if durations else seconds
    return PATIENCE * limit if is_long else limit


class Watchdog:
    """Watches the thread that makes it."""

    def __init__(self, run: Run, launch: Launch, seconds: float) -> None:
        self._state, self._progress, self._launch, self._seconds = run.state, run.grid.progress, launch, seconds
        self._target, self._host = threading.get_ident(), socket.gethostname()
        self.tick_s = min(1.0, seconds / 5)
        self.stale_s = 5 * self.tick_s
        now = time.monotonic()
        self._looked_at = self._changed_at = self._stepped_at = now
        self._mark, self._step = self._read_mark(), run.state.step
        self._durations: deque[float] = deque(maxlen=_STEPS)
        self._failed_at: float | None = None
        store = launch.store.clone()  # type: ignore[attr-defined]
        store.set_timeout(_STORE_TIMEOUT)
        self._board = Board(store, launch.rank, launch.world_size, self.tick_s, self._entry(now))
        self._end = threading.Event()
        self._thread = threading.Thread(target=self._watch, name="watchdog", daemon=True)

    def start(self) -> None:
        self._board.start()
        self._arm()
        self._thread.start()

    def stop(self) -> None:
        """This rank has come to its end; it waits for no answer of the others."""
        self._end.set()
        self._thread.join(timeout=1.0)
        faulthandler.cancel_dump_traceback_later()
        self._board.finish(timeout_s=1.0)

    def _watch(self) -> None:
        while not self._end.wait(self.tick_s):
            now = time.monotonic()
            self._look(now)
            verdict = self._judge(now)
            if self._end.is_set():
                return
            if verdict is not None:
                self._end_run(verdict)
            self._arm()

    def _arm(self) -> None:
        """Let the fault handler write the stacks where this thread cannot come back in time."""
        if sys.__stderr__ is not None:
            faulthandler.dump_traceback_later(self._limit_s, file=sys.__stderr__)

    def _read_mark(self) -> tuple[int, str, int]:
        return self._state.step, self._progress.doing, self._progress.num_comms

    def _look(self, now: float) -> None:
        """Take down what has changed, and tell the board."""
        mark, step = self._read_mark(), self._state.step
        if now - self._looked_at > self.tick_s + self.stale_s:  # this process, or its interpreter, stood still
            self._changed_at = self._stepped_at = now
            self._board.forget()
        if mark != self._mark:
            self._mark, self._changed_at = mark, now
        if step != self._step:
            self._durations.append((now - self._stepped_at) / max(1, step - self._step))
            self._step, self._stepped_at = step, now
        self._looked_at = now
        self._board.entry = self._entry(now)

    def _entry(self, now: float) -> Entry:
        frame = sys._current_frames().get(self._target)
        comm = self._progress.last_comm
        return Entry(
            host=self._host,
            step=self._state.step,
            doing=self._progress.doing,
            comm="none" if comm is None else f"{comm[0]} over {comm[1]}",
            where="nowhere" if frame is None else place(frame),
            is_waiting=frame is not None and is_waiting(frame),
            quiet_s=now - self._changed_at,
            limit_s=limit_s(self._seconds, self._durations, self._progress.is_long),
        )

    @property
    def _limit_s(self) -> float:
        """Of this rank. The first step's patience is not told to others: they have made theirs when they come to ask."""
        return limit_s(self._seconds, self._durations, self._progress.is_long or not self._durations)

    def _judge(self, now: float) -> str | None:
        """Why the run must end, None while it need not."""
        board, quiet_s, limit = self._board, self._board.entry.quiet_s, self._limit_s
        if board.verdict is not None:
            return board.verdict
        if board.has_failure:
            self._failed_at = self._failed_at or now
            return "another rank failed" if now - self._failed_at > _LEAVE_AFTER_FAILURE else None
        board.is_reading = quiet_s > limit / 2
        if quiet_s <= limit:
            return None
        if now - board.answered_at > self.stale_s:
            what = f"the others wait for {self._holder()}: its rendezvous store does not answer; the process is stopped, dead or cut off"
            return self._message(limit, what)
        if board.reading_since is None or now - board.reading_since <= self.stale_s + self.tick_s:
            return None
        return self._compare(now, limit)

    def _compare(self, now: float, limit: float) -> str | None:
        """What the entries of all ranks say."""
        board = self._board
        seen, changed_at = dict(board.entries), dict(board.changed_at)
        ranks, since = range(board.world_size), board.reading_since or now
        entries: dict[int, Entry | None] = {rank: seen.get(rank) for rank in ranks}
        entries[self._launch.rank] = board.entry
        limit = max([limit, *(entry.limit_s for entry in entries.values() if entry is not None and not entry.is_finished)])
        if board.entry.quiet_s <= limit:
            return None
        ages = {rank: 0.0 if rank == self._launch.rank else now - changed_at.get(rank, since) for rank in ranks}
        found = blame(entries, ages, self.stale_s)
        names = ", ".join(f"rank {rank} ({entry.host})" if (entry := entries[rank]) else f"rank {rank}" for rank in found.ranks[:8])
        names += f" and {len(found.ranks) - 8} more" if len(found.ranks) > 8 else ""
        return self._message(limit, f"the others wait for {names}: {found.reason}\n{table(entries, ages, found.ranks)}")

    def _message(self, limit: float, what: str) -> str:
        median = f", median step {statistics.median(self._durations):.3g} s" if self._durations else ""
        return f"no progress for more than {limit:.0f} s (--watchdog-seconds {self._seconds:g}{median}); {what}"

    def _holder(self) -> str:
        return "rank 0" if self._launch.launcher is None else "the launcher (torchrun) of the first node"

    def _end_run(self, verdict: str) -> None:
        board = self._board
        faulthandler.cancel_dump_traceback_later()
        if board.verdict is None and board.has_failure:
            end_process(self._launch, CommError(verdict), is_first=False)
        is_first = False if board.verdict is not None else board.claim(verdict, timeout_s=self.stale_s)
        _write(self._stacks())
        if is_first is None:  # nobody can agree through the store: the first rank that can run speaks
            is_first = self._launch.rank == (1 if self._launch.world_size > 1 else 0)
        else:
            self._wait_for_dumps()
        end_process(self._launch, CommError(verdict), is_first=is_first)

    def _wait_for_dumps(self) -> None:
        """Leave together: the store may be this process, and a launcher ends the others when the first one leaves."""
        board, now = self._board, time.monotonic()
        unheard = [
            rank
            for rank, entry in dict(board.entries).items()
            if entry.is_finished or is_silent(entry, now - board.changed_at.get(rank, now), self.stale_s)
        ]
        with suppress(RuntimeError):  # the store has gone with its process
            board.count_dump()
            board.wait_for_dumps(board.world_size - len(unheard), _WAIT_FOR_OTHERS)

    def _stacks(self) -> str:
        """Where each thread stands, the training thread first; every line says of which rank."""
        entry, names = self._board.entry, {thread.ident: thread.name for thread in threading.enumerate()}
        lines = [f"{entry.step} steps made, {entry.doing}, last collective {entry.comm}, no progress for {entry.quiet_s:.0f} s"]
        frames = sys._current_frames()
        for ident in sorted(frames, key=lambda ident: ident != self._target):
            if ident not in (threading.get_ident(), self._board.ident):
                lines += [f"thread {names.get(ident, ident)} (most recent call last):", *_stack(frames[ident])]
        return "".join(f"[rank {self._launch.rank}] {line}\n" for line in lines)


def _stack(frame: FrameType) -> list[str]:
    return [line for part in traceback.format_stack(frame) for line in part.rstrip("\n").split("\n")]


def _write(text: str) -> None:
    sys.stderr.write(text)
    sys.stderr.flush()
