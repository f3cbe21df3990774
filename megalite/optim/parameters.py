"""The parameters of a rank as the optimizer sees them: name, share, role.

Decisions
- Names are logical and hold global layer numbers, so they are the same for every layout; lists are sorted by them.
- Everything here works on local tensors. How a parameter is cut over tp is read from its placements, how over dp is not
  even looked at: FSDP's slices are disjoint over dp_shard and equal over dp_replicate.
- Parameters without requires_grad are frozen: they are the model's, not the optimizer's, and are collected only when asked for.
- A tied embedding and its copy may stand on one rank, where a schedule puts the first and the last stage there. They
  are two parameters with one name: summed with each other, updated alike, saved once.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import cast

from torch import Tensor, nn
from torch.distributed.tensor import DTensor, Shard

from megalite.tensor_parallel.parameter import ParameterInfo, logical_name, named_parameter_info

__all__ = ["OptimParameter", "collect_parameters", "local_twins", "without_local_copies"]


@dataclass(frozen=True, eq=False, kw_only=True)
class OptimParameter:
    """One parameter of this rank.

    name: logical. tp_sharded: tp ranks hold different parts (otherwise all of them hold the same). is_copy: the last
    pipeline stage's copy of a tied embedding, which is no logical parameter of its own.
    """

    name: str
    parameter: nn.Parameter
    info: ParameterInfo
    tp_sharded: bool
    is_copy: bool

    @property
    def tp_shard_dim(self) -> int | None:
        """Dimension that tp cuts; None where every tp rank holds the whole."""
        return _shard_dim(self.parameter, "tp")

    @property
    def local(self) -> Tensor:
        """This rank's part, sharing the parameter's storage, without autograd; may have 0 rows."""
        value = self.parameter.detach()
        return value.to_local() if isinstance(value, DTensor) else value

    @property
    def local_grad(self) -> Tensor | None:
        """This rank's part of the gradient, sharing its storage; None where there is none."""
        grad = self.parameter.grad
        return grad.to_local() if isinstance(grad, DTensor) else grad

    @property
    def num_elements(self) -> int:
        """Elements of the whole logical parameter, without rows that only pad the vocabulary."""
        shape = self.parameter.shape
        if self.info.valid_rows is None:
            return shape.numel()
        return self.info.valid_rows * shape[1:].numel()


def collect_parameters(stages: Iterable[nn.Module], *, trained: bool = True) -> list[OptimParameter]:
    """All trained (or all frozen) parameters of this rank's stages, sorted by name, after wrapping and materialising."""
    collected = []
    for stage in stages:
        infos = named_parameter_info(stage)
        for name, parameter in stage.named_parameters():
            assert not parameter.is_meta, f"{name} has no values yet"
            if parameter.requires_grad == trained:
                collected.append(_describe(name, parameter, infos[name]))
    collected.sort(key=lambda entry: (entry.name, entry.is_copy))
    names = [(entry.name, entry.is_copy) for entry in collected]
    assert len(names) == len(set(names)), "two parameters of one rank have the same logical name"
    return collected


def local_twins(parameters: Sequence[OptimParameter]) -> list[tuple[OptimParameter, OptimParameter]]:
    """(original, copy) where both stand on this rank."""
    originals = {p.name: p for p in parameters if not p.is_copy}
    return [(originals[p.name], p) for p in parameters if p.is_copy and p.name in originals]


def without_local_copies(parameters: Sequence[OptimParameter]) -> list[OptimParameter]:
    """One parameter per name: copies only where their original is on another rank."""
    local = {copy.name for _, copy in local_twins(parameters)}
    return [p for p in parameters if not (p.is_copy and p.name in local)]


def _describe(name: str, parameter: nn.Parameter, info: ParameterInfo) -> OptimParameter:
    return OptimParameter(
        name=logical_name(name, info),
        parameter=parameter,
        info=info,
        tp_sharded=_shard_dim(parameter, "tp") is not None,
        is_copy=info.copy_of is not None,
    )


def _shard_dim(parameter: nn.Parameter, axis: str) -> int | None:
    if not isinstance(parameter, DTensor):
        return None
    names = parameter.device_mesh.mesh_dim_names
    assert names is not None, "meshes of a grid have named dimensions"
    placement = parameter.placements[names.index(axis)] if axis in names else None
    return None if placement is None or not placement.is_shard() else cast("Shard", placement).dim
