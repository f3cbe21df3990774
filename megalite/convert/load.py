"""A model for inference from whatever lies at a path: a checkpoint of megalite, one of adapters, or a Hugging Face folder as it is.

A Hugging Face folder is read tensor by tensor into the stage, without a checkpoint in between; every rank reads what it holds. Adapters
are merged into their base in the same way: each whole weight is made, of which a rank keeps its part, so that rows that are cut over tp
need no communication for their lengths.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor, Shard

from megalite.checkpoint import newest_checkpoint, read_manifest
from megalite.checkpoint.whole_model import empty_stage, load_model
from megalite.config import LoraConfig, ModelConfig, RunConfig
from megalite.convert.adapters import holds_adapters
from megalite.convert.base import is_hf_folder, open_base
from megalite.convert.merged import open_merged
from megalite.grid import Grid
from megalite.model import GPTStage
from megalite.tensor_parallel.parameter import logical_name, named_parameter_info

__all__ = ["load_any"]


def load_any(path: Path | str, device: torch.device | str = "cpu", grid: Grid | None = None) -> tuple[GPTStage, RunConfig]:
    """The model at `path` in evaluation mode (fp32) with its configuration, of which a Hugging Face folder only knows the model and the
    tokenizer; adapters are merged, and the configuration has none. Arguments and errors are those of `load_model`; ConfigError also for a
    model that is not known here.
    """
    path = Path(path)
    if is_hf_folder(path):
        base = open_base(path)
        return _filled(base.model, base.read, device, grid), RunConfig(model=base.model, data=base.data)
    checkpoint = newest_checkpoint(path)
    if not holds_adapters(read_manifest(checkpoint).tensors):
        return load_model(checkpoint, device, grid)
    reader, settings = open_merged(checkpoint, world=None if grid is None else grid.world)
    return _filled(settings.model, reader.read, device, grid), replace(settings, lora=LoraConfig())


@torch.no_grad()
def _filled(model: ModelConfig, read: Callable[[str], Tensor], device: torch.device | str, grid: Grid | None) -> GPTStage:
    """read(logical name): a whole tensor."""
    stage = empty_stage(model, device, grid)
    infos = named_parameter_info(stage)
    for name, parameter in stage.named_parameters():
        _fill(parameter, read(logical_name(name, infos[name])))
    return stage.eval()


def _fill(parameter: Tensor, whole: Tensor) -> None:
    """Copy this rank's part; its placements say which one that is."""
    if not isinstance(parameter, DTensor):
        parameter.copy_(whole)
        return
    (placement,), mesh = parameter.placements, parameter.device_mesh
    if isinstance(placement, Shard):
        whole = whole.chunk(mesh.size(), placement.dim)[mesh.get_local_rank()]
    parameter.to_local().copy_(whole)
