"""What all tests share: the repository root on the path, the end of the rank workers, a logger as it was."""

from __future__ import annotations

import logging
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = str(Path(__file__).resolve().parents[1])
if ROOT not in sys.path:  # for the programs at the top level, which are not installed
    sys.path.insert(0, ROOT)


@pytest.fixture(scope="session", autouse=True)
def _close_rank_pool() -> Iterator[None]:
    yield
    from tests.ranks import close_pool

    close_pool()


@pytest.fixture(autouse=True)
def _restore_logging() -> Iterator[None]:
    """A program that is called in a test configures the logger; the next test must not see that."""
    logger = logging.getLogger("megalite")
    before = (list(logger.handlers), logger.level, logger.propagate)
    yield
    logger.handlers[:], level, logger.propagate = before
    logger.setLevel(level)
