"""Checkpoints: directories of logical tensors that any layout loads."""

from megalite.checkpoint.background import BackgroundSaver
from megalite.checkpoint.manifest import Manifest, read_manifest
from megalite.checkpoint.retention import expendable, prune
from megalite.checkpoint.store import (
    complete_checkpoints,
    find_checkpoint,
    has_checkpoints,
    load_tensors,
    newest_checkpoint,
    save_checkpoint,
    step_directory,
    step_of,
)

__all__ = [
    "BackgroundSaver",
    "Manifest",
    "complete_checkpoints",
    "expendable",
    "find_checkpoint",
    "has_checkpoints",
    "load_tensors",
    "newest_checkpoint",
    "prune",
    "read_manifest",
    "save_checkpoint",
    "step_directory",
    "step_of",
]
