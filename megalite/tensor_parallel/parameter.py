"""Parameters that know how they are cut over tp and what they are for.

Decisions
- The placements of a tp `DTensor` are the one record of how a parameter is cut; initialisation, gradient norm,
  checkpoint and conversion read them. The arithmetic runs on local tensors (`to_local`), so a DTensor never decides
  about communication.
- Everything else that a later part must know stands in a `ParameterInfo` beside the parameter, in
  `module.parameter_info`. A parameter without one is a mistake of ours, not "replicated".
- At tp 1 a parameter is a plain tensor. Parameters may be made on the meta device and materialised later
  (`module.to_empty`).
- A parameter is read at call time, never kept: data parallelism replaces `module.weight` while the model runs.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor, Replicate, Shard

from megalite.errors import ConfigError
from megalite.grid import Axis
from megalite.tensor_parallel.deferral import WeightGradQueue

__all__ = [
    "ParallelContext",
    "ParameterInfo",
    "Role",
    "add_parameter",
    "logical_name",
    "named_parameter_info",
    "to_local",
]

Role = Literal["embedding", "position", "linear", "head", "bias", "norm"]


@dataclass(frozen=True)
class ParallelContext:
    """What every parallel layer is built with.

    With `sequence_parallel` the activations between the tensor-parallel regions are split over tp along the sequence;
    it needs tp > 1. weight_grads: where weight gradients wait if the pipeline schedule splits backward passes. product:
    what linear layers multiply with instead of `F.linear` (`fp8`).
    """

    tp: Axis
    sequence_parallel: bool
    device: torch.device | str = "cpu"
    weight_grads: WeightGradQueue | None = None
    product: Callable[[Tensor, Tensor], Tensor] | None = None

    def __post_init__(self) -> None:
        assert self.tp.size > 1 or not self.sequence_parallel, "sequence parallelism splits over tp, which has one rank"


@dataclass(frozen=True, kw_only=True)
class ParameterInfo:
    """What a parameter is for, beside its values and placements.

    role: what weight decay and similar choices depend on, settled before any wrapping.
    init, std: "normal" with mean 0 and this standard deviation, "ones" or "zeros".
    partial_over_tp: whole on every tp rank, but each rank's gradient is only a part: summed over tp once per step.
    valid_rows: rows from here on pad the vocabulary: they are 0 and never predicted.
    copy_of: logical name of the original, for the copy of a tied embedding on the last pipeline stage.
    shared_over_pp: one of the two copies of a tied embedding: their gradients are summed over the embedding axis.
    """

    role: Role
    init: Literal["normal", "ones", "zeros"]
    std: float = 0.0
    partial_over_tp: bool = False
    valid_rows: int | None = None
    copy_of: str | None = None
    shared_over_pp: bool = False

    def __post_init__(self) -> None:
        assert (self.init == "normal") == (self.std > 0), f"init {self.init} does not go with std {self.std}"


def add_parameter(
    module: nn.Module,
    name: str,
    shape: Sequence[int],
    *,
    tp: Axis,
    shard_dim: int | None,
    info: ParameterInfo,
    device: torch.device | str,
    dtype: torch.dtype = torch.float32,
) -> None:
    """Register `module.<name>` of the global `shape`, cut over tp along `shard_dim` or whole on each rank (None),
    without values.

    Raises ConfigError when tp does not divide the dimension.
    """
    local_shape = list(shape)
    if shard_dim is not None:
        local_shape[shard_dim] = _split_evenly(f"dimension {shard_dim} of {name} {tuple(shape)}", shape[shard_dim], tp)
    value = torch.empty(local_shape, device=device, dtype=dtype)
    if tp.size > 1 and not tp.is_rehearsal:
        assert tp.mesh is not None, f"axis {tp.name} has {tp.size} ranks but no mesh"
        placement = Replicate() if shard_dim is None else Shard(shard_dim)
        value = DTensor.from_local(value, tp.mesh, [placement], run_check=False)
    module.register_parameter(name, nn.Parameter(value))
    infos = module.__dict__.setdefault("parameter_info", {})
    infos[name] = info


def _split_evenly(what: str, size: int, tp: Axis) -> int:
    if size % tp.size != 0:
        raise ConfigError(f"{what} has {size} entries, which {tp.size} {tp.name} ranks cannot share evenly")
    return size // tp.size


def named_parameter_info(model: nn.Module) -> dict[str, ParameterInfo]:
    """The record of every parameter by its dotted name, in the order of `model.named_parameters()`."""
    infos = {}
    for path, module in model.named_modules():
        recorded = module.__dict__.get("parameter_info", {})
        infos.update({f"{path}.{name}" if path else name: info for name, info in recorded.items()})
    names = [name for name, _ in model.named_parameters()]
    missing = [name for name in names if name not in infos]
    assert not missing, f"parameters without a ParameterInfo: {missing}; make them with add_parameter"
    return {name: infos[name] for name in names}


def logical_name(name: str, info: ParameterInfo) -> str:
    """The name under which the model knows this tensor: copies answer to the name of their original."""
    return info.copy_of or name


def to_local(parameter: Tensor) -> Tensor:
    """This rank's share as a plain tensor; the gradient returns with the parameter's own placements, without
    communication."""
    return parameter.to_local() if isinstance(parameter, DTensor) else parameter
