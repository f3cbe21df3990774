"""Collectives that autograd knows: each movement of an activation with its conjugate.

| function              | forward                            | backward                           |
|-----------------------|------------------------------------|------------------------------------|
| `copy_to_tp`          | identity                           | all-reduce                         |
| `reduce_from_tp`      | all-reduce                         | identity                           |
| `gather_from_tp`      | all-gather along `dim`             | own slice of `dim`                 |
| `scatter_to_tp`       | own slice of `dim`                 | all-gather along `dim`             |
| `gather_from_sp`      | all-gather along the sequence      | reduce-scatter along the sequence  |
| `reduce_scatter_to_sp`| reduce-scatter along the sequence  | all-gather along the sequence      |
| `scatter_to_sp`       | own slice of the sequence          | all-gather along the sequence      |

Decisions
- The tp pairs slice in backward because what follows them is computed alike on all ranks, whose gradients agree. Before
  a consumer that differs between ranks each gradient is only a part and has to be summed: that is `gather_from_sp`.
- Dimension 0 is the sequence. Nothing is changed in place. On an axis of one rank every function returns its input.
- The linear layers do not use these: they overlap their collectives with matrix products (`linear`).
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import Tensor

from megalite import comm
from megalite.grid import Axis

__all__ = [
    "copy_to_tp",
    "gather_from_sp",
    "gather_from_tp",
    "reduce_from_tp",
    "reduce_scatter_to_sp",
    "scatter_to_sp",
    "scatter_to_tp",
]

Movement = Callable[[Tensor, Axis], Tensor]


class _Conjugate(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, tp: Axis, there: Movement, back: Movement) -> Tensor:
        ctx.tp, ctx.back = tp, back
        return there(x, tp)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        return ctx.back(grads[0], ctx.tp), None, None, None


def _move(x: Tensor, tp: Axis, there: Movement, back: Movement) -> Tensor:
    return x if tp.size == 1 else _Conjugate.apply(x, tp, there, back)  # type: ignore[return-value]


def _identity(x: Tensor, tp: Axis) -> Tensor:
    return x.view_as(x)


def _slice(x: Tensor, tp: Axis, dim: int = 0) -> Tensor:
    assert x.shape[dim] % tp.size == 0, f"{x.shape[dim]} entries cannot be scattered over {tp.size} ranks"
    length = x.shape[dim] // tp.size
    # a copy: a view would keep the whole activation alive
    return x.narrow(dim, tp.rank * length, length).clone(memory_format=torch.contiguous_format)


def copy_to_tp(x: Tensor, tp: Axis) -> Tensor:
    """`x` [...] at the entry of a region where the ranks compute different things; their gradients are summed."""
    return _move(x, tp, _identity, comm.all_reduce)


def reduce_from_tp(x: Tensor, tp: Axis) -> Tensor:
    """Sum over tp of the ranks' parts `x` [...], at the exit of such a region."""
    return _move(x, tp, comm.all_reduce, _identity)


def gather_from_tp(x: Tensor, tp: Axis, dim: int) -> Tensor:
    """The ranks' `x` joined along `dim`; only before a consumer that is alike on all ranks."""
    return _move(x, tp, partial(comm.all_gather, dim=dim), partial(_slice, dim=dim))


def scatter_to_tp(x: Tensor, tp: Axis, dim: int) -> Tensor:
    """This rank's slice along `dim` of an `x` that is alike on all ranks."""
    return _move(x, tp, partial(_slice, dim=dim), partial(comm.all_gather, dim=dim))


def gather_from_sp(x: Tensor, tp: Axis) -> Tensor:
    """[S_local, ...] -> [S, ...] before a consumer that differs between ranks; the gradients are summed and
    scattered."""
    return _move(x, tp, comm.all_gather, comm.reduce_scatter)


def reduce_scatter_to_sp(x: Tensor, tp: Axis) -> Tensor:
    """Sum over tp of the ranks' parts `x` [S, ...], of which each keeps its [S_local, ...]."""
    return _move(x, tp, comm.reduce_scatter, comm.all_gather)


def scatter_to_sp(x: Tensor, tp: Axis) -> Tensor:
    """[S, ...], alike on all ranks -> [S_local, ...]."""
    return _move(x, tp, _slice, comm.all_gather)
