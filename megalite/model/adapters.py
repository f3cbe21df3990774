"""Gives the linear layers of a stage their low-rank adapters, and freezes everything else.

Decisions
- It works on a stage that has been built and has no memory yet, so that adapters get initial values, sharding and a place in
  checkpoints on the same paths as all parameters.
- A frozen parameter has requires_grad False, and nothing else marks it: the optimizer does not collect it, data parallelism reduces
  nothing for it, the planner gives it neither gradient nor state.
- The lengths of DoRA begin as those of the base weight's rows, so they are set when the base weights are there.
"""

from __future__ import annotations

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor

from megalite import comm
from megalite.config_lora import LoraConfig
from megalite.model.gpt import GPTStage
from megalite.tensor_parallel.layers import ColumnParallelLinear, RowParallelLinear
from megalite.tensor_parallel.lora import Adapter, AdapterSettings

__all__ = ["add_adapters", "begin_magnitudes"]


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
        squares = _local(layer.weight).float().square().sum(1)
        if isinstance(layer, RowParallelLinear) and layer.tp.size > 1:
            squares = comm.all_reduce(squares, layer.tp)
        _local(adapter.magnitude).copy_(squares.sqrt())


def _local(parameter: Tensor) -> Tensor:
    value = parameter.detach()
    return value.to_local() if isinstance(value, DTensor) else value
