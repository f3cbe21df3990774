"""A checkpoint of megalite that is to become something else: opened, verified, and its model known."""

from __future__ import annotations

from pathlib import Path

import torch

from megalite.checkpoint import newest_checkpoint
from megalite.checkpoint.files import check_contents
from megalite.checkpoint.reading import TensorReader
from megalite.config import RunConfig
from megalite.convert.writing import logical_shapes
from megalite.errors import CheckpointError, ConfigError
from megalite.grid import Axis

__all__ = ["DTYPES", "open_source"]

DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}


def open_source(path: Path, out: Path) -> tuple[TensorReader, RunConfig]:
    """path: a checkpoint or a --save folder (its newest one); out: where the result goes, a new or empty folder.

    Raises ConfigError for an `out` in use; CheckpointError where there is no checkpoint, its files are damaged or its weights are not the
    model's.
    """
    if out.exists() and (not out.is_dir() or any(out.iterdir())):
        raise ConfigError(f"{out} exists and is not an empty folder; give --output another path")
    checkpoint = newest_checkpoint(path)
    reader = TensorReader(checkpoint)
    check_contents(checkpoint, reader.manifest.files, Axis.single("world"))
    try:
        config = RunConfig.from_dict(reader.manifest.config)
    except ConfigError as error:
        raise CheckpointError(f"the manifest of {checkpoint} holds settings this megalite cannot read: {error}") from error
    stored, shapes = reader.stored, logical_shapes(config.model)
    wrong = [f"model.{name}" for name, shape in shapes.items() if stored.get(f"model.{name}", {}).get("shape") != list(shape)]
    if wrong:
        raise CheckpointError(f"{checkpoint} lacks {', '.join(wrong[:5])}, or holds another shape of it")
    return reader, config
