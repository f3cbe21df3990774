"""A pool of rank processes: run a function in N ranks as if it were one call, and never hang.

Importing torch takes seconds, so workers are not started for each call. They are forked from a server process that has
imported torch (milliseconds each), stay alive between calls, and get a fresh gloo world for each call.

    with RankPool() as pool:
        pool.run(mean_loss, 4, layers=3)    # [value of rank 0, ..., value of rank 3]

Decisions:
- The first rank that fails is the failure of the call; the others, which may wait for it forever, are killed and
  replaced. A rank that died goes before one that raised: its neighbours' errors are only the consequence.
- A call that exceeds its time limit is reported with the Python stack of each rank that had not answered.
- Everything a failed call has touched is thrown away, so that the next call starts clean.
- One call at a time: the pool is not meant for use from several threads.

`rank_worker` holds what runs in the workers, and why a call has two phases.
"""

from __future__ import annotations

import contextlib
import multiprocessing
import os
import pickle
import sys
import tempfile
import time
import weakref
from collections.abc import Callable, Sequence
from multiprocessing.connection import Connection, wait
from multiprocessing.context import ForkServerProcess
from pathlib import Path
from typing import Any, NamedTuple

from megalite.testing.rank_worker import STACK_SIGNAL, Done, Failed, Job, worker_main

__all__ = ["RankError", "RankFailure", "RankPool", "RankTimeout"]

PRELOAD = ("torch", "torch.distributed", "torch.distributed.tensor", "torch.distributed.fsdp", "torch._dynamo")
START_TIMEOUT = 120.0  # seconds for the server to import torch on a busy machine
RELEASE_TIMEOUT = 30.0  # seconds for all ranks to take their world down
GRACE = 0.25  # seconds in which the cause of an error may still arrive after its consequence
STACK_WAIT = 2.0  # seconds for a rank to write its stack


class RankError(RuntimeError):
    """A call in several ranks gave no values."""


class RankFailure(RankError):
    """A rank raised an exception or died.

    `rank` is the first one to fail, `summary` its error in a line (`"ValueError: ..."`), `details` its traceback.
    """

    def __init__(self, name: str, rank: int, failed: Failed, others: dict[int, str]) -> None:
        self.rank, self.summary, self.details = rank, failed.summary, failed.details
        lines = [f"rank {rank} of {len(others) + 1} failed in {name}: {failed.summary}"]
        if failed.details:
            lines += [f"--- rank {rank}:", failed.details.rstrip()]
        lines += [f"--- rank {other}: {state}" for other, state in sorted(others.items())]
        super().__init__("\n".join(lines))


class RankTimeout(RankError):
    """Ranks did not answer in time; `stacks` maps each of them to its Python stack (innermost call first)."""

    def __init__(self, name: str, timeout: float, world_size: int, stacks: dict[int, str]) -> None:
        self.stacks = stacks
        lines = [f"{name}: {len(stacks)} of {world_size} ranks gave no answer within {timeout:g} s; they were killed"]
        for rank in range(world_size):
            lines.append(f"--- rank {rank}: " + (f"was here:\n{stacks[rank]}" if rank in stacks else "had finished"))
        super().__init__("\n".join(lines))


class _Worker(NamedTuple):
    process: ForkServerProcess
    connection: Connection
    stack_path: Path

    def send(self, message: object) -> None:
        with contextlib.suppress(OSError):  # the process is gone; receive() reports it
            self.connection.send(message)

    def receive(self) -> Done | Failed:
        try:
            return self.connection.recv()
        except (EOFError, OSError):
            self.process.join(5)
            code = self.process.exitcode
            how = f"by signal {-code}" if code is not None and code < 0 else f"with exit status {code}"
            return Failed(f"the process died {how}", "", time.monotonic(), died=True)

    def stack(self) -> str:
        """The Python stack of all threads, written by the process on a signal even while it is blocked in C++."""
        assert self.process.pid is not None
        try:
            os.kill(self.process.pid, STACK_SIGNAL)
        except ProcessLookupError:
            return "(it had died)"
        deadline = time.monotonic() + STACK_WAIT
        text, previous = "", None
        while time.monotonic() < deadline and (not text or text != previous):
            time.sleep(0.05)
            text, previous = self.stack_path.read_text(), text
        return text.rstrip() or "(it wrote no stack)"

    def kill(self) -> None:
        self.process.kill()
        self.process.join()
        self.process.close()
        self.connection.close()
        self.stack_path.unlink(missing_ok=True)


