"""The worker pool: order, bounded look-ahead, and a quick end when something fails."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Iterator
from functools import partial

import pytest

from megalite.data.preprocess import _set_up_worker, default_workers
from megalite.data.worker_pool import map_in_order
from megalite.errors import DataError


def set_up() -> None:
    os.environ["MEGALITE_TEST_WORKER"] = "yes"


def square_slowly(number: int) -> tuple[int, str | None]:
    time.sleep(0.02 if number % 3 == 0 else 0)
    return number * number, os.environ.get("MEGALITE_TEST_WORKER")


def die_at(position: int, number: int) -> int:
    if number == position:
        os.kill(os.getpid(), signal.SIGKILL)
    return number


def fail_or_sleep(number: int) -> int:
    if number == 1:
        raise DataError("number 1 is wrong")
    time.sleep(0 if number == 0 else 600)
    return number


def test_results_come_in_order_with_a_bounded_look_ahead() -> None:
    """Requirement 9: a few items per worker are in flight, however long the stream."""
    taken: list[int] = []

    def items() -> Iterator[int]:
        for number in range(40):
            taken.append(number)
            yield number

    results = []
    for value in map_in_order(square_slowly, items(), 2, set_up):
        results.append(value)
        assert len(taken) - len(results) < 6
    assert results == [(number * number, "yes") for number in range(40)]
    assert "MEGALITE_TEST_WORKER" not in os.environ


@pytest.mark.timeout(60)
def test_a_killed_worker_ends_the_stream() -> None:
    """Requirement 10."""
    with pytest.raises(DataError, match="one of 2 worker processes died"):
        list(map_in_order(partial(die_at, 9), range(1_000_000), 2, set_up))


@pytest.mark.timeout(60)
def test_an_exception_does_not_wait_for_busy_workers() -> None:
    with pytest.raises(DataError, match="number 1 is wrong"):
        list(map_in_order(fail_or_sleep, range(4), 2, set_up))


@pytest.mark.timeout(60)
def test_closing_early_does_not_wait_for_busy_workers() -> None:
    results = map_in_order(fail_or_sleep, iter([0, 2, 3, 4, 5, 6, 7]), 2, set_up)
    assert next(results) == 0
    results.close()


def test_workers_have_a_default_and_libraries_one_thread(monkeypatch: pytest.MonkeyPatch) -> None:
    """Requirement 19: one worker per processor unless told otherwise; inside a worker the libraries start no threads."""
    assert 1 <= default_workers() <= 16
    for name in ("TOKENIZERS_PARALLELISM", "RAYON_NUM_THREADS"):
        monkeypatch.delenv(name, raising=False)
    assert list(map_in_order(_threads_setting, range(1), 1, _set_up_worker)) == [("false", "1")]


def _threads_setting(_: int) -> tuple[str | None, str | None]:
    return os.environ.get("TOKENIZERS_PARALLELISM"), os.environ.get("RAYON_NUM_THREADS")
