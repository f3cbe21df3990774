"""Gives the linear layers of a stage their low-rank adapters, and freezes everything else.

Decisions
- It works on a stage that has been built and has no memory yet, so that adapters get initial values, sharding and a place in
  checkpoints on the same paths as all parameters.
- A frozen parameter has requires_grad False, and nothing else marks it: the optimizer does not collect it, data parallelism reduces
  nothing for it, the planner gives it neither gradient nor state.
- The lengths of DoRA begin as those of the base weight's rows, so they are set when the base weights are there.
"""

from __future__ import annotations

from typing import cast

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from megalite import comm
from megalite.config_lora import TARGETS, LoraConfig
from megalite.model.gpt import GPTStage
from megalite.tensor_parallel.layers import ColumnParallelLinear, RowParallelLinear
from megalite.tensor_parallel.lora import Adapter, AdapterSettings
from megalite.tensor_parallel.parameter import to_local
from megalite.tensor_parallel.quantized import Int8Weight, QuantizedWeight, as_float

__all__ = ["add_adapters", "begin_magnitudes", "quantized_layers"]


def add_adapters(stage: GPTStage, lora: LoraConfig) -> None:
    """Freeze the stage and give the layers that `lora` chooses an adapter each. Without a rank nothing happens."""
    if lora.lora_r is None:
        return
    stage.requires_grad_(False)
    for name, layer in list(stage.named_modules()):
        if not isinstance(layer, ColumnParallelLinear | RowParallelLinear) or not (rank := lora.rank_of(name)):
            continue
        settings = AdapterSettings(
            rank=rank,
            scale=lora.scale_of(name),
            dropout=lora.lora_dropout,
            site=f"adapter of {name.rpartition('.')[2]}",
            use_dora=lora.use_dora,
        )
        layer.adapter = Adapter(layer.adapter_shape, stage.ctx, settings)
    if lora.quantize_base is not None:
        for name, layer in list(stage.named_modules()):
            if name.rpartition(".")[2] in TARGETS:
                assert isinstance(layer, ColumnParallelLinear | RowParallelLinear)
                _quantize(layer)


def _quantize(layer: ColumnParallelLinear | RowParallelLinear) -> None:
    rows, columns = to_local(layer.weight).shape
    layer.quantized = QuantizedWeight((rows, columns), layer.weight.device)
    del layer.weight
    layer.register_parameter("weight", None)


def quantized_layers(stage: GPTStage) -> dict[str, ColumnParallelLinear | RowParallelLinear]:
    """The layers whose weights are integers, by dotted name."""
    layers = {name: layer for name, layer in stage.named_modules() if getattr(layer, "quantized", None) is not None}
    return cast("dict[str, ColumnParallelLinear | RowParallelLinear]", layers)


@torch.no_grad()
def begin_magnitudes(stage: GPTStage) -> None:
    """Set the lengths of DoRA to those of the rows of the base weights; for adapters whose B is 0. Collective over tp.

    Data parallelism cuts weight and lengths along the same dimension 0, so a rank has the rows of the lengths that it holds.
    """
    for layer in stage.modules():
        adapter = getattr(layer, "adapter", None)
        if not isinstance(adapter, Adapter) or adapter.magnitude is None:
            continue
        assert isinstance(layer, ColumnParallelLinear | RowParallelLinear)
        weight = _local(layer.weight) if layer.quantized is None else _slice_like(layer.quantized.local(), adapter.magnitude)
        squares = as_float(weight).square().sum(1)
        if isinstance(layer, RowParallelLinear) and layer.tp.size > 1:
            squares = comm.all_reduce(squares, layer.tp)
        _local(adapter.magnitude).copy_(squares.sqrt())


def _slice_like(weight: Int8Weight, magnitude: nn.Parameter) -> Int8Weight:
    """The rows whose lengths this rank holds: data parallelism cuts those, and not the integers."""
    rows = len(_local(magnitude))
    if rows == len(weight.scales):
        return weight
    assert isinstance(magnitude, DTensor)
    names = magnitude.device_mesh.mesh_dim_names or ()
    ranks, rank = (magnitude.device_mesh.size(names.index("dp_shard")), magnitude.device_mesh.get_local_rank("dp_shard"))
    first = rank * -(-len(weight.scales) // ranks)
    return Int8Weight(*(part[first : first + rows] for part in weight))


def _local(parameter: Tensor) -> Tensor:
    value = parameter.detach()
    return value.to_local() if isinstance(value, DTensor) else value
