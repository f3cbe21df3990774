"""A model for inference from whatever lies at a path: a checkpoint of megalite, or a Hugging Face folder as it is.

A Hugging Face folder is read tensor by tensor into the stage, without a checkpoint in between; every rank reads what it holds.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor, Shard

from megalite.checkpoint import has_checkpoints
from megalite.checkpoint.whole_model import empty_stage, load_model
from megalite.config import DataConfig, RunConfig
from megalite.convert.hf_config import model_from_hf, read_hf_config
from megalite.convert.hf_files import HFReader
from megalite.convert.hf_import import check_names, make_tensor
from megalite.convert.writing import logical_shapes
from megalite.grid import Grid
from megalite.model import GPTStage
from megalite.tensor_parallel.parameter import logical_name, named_parameter_info

__all__ = ["is_hf_folder", "load_any"]


def load_any(path: Path | str, device: torch.device | str = "cpu", grid: Grid | None = None) -> tuple[GPTStage, RunConfig]:
    """The model at `path` in evaluation mode (fp32) with its configuration, of which a Hugging Face folder only knows the model and the
    tokenizer. Arguments and errors are those of `load_model`; ConfigError also for a model that is not known here.
    """
    return load_hf(Path(path), device, grid) if is_hf_folder(Path(path)) else load_model(path, device, grid)


def is_hf_folder(path: Path) -> bool:
    return (path / "config.json").is_file() and not has_checkpoints(path)


def load_hf(folder: Path, device: torch.device | str = "cpu", grid: Grid | None = None) -> tuple[GPTStage, RunConfig]:
    """As `load_any`, of a Hugging Face folder."""
    raw = read_hf_config(folder)
    model = model_from_hf(raw)
    shapes = logical_shapes(model)
    stage = empty_stage(model, device, grid)
    infos = named_parameter_info(stage)
    with HFReader(folder) as reader:
        check_names(reader, shapes, raw["model_type"], model)
        for name, parameter in stage.named_parameters():
            _fill(parameter, make_tensor(reader, logical_name(name, infos[name]), raw["model_type"], shapes))
    return stage.eval(), RunConfig(model=model, data=_data_config(folder, model.max_position_embeddings))


@torch.no_grad()
def _fill(parameter: Tensor, whole: Tensor) -> None:
    """Copy this rank's part; its placements say which one that is."""
    if not isinstance(parameter, DTensor):
        parameter.copy_(whole)
        return
    (placement,), mesh = parameter.placements, parameter.device_mesh
    if isinstance(placement, Shard):
        whole = whole.chunk(mesh.size(), placement.dim)[mesh.get_local_rank()]
    parameter.to_local().copy_(whole)


def _data_config(folder: Path, longest: int | None) -> DataConfig:
    length = {} if longest is None else {"seq_length": longest}
    tokenizer: dict[str, Any] = {}
    if (folder / "tokenizer.json").is_file():
        tokenizer = {"tokenizer_type": "hf", "tokenizer_model": str(folder)}
    elif (folder / "tokenizer.model").is_file():
        tokenizer = {"tokenizer_type": "sentencepiece", "tokenizer_model": str(folder / "tokenizer.model")}
    return DataConfig(**length, **tokenizer)
