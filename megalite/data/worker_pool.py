"""Ordered work on a stream with worker processes, bounded in memory, that ends when a worker dies.

Decisions. Workers are spawned, not forked, so they hold neither the parent's threads nor its open files. At most a
few items per worker are in flight; results come in the order of the items, so that the output does not depend on the
number of workers. A dead worker breaks the pool at once (the standard executor notices), and whatever ends the stream
early kills the workers rather than wait for long documents. A worker also leaves when its parent vanishes, as nobody
would ever send it work again.
"""

from __future__ import annotations

import multiprocessing
import os
import signal
import threading
from collections import deque
from collections.abc import Callable, Generator, Iterable, Iterator
from concurrent.futures import Future, ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from contextlib import contextmanager
from typing import TypeVar

from megalite.errors import DataError

__all__ = ["map_in_order"]

Item = TypeVar("Item")
Result = TypeVar("Result")
_IN_FLIGHT_PER_WORKER = 3


def map_in_order(
    function: Callable[[Item], Result], items: Iterable[Item], num_workers: int, setup: Callable[[], None]
) -> Generator[Result, None, None]:
    """`function(item)` for each item, in order, computed in `num_workers` processes; each runs `setup()` first.

    `function` and `setup` must be picklable. Close the generator to stop early. Raises what `function` raises, and
    DataError when a worker dies.
    """
    context = multiprocessing.get_context("spawn")
    executor = ProcessPoolExecutor(num_workers, mp_context=context, initializer=_start_worker, initargs=(setup,))
    pending: deque[Future[Result]] = deque()
    finished = False
    try:
        for item in items:
            with _signals_deferred():  # the first call starts all processes; none may be half started and forgotten
                pending.append(executor.submit(function, item))
            if len(pending) >= _IN_FLIGHT_PER_WORKER * num_workers:
                yield pending.popleft().result()
        while pending:
            yield pending.popleft().result()
        finished = True
    except BrokenProcessPool:
        raise DataError(
            f"one of {num_workers} worker processes died; the system may have stopped it for lack of memory: "
            "use fewer workers, or cut very long documents"
        ) from None
    finally:
        with _signals_deferred():
            # The executor keeps its processes to itself until Python 3.14 (kill_workers), and forgets them in shutdown.
            processes = list((executor._processes or {}).values())
            if not finished:
                for process in processes:
                    process.kill()
            executor.shutdown(wait=True, cancel_futures=True)


@contextmanager
def _signals_deferred() -> Iterator[None]:
    """Let Ctrl-C and SIGTERM take effect only at the end of the block; only the main thread ever sees them."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    caught: list[int] = []
    handlers = {number: signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM)}
    handlers = {number: handler for number, handler in handlers.items() if handler is not None}  # None: not Python's
    for number in handlers:
        signal.signal(number, lambda number, _frame: caught.append(number))
    try:
        yield
    finally:
        for number, handler in handlers.items():
            signal.signal(number, handler)
        for number in caught:
            signal.raise_signal(number)


def _start_worker(setup: Callable[[], None]) -> None:
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C reaches the whole group; the parent alone decides
    threading.Thread(target=_leave_with_parent, daemon=True).start()
    setup()


def _leave_with_parent() -> None:
    parent = multiprocessing.parent_process()
    if parent is not None:
        parent.join()
        os._exit(1)
