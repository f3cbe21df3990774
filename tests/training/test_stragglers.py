"""A rank that is slower than those with the same stage is named, although all ranks take the same time for a step."""

from __future__ import annotations

import logging
import math
import re
import time
from dataclasses import replace

import pytest
import torch

from megalite.config_output import OutputConfig
from megalite.log import get_logger
from megalite.pipeline.schedules import Action, Kind
from megalite.pipeline.trace import ActionClock, TimedAction
from megalite.testing.layouts import Layout
from megalite.testing.parity import build_in_this_world, tiny_config
from megalite.training.loop import train
from megalite.training.own_time import ActionMeter, typical_seconds
from megalite.training.stragglers import OwnTime, slow_ranks
from tests.ranks import run_ranks


def times(*seconds: float, places: str = "", is_enough: bool = True) -> list[OwnTime]:
    return [OwnTime(own, is_enough, int(place)) for own, place in zip(seconds, places or "0" * len(seconds), strict=True)]


def test_a_rank_is_compared_with_the_others_of_its_stage() -> None:
    assert slow_ranks(times(1.0, 1.1, 1.8, 0.9), 1.5) == [(2, pytest.approx(1.8))]
    assert slow_ranks(times(1.0, 3.0), 1.5) == [(1, pytest.approx(3.0))]
    assert slow_ranks(times(1.0, 5.0, 1.0, 5.0, places="0101"), 1.5) == [], "a stage with more work is not slow"
    assert slow_ranks(times(1.0, 5.0, 2.0, 20.0, places="0101"), 1.5) == [(3, pytest.approx(4.0)), (2, pytest.approx(2.0))]


def test_nobody_is_slow_without_a_comparison_or_enough_evidence() -> None:
    assert slow_ranks(times(1.0, 5.0, places="01"), 1.5) == []
    assert slow_ranks(times(1.0, 5.0, is_enough=False), 1.5) == []
    assert slow_ranks(times(0.0, 5.0), 1.5) == [(1, math.inf)]


def timed(kind: Kind, seconds: float, microbatch: int = 0) -> TimedAction:
    return TimedAction(0, 0, Action(kind, 0, microbatch), 1.0, 1.0 + seconds)


def test_an_action_that_holds_a_collective_does_not_show_in_the_typical_time() -> None:
    forwards = [timed(Kind.FORWARD, seconds) for seconds in (5.0, 1.0, 1.0)]
    backwards = [timed(Kind.BACKWARD, seconds) for seconds in (2.0, 2.0, 9.0, 2.0)]
    assert typical_seconds(forwards + backwards) == (pytest.approx(3 * 1.0 + 4 * 2.0), True)
    assert typical_seconds(forwards[:2] + backwards)[1] is False
    assert typical_seconds([]) == (0, False)


@pytest.mark.parametrize("is_shared", [False, True])
def test_a_clock_that_others_read_is_left_to_them(is_shared: bool) -> None:
    clock = ActionClock(0, torch.device("cpu"))
    for microbatch in range(3):
        clock.end(0, Action(Kind.FORWARD, 0, microbatch), clock.start())
    meter = ActionMeter(clock, is_shared)
    assert meter.read()[1]
    meter.reset()
    assert len(clock.take()) == (3 if is_shared else 0)


def train_with_a_slow_rank(layout: Layout, slow: int) -> tuple[list[str], list[list[float]]]:
    """What rank 0 logs, and writes of the ranks' times, while rank `slow` sleeps in each forward."""
    config = tiny_config()
    config = replace(config, train=replace(config.train, train_iters=4, log_interval=2), output=OutputConfig(straggler_factor=1.5))
    run = build_in_this_world(layout.apply(config).resolve())
    said: list[str] = []
    handler = logging.Handler()
    handler.emit = lambda record: said.append(record.getMessage())  # type: ignore[method-assign]
    get_logger().addHandler(handler)
    if run.grid.rank == slow:
        for stage in run.stages.values():
            stage.register_forward_pre_hook(lambda *_: time.sleep(0.1))
    assert run.stragglers is not None
    written: list[list[float]] = []
    run.metrics.report_own_seconds = lambda step, seconds: written.append(seconds)  # type: ignore[method-assign]
    try:
        train(run)
    finally:
        run.stragglers.close()
        get_logger().removeHandler(handler)
    return [line for line in said if "is slow" in line], written


@pytest.mark.parametrize(
    ("layout", "slow"), [(Layout(dp=2, zero=3), 1), (Layout(tp=2, pp=2, sequence_parallel=True), 3)], ids=["dp2-zero3", "tp2-pp2"]
)
def test_a_rank_that_is_slow_is_named(layout: Layout, slow: int) -> None:
    lines, written = run_ranks(train_with_a_slow_rank, layout.world_size, layout, slow, timeout=90)[0]
    pattern = re.compile(r"step (\d+): rank (\d+) \(.+\) is slow: its own time is [\d.]+x the median")
    named = [pattern.match(line).groups() for line in lines]  # type: ignore[union-attr]
    assert named[-1] == ("4", str(slow))
    assert {rank for _, rank in named} == {str(slow)}
    assert max(range(layout.world_size), key=written[-1].__getitem__) == slow
