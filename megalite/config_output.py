"""Where results go, what is kept of them, and when a run ends before its last step.

Decision
- Policies about failing saves and damaged checkpoints default to stopping: going on is a choice that somebody has made.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

__all__ = ["OutputConfig"]


@dataclass(frozen=True, kw_only=True)
class OutputConfig:
    """Where results go, and when to stop early."""

    save: str | None = None
    """Folder for checkpoints, metrics and config.toml; a checkpoint is written at the end."""
    load: str | None = None
    """Folder to resume from: a --save folder (its newest checkpoint) or one checkpoint; not set: start at step 0."""
    load_weights_only: bool = False
    """Take only the weights of --load, and start at step 0 with a fresh optimizer and the data's beginning."""
    on_damaged_checkpoint: Literal["stop", "older"] = "stop"
    """What follows when the newest checkpoint of --load holds changed bytes: the end, or the next older one."""
    save_interval: int | None = None
    """Steps between checkpoints."""
    async_save: bool = False
    """Train on while a checkpoint is written; the run waits only for a copy of its state in host memory."""
    hash_tensors: bool = True
    """Write a hash of every tensor's content beside it, by which tools/checkpoint.py compares layouts and verifies tensors."""
    on_save_failure: Literal["stop", "continue"] = "stop"
    """What follows a checkpoint that cannot be written (a full disk, say): the end, or training on; older checkpoints stay either way."""
    keep_last: int | None = None
    """Newest checkpoints that are kept; not set: all."""
    keep_every: int | None = None
    """Checkpoints whose step is a multiple of this are kept too."""
    exit_interval: int | None = None
    """Save and end after a step that is a multiple of this."""
    exit_duration_in_mins: float | None = None
    """Save and end after the step in which the run has lasted this many minutes."""
    watchdog_seconds: float | None = None
    """End the run, and name the rank that the others wait for, when there is no progress for this long; not set: wait for the time-out."""
    straggler_factor: float | None = None
    """Name ranks whose own time, without waiting, exceeds that of the ranks with the same stage by this factor; not set: do not measure."""
    probe_dir: str | None = None
    """Folder for what the probed steps compute, which tools/compare_runs.py compares between layouts."""
    probe_steps: tuple[int, ...] = (1,)
    """Steps to probe with --probe-dir."""
    tensorboard_dir: str | None = None
    """Folder for TensorBoard."""
    metrics_file: str | None = None
    """JSON-lines file of metrics; not set: metrics.jsonl in the --save folder."""
    trace_pipeline: str | None = None
    """File for the measured pipeline timeline, which tools/draw_schedule.py --trace draws."""
