"""Who says what: rank 0 everything, the others warnings with their number in front, each line once."""

from __future__ import annotations

import logging
from collections.abc import Iterator

import pytest

from megalite.log import configure_logging, get_logger


@pytest.fixture(autouse=True)
def untouched_logger() -> Iterator[None]:
    logger = logging.getLogger("megalite")
    before = logger.handlers[:], logger.level, logger.propagate
    yield
    logger.handlers[:], logger.level, logger.propagate = before


def said(capsys: pytest.CaptureFixture[str], rank: int, world_size: int) -> list[str]:
    configure_logging(rank, world_size)
    configure_logging(rank, world_size)  # a second call replaces the first one's handler
    for level in ("debug", "info", "warning"):
        getattr(get_logger("somewhere"), level)(level)
    captured = capsys.readouterr()
    assert captured.out == ""
    return [line.split(" ", 1)[1] for line in captured.err.splitlines()]  # without the time


@pytest.mark.parametrize(
    ("rank", "world_size", "lines"),
    [(0, 1, ["info", "warning"]), (0, 4, ["info", "warning"]), (3, 4, ["[rank 3] warning"])],
)
def test_ranks_other_than_the_first_only_warn(capsys: pytest.CaptureFixture[str], rank: int, world_size: int, lines: list[str]) -> None:
    assert said(capsys, rank, world_size) == lines


def test_a_logger_belongs_to_megalite() -> None:
    assert get_logger().name == "megalite"
    assert get_logger("megalite.data.blend").name == "megalite.data.blend"
    assert get_logger("tools").name == "megalite.tools"
