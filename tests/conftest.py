"""What the whole test session shares: the repository root on the path, and the end of the rank workers."""

from __future__ import annotations

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
