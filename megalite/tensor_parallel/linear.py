"""Linear maps whose weights are cut over tp, with their collectives placed so that they overlap with matrix products.

Collectives of one call, whatever the number of weights (a test counts them):

|                                  | forward        | backward                                                |
|----------------------------------|----------------|---------------------------------------------------------|
| `column_parallel`                | -              | all-reduce (dx)                                         |
| `column_parallel`, sequence par. | all-gather (x) | all-gather (x, for the dW), reduce-scatter (dx)         |
| `row_parallel`                   | all-reduce (y) | -                                                       |
| `row_parallel`, sequence par.    | reduce-scatter | all-gather (dy)                                         |

A backward collective whose gradient is not asked for does not happen. tp 1 has none and uses `F.linear` alone.

Decisions
- One gather serves several weights (q, k, v or gate, up): their backward reduces one dx.
- Under sequence parallelism the saved input is the sharded one; it is gathered again in backward while dx is computed.
  dx is reduced while the dW are computed.
- The backward consists of `_input_gradient` and `_weight_gradient`, which need nothing of each other.

Legend: S sequence, B micro-batch, I in features, O out features.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.autograd.function import once_differentiable

from megalite import comm
from megalite.grid import Axis

__all__ = ["column_parallel", "row_parallel"]


def column_parallel(
    x: Tensor, weights: Sequence[Tensor], biases: Sequence[Tensor | None], tp: Axis, sequence_parallel: bool
) -> tuple[Tensor, ...]:
    """One y_i = x @ weights[i].T + biases[i] for each weight, of one shared input.

    x: [S, B, I], alike on all ranks, or [S_local, B, I] under sequence parallelism. weights: local [O_i_local, I];
    biases: local [O_i_local] or None. Returns y_i [S, B, O_i_local]. dx is summed over tp; dW and db are those of this
    rank's rows.
    """
    if tp.size == 1:
        return tuple(F.linear(x, weight, bias) for weight, bias in zip(weights, biases, strict=True))
    assert len(weights) == len(biases)
    return _ColumnParallel.apply(x, tp, sequence_parallel, *weights, *biases)  # type: ignore[return-value]


def row_parallel(x: Tensor, weight: Tensor, bias: Tensor | None, tp: Axis, sequence_parallel: bool) -> Tensor:
    """Sum over tp of x @ weight.T, plus `bias` once.

    x: [S, B, I_local]; weight: local [O, I_local]; bias: [O] or None. Returns [S, B, O], alike on all ranks, or
    [S_local, B, O] under sequence parallelism, where db is the part that belongs to this rank's positions.
    """
    if tp.size == 1:
        return F.linear(x, weight, bias)
    return _RowParallel.apply(x, weight, bias, tp, sequence_parallel)  # type: ignore[return-value]


class _ColumnParallel(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, tp: Axis, sequence_parallel: bool, *parameters: Tensor | None) -> tuple[Tensor, ...]:
        weights, biases = _halves(parameters)
        ctx.tp, ctx.sequence_parallel = tp, sequence_parallel
        ctx.set_materialize_grads(False)
        ctx.save_for_backward(x if any(_halves(ctx.needs_input_grad[3:])[0]) else None, *weights)
        whole = comm.all_gather(x, tp) if sequence_parallel else x
        return tuple(F.linear(whole, weight, bias) for weight, bias in zip(weights, biases, strict=True))  # type: ignore[arg-type]

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *dys: Tensor | None) -> tuple[Tensor | None, ...]:
        x, *weights = ctx.saved_tensors
        tp, sequence_parallel = ctx.tp, ctx.sequence_parallel
        needs_dx, needs_dw, needs_db = ctx.needs_input_grad[0], *_halves(ctx.needs_input_grad[3:])
        dys = tuple(dy if dy is None else dy.contiguous() for dy in dys)

        gathering = comm.start_all_gather(x, tp) if sequence_parallel and x is not None else None
        reducing = None
        if needs_dx:
            dx = _input_gradient(dys, weights)
            reducing = comm.start_reduce_scatter(dx, tp) if sequence_parallel else comm.start_all_reduce_(dx, tp)

        whole: Any = x if gathering is None else gathering.wait()
        dws = [_weight_gradient(dy, whole) if needs else None for dy, needs in zip(dys, needs_dw, strict=True)]
        dbs = [_bias_gradient(dy) if needs else None for dy, needs in zip(dys, needs_db, strict=True)]
        return None if reducing is None else reducing.wait(), None, None, *dws, *dbs


class _RowParallel(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, bias: Tensor | None, tp: Axis, sequence_parallel: bool) -> Tensor:
        ctx.tp, ctx.sequence_parallel = tp, sequence_parallel
        ctx.save_for_backward(x if ctx.needs_input_grad[1] else None, weight)
        y = F.linear(x, weight)
        y = comm.reduce_scatter(y, tp) if sequence_parallel else comm.all_reduce_(y, tp)
        return y if bias is None else y.add_(bias)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *dys: Tensor) -> tuple[Tensor | None, ...]:
        x, weight = ctx.saved_tensors
        needs_dx, needs_dw, needs_db = ctx.needs_input_grad[:3]
        dy = dys[0].contiguous()
        gathering = comm.start_all_gather(dy, ctx.tp) if ctx.sequence_parallel and (needs_dx or needs_dw) else None
        db = _bias_gradient(dy) if needs_db else None
        whole = dy if gathering is None else gathering.wait()
        dx = _input_gradient((whole,), (weight,)) if needs_dx else None
        dw = _weight_gradient(whole, x) if needs_dw else None
        return dx, dw, db, None, None


def _input_gradient(dys: Sequence[Tensor | None], weights: Sequence[Tensor]) -> Tensor:
    """sum_i dy_i @ W_i: [S, B, O_i] and [O_i, I] -> [S, B, I]; outputs that nobody used have no dy."""
    total, shape = None, ()
    for dy, weight in zip(dys, weights, strict=True):
        if dy is not None:
            shape = dy.shape[:-1]
            total = torch.mm(_rows(dy), weight) if total is None else total.addmm_(_rows(dy), weight)
    assert total is not None, "backward without any gradient"
    return total.view(*shape, total.shape[-1])


def _weight_gradient(dy: Tensor | None, x: Tensor) -> Tensor | None:
    """dy.T @ x over all positions: [S, B, O] and [S, B, I] -> [O, I]."""
    return None if dy is None else torch.mm(_rows(dy).t(), _rows(x))


def _bias_gradient(dy: Tensor | None) -> Tensor | None:
    return None if dy is None else _rows(dy).sum(0)


def _halves(both: tuple) -> tuple[tuple, tuple]:
    """The part that belongs to the weights, and the part that belongs to their biases."""
    return both[: len(both) // 2], both[len(both) // 2 :]


def _rows(x: Tensor) -> Tensor:
    return x.reshape(-1, x.shape[-1])
