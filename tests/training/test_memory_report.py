"""--memory-report: the table at the start, and the one with measurements at the end."""

from __future__ import annotations

import logging
from dataclasses import replace

import pytest

from megalite.config_numerics import MemoryConfig
from megalite.testing.layouts import Layout
from megalite.testing.parity import build_in_this_world, tiny_config
from megalite.training.loop import train
from tests.ranks import run_ranks


class _Lines(logging.Handler):
    def __init__(self) -> None:
        super().__init__()
        self.lines: list[str] = []

    def emit(self, record: logging.LogRecord) -> None:
        self.lines += record.getMessage().splitlines()


def report(steps: int) -> list[str]:
    config = tiny_config()
    config = replace(
        config,
        train=replace(config.train, train_iters=steps, log_interval=steps, eval_interval=None),
        memory=MemoryConfig(memory_report=True),
    )
    handler = _Lines()
    logger = logging.getLogger("megalite")
    logger.addHandler(handler)
    level = logger.level
    logger.setLevel(logging.INFO)
    try:
        train(build_in_this_world(Layout(pp=2).apply(config).resolve()))
    finally:
        logger.removeHandler(handler)
        logger.setLevel(level)
    return handler.lines


def test_predicted_at_the_start_and_measured_at_the_end() -> None:
    lines = run_ranks(report, 2, 3)[0]
    first, last = (
        next(i for i, line in enumerate(lines) if line.startswith(start)) for start in ("memory, predicted,", "memory, predicted and")
    )
    assert lines[first + 1].split() == ["pp", "rank", "0", "pp", "rank", "1"]
    assert "/" not in lines[first + 2]
    for name in ("weights (fp32)", "peak of a step"):
        row = next(line for line in lines[last:] if line.startswith(name))
        pairs = row.removeprefix(name).replace("/", " ").split()
        assert len(pairs) == 4
        for predicted, measured in zip(pairs[::2], pairs[1::2], strict=True):
            assert float(measured) == pytest.approx(float(predicted), rel=0.1)


def test_a_run_of_one_step_says_that_nothing_was_measured() -> None:
    assert any("takes 2 steps" in line for line in run_ranks(report, 2, 1)[0])
