"""How tests run in several ranks: one pool of workers for the whole session.

    @pytest.mark.parametrize(("tp", "pp", "dp"), factorisations(4))
    def test_loss_does_not_depend_on_the_layout(tp, pp, dp):
        losses = run_ranks(loss_of, 4, tp, pp, dp)      # loss_of stands at the top level of the test module

Messages of warnings that a library raises in a rank through no fault of ours go to IGNORED_WARNINGS, with the reason.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from typing import Any

from megalite.testing import RankPool
from megalite.testing.rank_pool import PRELOAD

__all__ = ["close_pool", "factorisations", "run_ranks"]

MAX_RANKS = 8
IGNORED_WARNINGS: tuple[str, ...] = ()


@cache
def _session_pool() -> RankPool:
    # every worker imports pytest, once as the main module's and once as the test module's dependency
    return RankPool(MAX_RANKS, preload=(*PRELOAD, "pytest"), ignored_warnings=IGNORED_WARNINGS)


def run_ranks(function: Callable[..., Any], world_size: int, *args: Any, timeout: float = 60.0, **kwargs: Any) -> list[Any]:
    """Values of `function(*args, **kwargs)` in rank order, see `RankPool.run`."""
    __tracebackhide__ = True
    return _session_pool().run(function, world_size, *args, timeout=timeout, **kwargs)


def close_pool() -> None:
    """End the workers; the next `run_ranks` starts new ones."""
    if _session_pool.cache_info().currsize:
        _session_pool().close()
        _session_pool.cache_clear()


def factorisations(num_ranks: int) -> list[tuple[int, int, int]]:
    """All `(tp, pp, dp)` whose product is `num_ranks`."""
    sizes = [size for size in range(1, num_ranks + 1) if num_ranks % size == 0]
    return [(tp, pp, num_ranks // (tp * pp)) for tp in sizes for pp in sizes if num_ranks % (tp * pp) == 0]
