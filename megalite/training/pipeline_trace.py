"""The measured pipeline timeline of a run, from the ranks that record it to one file.

Decisions
- One pipeline is recorded: that of the first tp and the first dp rank. The others do the same at the same time.
- Records wait on their rank until the run reports; only then are they gathered and written.
"""

from __future__ import annotations

from pathlib import Path

from megalite import comm
from megalite.grid import Grid
from megalite.pipeline.schedules import Schedule
from megalite.pipeline.trace import ActionClock, TraceWriter, clock_offset

__all__ = ["PipelineTrace"]


class PipelineTrace:
    """`clock` goes to the pipeline runtime; `flush` writes. Both are for the ranks of the recorded pipeline only."""

    def __init__(self, grid: Grid, schedule: Schedule, path: Path) -> None:
        self._pp = grid.pp
        self.clock = ActionClock(grid.pp.rank, grid.device, clock_offset(grid.pp, grid.device))
        self._writer = TraceWriter(path, schedule) if grid.pp.is_first else None

    @classmethod
    def start(cls, grid: Grid, schedule: Schedule, path: str | None) -> PipelineTrace | None:
        """The trace of this rank's pipeline; None where none was asked for or another pipeline is recorded. Collective over pp."""
        if path is None or not (grid.tp.is_first and grid.dp.is_first):
            return None
        return cls(grid, schedule, Path(path))

    def flush(self) -> None:
        """Write what was recorded since the last flush. Collective over pp."""
        gathered = comm.all_gather_object(self.clock.take(), self._pp)
        if self._writer is not None:
            self._writer.write(item for part in gathered for item in part)

    def close(self) -> None:
        self.flush()
        if self._writer is not None:
            self._writer.close()
