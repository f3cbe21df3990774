"""Names ranks that are slower than the ranks that do the same work.

Decisions
- Compared is a rank's own time (`own_time`), because with collectives all ranks take the same time for a step.
- Ranks at the same place of the pipeline do the same work. A rank is compared with the median of the others there: with that of all, the
  slow one of two could never be more than twice the median.
- One all-gather of three numbers per rank and log interval, on the host; between them nothing is sent and nothing waits.
- A rank is named only on enough evidence (`own_time`). An interval in which no rank has given enough is added to the next one.
"""

from __future__ import annotations

import math
import socket
import statistics
from collections.abc import Sequence
from typing import NamedTuple

import torch

from megalite import comm
from megalite.grid import Grid
from megalite.log import get_logger
from megalite.pipeline.trace import ActionClock
from megalite.training.own_time import new_meter

__all__ = ["OwnTime", "Slow", "Stragglers", "slow_ranks"]

MOST_NAMES = 8


class OwnTime(NamedTuple):
    """Of one rank in one interval. seconds: its own; place: its rank along the pipeline."""

    seconds: float
    is_enough: bool
    place: int


class Slow(NamedTuple):
    """A rank that takes `ratio` times the median of the others at its place."""

    rank: int
    ratio: float


def slow_ranks(times: Sequence[OwnTime], factor: float) -> list[Slow]:
    """The ranks above `factor`, slowest first. times: of all ranks in order.

    Neither a rank that is alone at its place nor one with too little evidence is slow.
    """
    found = []
    for rank, own in enumerate(times):
        others = [other.seconds for number, other in enumerate(times) if number != rank and other.place == own.place]
        median = statistics.median(others) if others else 0.0
        if others and own.is_enough and own.seconds > factor * median:
            found.append(Slow(rank, own.seconds / median if median > 0 else math.inf))
    return sorted(found, key=lambda slow: -slow.ratio)


class Stragglers:
    """Measures this rank from now on. clock: what the pipeline runtime has already; `self.clock` is what it is to have. Collective."""

    def __init__(self, grid: Grid, factor: float, clock: ActionClock | None) -> None:
        self._grid, self._factor = grid, factor
        self._hosts: list[str] = comm.all_gather_object(socket.gethostname(), grid.world)
        if grid.world_size == grid.pp.size:
            get_logger().warning("--straggler-factor has no effect: no two ranks do the same work, because tp and dp are 1")
        self._meter, self.clock = new_meter(grid.progress, grid.device, grid.rank, clock)

    def report(self, step: int) -> list[float]:
        """Log who was slow in the steps up to `step`. Collective.

        Returns the seconds that each rank has worked since they were last returned, [] while that is too little to tell; the same
        on every rank.
        """
        seconds, is_enough = self._meter.read()
        mine = torch.tensor([[seconds, float(is_enough), float(self._grid.pp.rank)]], dtype=torch.float64)
        times = [OwnTime(own, bool(enough), int(place)) for own, enough, place in comm.all_gather(mine, self._grid.world).tolist()]
        if not any(time.is_enough for time in times):
            return []
        self._meter.reset()
        found = slow_ranks(times, self._factor)
        if self._grid.world.is_first:
            for slow in found[:MOST_NAMES]:
                get_logger().warning(
                    f"step {step}: rank {slow.rank} ({self._hosts[slow.rank]}) is slow: its own time is {slow.ratio:.2f}x the median of "
                    "the other ranks with the same stage"
                )
            if len(found) > MOST_NAMES:
                get_logger().warning(f"step {step}: {len(found) - MOST_NAMES} more ranks are slow")
        return [own.seconds for own in times]

    def close(self) -> None:
        self._meter.close()