class RankPool:
    """Up to `max_ranks` worker processes that live until `close()`, the end of the `with` block, or the program's end.

    `preload` names modules that the workers find imported (only the first pool of a process decides).
    With `warnings_as_errors`, a deprecation, future or user warning in a rank is an exception there, except for
    messages whose beginning matches a regular expression of `ignored_warnings`.
    """

    def __init__(
        self,
        max_ranks: int = 8,
        *,
        preload: Sequence[str] = PRELOAD,
        warnings_as_errors: bool = True,
        ignored_warnings: Sequence[str] = (),
    ) -> None:
        self.max_ranks = max_ranks
        self._warnings_as_errors = warnings_as_errors
        self._ignored_warnings = tuple(ignored_warnings)
        self._context = multiprocessing.get_context("forkserver")
        self._context.set_forkserver_preload(list(preload))
        self._workers: list[_Worker] = []
        self._num_started = 0
        self._num_calls = 0
        self._folder = tempfile.TemporaryDirectory(prefix="megalite-ranks-")
        self._shut_down = weakref.finalize(self, _shut_down, self._workers, self._folder, os.getpid())

    def __enter__(self) -> RankPool:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        """End all workers. The pool cannot be used afterwards; closing twice is harmless."""
        self._shut_down()

    def run(self, function: Callable[..., Any], world_size: int, *args: Any, timeout: float = 60.0, **kwargs: Any) -> list[Any]:
        """Call `function(*args, **kwargs)` in `world_size` ranks and return their values in rank order.

        `function` stands at the top level of a module, and arguments and values can be pickled. In each rank the
        default process group is a gloo world of that size. `timeout` (seconds) covers the whole call.
        Every call begins with the same random state.

        Raises RankFailure when a rank raises or dies, RankTimeout when the limit is exceeded, ValueError when the pool
        is too small or closed, TypeError when the call cannot be pickled.
        """
        if not self._shut_down.alive:
            raise ValueError("this RankPool is closed")
        if not 1 <= world_size <= self.max_ranks:
            raise ValueError(f"world_size {world_size} is not in 1..{self.max_ranks} (max_ranks of this RankPool)")
        name = f"{function.__module__}.{function.__qualname__}"
        call = _pickle_call(name, function, args, kwargs)
        workers = self._take_workers(world_size)
        try:
            replies = self._run_world(name, call, workers, timeout)
        except BaseException:
            self._discard(workers)
            raise
        return [pickle.loads(reply.payload) for reply in replies]

    def _run_world(self, name: str, call: bytes, workers: list[_Worker], timeout: float) -> list[Done]:
        self._num_calls += 1
        rendezvous = Path(self._folder.name, f"world-{self._num_calls}")
        for rank, worker in enumerate(workers):
            job = Job(
                rank=rank,
                world_size=len(workers),
                rendezvous=str(rendezvous),
                call=call,
                timeout=timeout,
                sys_path=sys.path,
                warnings_as_errors=self._warnings_as_errors,
                ignored_warnings=self._ignored_warnings,
            )
            worker.send(job)
        replies = _collect(name, workers, timeout)
        for worker in workers:
            worker.send(Done())
        _collect(f"the end of {name}", workers, RELEASE_TIMEOUT)
        rendezvous.unlink(missing_ok=True)
        return replies

    def _take_workers(self, world_size: int) -> list[_Worker]:
        self._discard([worker for worker in self._workers if not worker.process.is_alive()])
        fresh = [self._start_worker() for _ in range(world_size - len(self._workers))]
        self._workers += fresh
        try:
            _collect("the start of the workers", fresh, START_TIMEOUT)
        except BaseException:
            self._discard(fresh)
            raise
        return self._workers[:world_size]

    def _start_worker(self) -> _Worker:
        self._num_started += 1
        ours, theirs = self._context.Pipe()
        stack_path = Path(self._folder.name, f"stack-{self._num_started}")
        process = self._context.Process(
            target=worker_main, args=(theirs, str(stack_path)), name=f"rank worker {self._num_started}", daemon=True
        )
        process.start()
        theirs.close()  # the worker holds the only other end: when it dies, our end says so
        return _Worker(process, ours, stack_path)  # pyright: ignore[reportArgumentType] (Pipe gives Connections on Unix)

    def _discard(self, workers: list[_Worker]) -> None:
        for worker in workers:
            worker.kill()
            self._workers.remove(worker)


def _pickle_call(name: str, function: Callable[..., Any], args: tuple, kwargs: dict[str, Any]) -> bytes:
    try:
        return pickle.dumps((function, args, kwargs))
    except (pickle.PicklingError, TypeError, AttributeError) as error:
        raise TypeError(
            f"{name} cannot be sent to the ranks ({error}); a function must stand at the top level of a module, "
            "and its arguments must be picklable"
        ) from error


def _collect(name: str, workers: list[_Worker], timeout: float) -> list[Done]:
    """One reply of each worker in order; raises RankFailure or RankTimeout."""
    replies: dict[int, Done | Failed] = {}
    deadline = time.monotonic() + timeout
    while len(replies) < len(workers):
        waiting = {worker.connection: rank for rank, worker in enumerate(workers) if rank not in replies}
        ready = wait(list(waiting), max(0.0, deadline - time.monotonic()))
        for connection in ready:
            rank = waiting[connection]  # pyright: ignore[reportArgumentType]
            replies[rank] = workers[rank].receive()
        failed = any(isinstance(reply, Failed) for reply in replies.values())
        if failed:
            deadline = min(deadline, time.monotonic() + GRACE)
        if not ready:
            if failed:
                break
            stacks = {rank: worker.stack() for rank, worker in enumerate(workers) if rank not in replies}
            raise RankTimeout(name, timeout, len(workers), stacks)
    _raise_first_failure(name, replies, len(workers))
    return [reply for _, reply in sorted(replies.items()) if isinstance(reply, Done)]


def _raise_first_failure(name: str, replies: dict[int, Done | Failed], world_size: int) -> None:
    failures = {rank: reply for rank, reply in replies.items() if isinstance(reply, Failed)}
    if not failures:
        return
    first = min(failures, key=lambda rank: (not failures[rank].died, failures[rank].moment))
    others = {}
    for rank in set(range(world_size)) - {first}:
        reply = replies.get(rank)
        if reply is None:
            others[rank] = "had not finished"
        elif isinstance(reply, Failed):
            others[rank] = f"failed after it: {reply.summary}"
        else:
            others[rank] = "had finished"
    raise RankFailure(name, first, failures[first], others)


def _shut_down(workers: list[_Worker], folder: tempfile.TemporaryDirectory, owner: int) -> None:
    if os.getpid() == owner:  # a fork of the owner must not end the owner's workers
        while workers:
            workers.pop().kill()
        folder.cleanup()
