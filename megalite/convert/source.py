"""A checkpoint of megalite that is to become something else: opened, verified, and its model known.

One of adapters alone is read as the whole model that they make of their base.
"""

from __future__ import annotations

from pathlib import Path

import torch

from megalite.checkpoint import newest_checkpoint
from megalite.checkpoint.files import check_contents
from megalite.checkpoint.reading import TensorReader
from megalite.config import RunConfig
from megalite.convert.adapters import holds_adapters
from megalite.convert.base import stored_config
from megalite.convert.merged import MergedReader, open_merged
from megalite.convert.writing import logical_shapes
from megalite.errors import CheckpointError, ConfigError
from megalite.grid import Axis

__all__ = ["DTYPES", "check_empty", "open_source"]

DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}


def open_source(path: Path, out: Path, base: Path | None = None) -> tuple[TensorReader | MergedReader, RunConfig]:
    """path: a checkpoint or a --save folder (its newest one); out: where the result goes, a new or empty folder; base: of adapters, where
    it is not the folder that their run was given.

    Raises ConfigError for an `out` in use; CheckpointError where there is no checkpoint, its files are damaged or its weights are not the
    model's.
    """
    check_empty(out)
    checkpoint = newest_checkpoint(path)
    reader = TensorReader(checkpoint)
    if holds_adapters(reader.manifest.tensors):
        return open_merged(checkpoint, base)
    if base is not None:
        raise ConfigError(f"{checkpoint} holds a whole model: --base is for adapters")
    check_contents(checkpoint, reader.manifest.files, Axis.single("world"))
    config = stored_config(reader)
    stored, shapes = reader.stored, logical_shapes(config.model)
    wrong = [f"model.{name}" for name, shape in shapes.items() if stored.get(f"model.{name}", {}).get("shape") != list(shape)]
    if wrong:
        raise CheckpointError(f"{checkpoint} lacks {', '.join(wrong[:5])}, or holds another shape of it")
    return reader, config


def check_empty(out: Path) -> None:
    """Raises ConfigError for an `out` that exists and is no empty folder."""
    if out.exists() and (not out.is_dir() or any(out.iterdir())):
        raise ConfigError(f"{out} exists and is not an empty folder; give --output another path")
