"""Memory as predicted at the start and as measured in a step, side by side.

Decisions
- Measured is one step, the second of the run: in the first one libraries still allocate. On a GPU the allocator knows the peak; on a
  CPU all living tensors are counted (`planner.live_storages`), which makes that one step slow.
- Every rank predicts and measures for itself; rank 0 prints the ranks of one pipeline, the fullest of each place.
- Of what a step adds to weights and optimizer state only the sum can be measured from outside.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from megalite import comm
from megalite.grid import Grid
from megalite.log import get_logger
from megalite.pipeline.lowering import Program
from megalite.planner.live_storages import LiveStorages, storage_bytes
from megalite.planner.plan import RankMemory
from megalite.training.plan import plan_memory
from megalite.training.tensors import run_tensors

if TYPE_CHECKING:
    from megalite.config import RunConfig
    from megalite.training.setup import Run

__all__ = ["MemoryReport", "measured_peak", "memory_table"]

_MEASURED_STEP = 2


@dataclass
class MemoryReport:
    """Of one rank. The measured values are bytes, None until there was a second step."""

    predicted: RankMemory
    weights: int | None = None
    optimizer: int | None = None
    peak: int | None = None
    num_steps: int = 0

    @classmethod
    def predict(cls, config: RunConfig, program: Program, grid: Grid) -> MemoryReport:
        """Collective: logs the table of predictions. config: resolved; program: of a whole training step."""
        report = cls(plan_memory(config, program, grid.world_size, grid.pp.rank, grid.device.type))
        report._log(grid, "memory, predicted")
        return report

    @contextmanager
    def around_step(self, run: Run) -> Iterator[None]:
        """Measure the step inside, if it is the one to be measured."""
        self.num_steps += 1
        if self.num_steps != _MEASURED_STEP:
            yield
            return
        tensors = run_tensors(run)
        self.weights = storage_bytes(value for name, value in tensors.items() if name.startswith("model."))
        self.optimizer = storage_bytes(value for name, value in tensors.items() if name.startswith("optimizer."))
        with measured_peak(run) as peak:
            yield
        self.peak = peak[0]

    def finish(self, grid: Grid) -> None:
        """Collective: logs predictions and measurements side by side."""
        if self.peak is None:
            get_logger().info(f"memory was not measured: that takes {_MEASURED_STEP} steps")
        else:
            self._log(grid, "memory, predicted and measured")

    def rows(self) -> dict[str, tuple[int, int | None]]:
        """{what: (predicted, measured)} in bytes."""
        found: dict[str, tuple[int, int | None]] = {name: (value, None) for name, value in self.predicted.rows().items()}
        found["weights (fp32)"] = (found["weights (fp32)"][0], self.weights)
        found["optimizer state"] = (found["optimizer state"][0], self.optimizer)
        found["peak of a step"] = (self.predicted.total, self.peak)
        return found

    def _log(self, grid: Grid, title: str) -> None:
        every = comm.all_gather_object((grid.pp.rank, self.rows()), grid.world)
        fullest: dict[int, dict[str, tuple[int, int | None]]] = {}
        for place, rows in every:
            known = fullest.setdefault(place, rows)
            fullest[place] = {name: _larger(known[name], rows[name]) for name in known}
        get_logger().info(f"{title}, MiB of the fullest rank at each place of the pipeline\n{memory_table(fullest)}")


def _larger(one: tuple[int, int | None], other: tuple[int, int | None]) -> tuple[int, int | None]:
    measured = [value for value in (one[1], other[1]) if value is not None]
    return max(one[0], other[0]), max(measured, default=None)


def memory_table(places: dict[int, dict[str, tuple[int, int | None]]]) -> str:
    """places: {rank in the pipeline: {what: (predicted, measured)}} in bytes."""
    order = sorted(places)
    lines = [f"{'':24}" + "".join(f"{f'pp rank {place}':>22}" for place in order)]
    for name in places[order[0]]:
        lines.append(f"{name:24}" + "".join(f"{_pair(*places[place][name]):>22}" for place in order))
    return "\n".join(lines)


def _pair(predicted: int, measured: int | None) -> str:
    text = f"{predicted / 2**20:,.2f}"
    return text if measured is None else f"{text} / {measured / 2**20:,.2f}"


@contextmanager
def measured_peak(run: Run) -> Iterator[list[int]]:
    """Yields a list that holds the peak in bytes, of weights, optimizer state and all that the body makes, once the body is left."""
    peak: list[int] = []
    if run.grid.device.type == "cuda":
        torch.cuda.reset_peak_memory_stats(run.grid.device)
        yield peak
        peak.append(torch.cuda.max_memory_allocated(run.grid.device))
        return
    tensors: list[Tensor] = list(run_tensors(run).values())
    with LiveStorages(tensors) as live:
        yield peak
    peak.append(live.peak)
