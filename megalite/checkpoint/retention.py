"""Which checkpoints are kept.

Decisions
- A checkpoint goes only when `keep_last` newer complete ones are there; incomplete ones are neither counted nor touched.
- Deleting renames first: what is half deleted has no name under which a run would find it.
"""

from __future__ import annotations

import os
import shutil
from pathlib import Path

from megalite.checkpoint.store import complete_checkpoints, step_of

__all__ = ["expendable", "prune"]


def expendable(directory: Path, keep_last: int, keep_every: int | None = None) -> list[Path]:
    """Complete checkpoints below `directory` that need not be kept, oldest first. keep_every: multiples of this step stay."""
    assert keep_last > 0, "the newest checkpoint is always kept"
    older = complete_checkpoints(directory)[keep_last:]
    return [path for path in reversed(older) if keep_every is None or step_of(path) % keep_every]


def prune(directory: Path, keep_last: int, keep_every: int | None = None) -> list[Path]:
    """Delete what is expendable; returns what was deleted. Raises OSError."""
    removed = expendable(directory, keep_last, keep_every)
    for path in removed:
        hidden = path.with_name(f".{path.name}.deleted")
        shutil.rmtree(hidden, ignore_errors=True)  # of a deletion that was interrupted
        os.replace(path, hidden)
        shutil.rmtree(hidden)
    return removed
