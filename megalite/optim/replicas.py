"""A debugging check: what should be equal on several ranks has equal bits.

Replicas drift apart when a gradient that is only a part was not summed, or when ranks add in different orders. Neither
raises an error.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from megalite import comm
from megalite.grid import Axis, Grid
from megalite.optim.parameters import OptimParameter, local_twins

__all__ = ["check_replicas"]


def check_replicas(parameters: Sequence[OptimParameter], grid: Grid) -> list[str]:
    """One line per parameter of this rank that differs from its replicas; empty when all is well.

    Compared are parameters that are whole over tp, all parameters over dp_replicate, and the two copies of a tied
    embedding. Collective; copies the parameters once.
    """
    whole = [p for p in parameters if not p.tp_sharded]
    twins = local_twins(parameters)
    shared = [p for p in parameters if p.info.shared_over_pp and not twins]
    checks = [(whole, grid.tp), (list(parameters), grid.dp_replicate), (shared, grid.embedding)]
    apart = [f"{copy.name} differs from its copy on this rank" for original, copy in twins if not torch.equal(original.local, copy.local)]
    return apart + [
        f"{name} differs over {axis.name} (ranks {', '.join(map(str, axis.ranks))})"
        for group, axis in checks
        if group and axis.size > 1
        for name in _unequal(group, axis)
    ]


def _unequal(parameters: list[OptimParameter], axis: Axis) -> list[str]:
    bits = [_bits(parameter.local) for parameter in parameters]
    flat = torch.cat(bits)
    same = comm.all_reduce(flat, axis, "max") == comm.all_reduce(flat, axis, "min")
    parts = same.split([part.numel() for part in bits])
    return [parameter.name for parameter, part in zip(parameters, parts, strict=True) if not bool(part.all())]


def _bits(x: Tensor) -> Tensor:
    """fp32 values as integers: all values have an order, NaN and both zeros included."""
    assert x.dtype == torch.float32, "master weights are fp32"
    return x.reshape(-1).view(torch.int32)
