"""The whole model that adapters belong to: a checkpoint of megalite or a Hugging Face folder, read tensor by tensor."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from torch import Tensor

from megalite.checkpoint import has_checkpoints, newest_checkpoint
from megalite.checkpoint.files import check_contents
from megalite.checkpoint.reading import TensorReader
from megalite.config import DataConfig, ModelConfig, RunConfig
from megalite.convert.adapters import holds_adapters
from megalite.convert.hf_config import model_from_hf, read_hf_config
from megalite.convert.hf_files import HFReader
from megalite.convert.hf_import import check_names, make_tensor
from megalite.convert.writing import logical_shapes
from megalite.errors import CheckpointError, ConfigError
from megalite.grid import Axis

__all__ = ["Base", "data_of_hf", "is_hf_folder", "open_base", "stored_config"]


@dataclass(frozen=True)
class Base:
    """read(logical name without "model."): a whole tensor in new memory. companions: the folder of tokenizer and configuration that
    go with the weights; it need not exist."""

    folder: Path
    model: ModelConfig
    data: DataConfig
    companions: Path
    read: Callable[[str], Tensor]


def open_base(folder: Path, world: Axis | None = None) -> Base:
    """folder: a Hugging Face folder, a checkpoint or a --save folder (its newest one). Collective over `world`, if given.

    Raises CheckpointError where there is no whole model or its files are damaged, ConfigError for one that is not known here.
    """
    if is_hf_folder(folder):
        return _open_hf(folder)
    if not has_checkpoints(folder):
        raise CheckpointError(
            f"the base of the adapters, {folder}, is no checkpoint and no Hugging Face folder; if it was moved, convert with --base DIR"
        )
    checkpoint = newest_checkpoint(folder)
    reader = TensorReader(checkpoint)
    if holds_adapters(reader.manifest.tensors):
        raise CheckpointError(f"{checkpoint} holds adapters, not a whole model: their base must be the model that they belong to")
    check_contents(checkpoint, reader.manifest.files, world or Axis.single("world"))
    config = stored_config(reader)
    return Base(folder, config.model, config.data, checkpoint.parent / "hf", lambda name: reader.read(f"model.{name}"))


def stored_config(reader: TensorReader) -> RunConfig:
    """Raises CheckpointError for settings of another version."""
    try:
        return RunConfig.from_dict(reader.manifest.config)
    except ConfigError as error:
        raise CheckpointError(f"the manifest of {reader.checkpoint} holds settings this megalite cannot read: {error}") from error


def is_hf_folder(path: Path) -> bool:
    return (path / "config.json").is_file() and not has_checkpoints(path)


def _open_hf(folder: Path) -> Base:
    raw = read_hf_config(folder)
    model, family = model_from_hf(raw), raw["model_type"]
    shapes = logical_shapes(model)
    reader = HFReader(folder)
    check_names(reader, shapes, family, model)
    data = data_of_hf(folder, model.max_position_embeddings)
    return Base(folder, model, data, folder, lambda name: make_tensor(reader, name, family, shapes))


def data_of_hf(folder: Path, longest: int | None) -> DataConfig:
    """What a Hugging Face folder knows of data: positions and tokenizer."""
    length = {} if longest is None else {"seq_length": longest}
    tokenizer: dict[str, Any] = {}
    if (folder / "tokenizer.json").is_file():
        tokenizer = {"tokenizer_type": "hf", "tokenizer_model": str(folder)}
    elif (folder / "tokenizer.model").is_file():
        tokenizer = {"tokenizer_type": "sentencepiece", "tokenizer_model": str(folder / "tokenizer.model")}
    return DataConfig(**length, **tokenizer)
