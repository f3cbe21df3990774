"""Checkpoints: directories of logical tensors that any layout loads."""

from megalite.checkpoint.manifest import Manifest, read_manifest
from megalite.checkpoint.store import (
    complete_checkpoints,
    find_checkpoint,
    has_checkpoints,
    load_tensors,
    newest_checkpoint,
    save_checkpoint,
    step_directory,
)

__all__ = [
    "Manifest",
    "complete_checkpoints",
    "find_checkpoint",
    "has_checkpoints",
    "load_tensors",
    "newest_checkpoint",
    "read_manifest",
    "save_checkpoint",
    "step_directory",
]
