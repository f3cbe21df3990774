"""Linear maps whose weights are cut over tp, with their collectives placed so that they overlap with matrix products.

Collectives of one call, whatever the number of weights (a test counts them):

|                                  | forward        | backward                                                |
|----------------------------------|----------------|---------------------------------------------------------|
| `column_parallel`                | -              | all-reduce (dx)                                         |
| `column_parallel`, sequence par. | all-gather (x) | all-gather (x, for the dW), reduce-scatter (dx)         |
| `row_parallel`                   | all-reduce (y) | -                                                       |
| `row_parallel`, sequence par.    | reduce-scatter | all-gather (dy)                                         |

A backward collective whose gradient is not asked for does not happen. tp 1 has none and uses `F.linear` alone.
Where a schedule splits the backward, `column_parallel` gathers x in W, and all else happens in I.

Decisions
- One gather serves several weights (q, k, v or gate, up): their backward reduces one dx.
- Under sequence parallelism the saved input is the sharded one; it is gathered again in backward while dx is computed.
  dx is reduced while the dW are computed.
- The backward consists of `_input_gradient` and `_weight_gradient`, which need nothing of each other. With a queue
  that is open (`deferral`), the second one waits there. `row_parallel` then keeps the gathered dy rather than gather twice.
- `row_parallel` is two steps: the product, which saves what backward needs, and the reduction, which saves nothing. So a
  region that is computed again and ends with it stops before the reduction (`model/recompute`).

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
from megalite.tensor_parallel.deferral import WeightGradQueue, add_later, gradient_target

__all__ = ["column_parallel", "linear", "reduce_row_parallel", "row_parallel"]


def column_parallel(
    x: Tensor,
    weights: Sequence[Tensor],
    biases: Sequence[Tensor | None],
    tp: Axis,
    sequence_parallel: bool,
    queue: WeightGradQueue | None = None,
) -> tuple[Tensor, ...]:
    """One y_i = x @ weights[i].T + biases[i] for each weight, of one shared input.

    x: [S, B, I], alike on all ranks, or [S_local, B, I] under sequence parallelism. weights: local [O_i_local, I];
    biases: local [O_i_local] or None. Returns y_i [S, B, O_i_local]. dx is summed over tp; dW and db are those of this
    rank's rows. queue: where dW and db may have to wait.
    """
    if tp.size == 1:
        return tuple(linear(x, weight, bias, queue) for weight, bias in zip(weights, biases, strict=True))
    assert len(weights) == len(biases)
    return _ColumnParallel.apply(x, tp, sequence_parallel, queue, *weights, *biases)  # type: ignore[return-value]


def row_parallel(
    x: Tensor, weight: Tensor, bias: Tensor | None, tp: Axis, sequence_parallel: bool, queue: WeightGradQueue | None = None
) -> Tensor:
    """Sum over tp of x @ weight.T, plus `bias` once.

    x: [S, B, I_local]; weight: local [O, I_local]; bias: [O] or None. Returns [S, B, O], alike on all ranks, or
    [S_local, B, O] under sequence parallelism, where db is the part that belongs to this rank's positions.
    """
    if tp.size == 1:
        return linear(x, weight, bias, queue)
    return reduce_row_parallel(linear(x, weight, None, queue), bias, tp, sequence_parallel, queue)


def reduce_row_parallel(
    part: Tensor, bias: Tensor | None, tp: Axis, sequence_parallel: bool, queue: WeightGradQueue | None = None
) -> Tensor:
    """The second step of `row_parallel`: the sum over tp of the ranks' products [S, B, O], which it may overwrite, plus `bias` once."""
    if tp.size == 1:
        return part if bias is None else part + add_later(bias, queue)
    return _Reduce.apply(part, bias, tp, sequence_parallel, queue)  # type: ignore[return-value]


def linear(x: Tensor, weight: Tensor, bias: Tensor | None, queue: WeightGradQueue | None) -> Tensor:
    """`F.linear` of local tensors; with a queue its dW and db may wait."""
    return F.linear(x, weight, bias) if queue is None else _Linear.apply(x, weight, bias, queue)  # type: ignore[return-value]


class _Linear(torch.autograd.Function):
    """`F.linear` with the matrix products of its own backward (a test holds the bits equal), of which dW can wait."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, bias: Tensor | None, queue: WeightGradQueue) -> Tensor:
        ctx.queue = queue
        ctx.targets = gradient_target(weight), gradient_target(bias)
        ctx.save_for_backward(x, weight)
        return F.linear(x, weight, bias)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *dys: Tensor) -> tuple[Tensor | None, ...]:
        x, weight = ctx.saved_tensors
        dy, (needs_dx, needs_dw, needs_db) = dys[0], ctx.needs_input_grad[:3]
        dx = _input_gradient((dy,), (weight,)) if needs_dx else None

        def parameter_gradients() -> tuple[Tensor | None, Tensor | None]:
            return _weight_gradient(dy, x) if needs_dw else None, _bias_gradient(dy) if needs_db else None

        if not ctx.queue.is_open:
            return dx, *parameter_gradients(), None
        ctx.queue.put(ctx.targets, parameter_gradients)
        return dx, None, None, None


class _ColumnParallel(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, x: Tensor, tp: Axis, sequence_parallel: bool, queue: WeightGradQueue | None, *parameters: Tensor | None
    ) -> tuple[Tensor, ...]:
        weights, biases = _halves(parameters)
        ctx.tp, ctx.sequence_parallel, ctx.queue = tp, sequence_parallel, queue
        ctx.set_materialize_grads(False)
        ctx.targets = None if queue is None else [gradient_target(parameter) for parameter in parameters]
        ctx.save_for_backward(x if any(_halves(ctx.needs_input_grad[4:])[0]) else None, *weights)
        whole = comm.all_gather(x, tp) if sequence_parallel else x
        return tuple(F.linear(whole, weight, bias) for weight, bias in zip(weights, biases, strict=True))  # type: ignore[arg-type]

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *dys: Tensor | None) -> tuple[Tensor | None, ...]:
        x, *weights = ctx.saved_tensors
        tp, sequence_parallel, queue = ctx.tp, ctx.sequence_parallel, ctx.queue
        needs_dx, needs = ctx.needs_input_grad[0], ctx.needs_input_grad[4:]
        dys = tuple(dy if dy is None else dy.contiguous() for dy in dys)
        deferring = queue if queue is not None and queue.is_open else None

        gathering = comm.start_all_gather(x, tp) if sequence_parallel and x is not None and deferring is None else None
        reducing = None
        if needs_dx:
            dx = _input_gradient(dys, weights)
            reducing = comm.start_reduce_scatter(dx, tp) if sequence_parallel else comm.start_all_reduce_(dx, tp)

        if deferring is not None:
            targets = [None if dy is None else target for target, dy in zip(ctx.targets, dys * 2, strict=True)]
            gather: Any = comm.all_gather if sequence_parallel and x is not None else _as_it_is
            deferring.put(targets, lambda: _parameter_gradients(dys, gather(x, tp), needs))
            grads: Sequence[Tensor | None] = [None] * len(needs)
        else:
            grads = _parameter_gradients(dys, x if gathering is None else gathering.wait(), needs)
        return None if reducing is None else reducing.wait(), None, None, None, *grads


class _Reduce(torch.autograd.Function):
    """The sum over tp of the ranks' products y, plus the bias."""

    @staticmethod
    def forward(ctx: Any, y: Tensor, bias: Tensor | None, tp: Axis, sequence_parallel: bool, queue: WeightGradQueue | None) -> Tensor:
        ctx.tp, ctx.sequence_parallel, ctx.queue = tp, sequence_parallel, queue
        ctx.target = None if queue is None else gradient_target(bias)
        if sequence_parallel:
            y = comm.reduce_scatter(y, tp)
        else:
            ctx.mark_dirty(y)
            comm.all_reduce_(y, tp)
        return y if bias is None else y.add_(bias)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *dys: Tensor) -> tuple[Tensor | None, ...]:
        dy, (needs_dy, needs_db) = dys[0].contiguous(), ctx.needs_input_grad[:2]
        gathering = comm.start_all_gather(dy, ctx.tp) if ctx.sequence_parallel and needs_dy else None
        db = _bias_gradient(dy) if needs_db else None
        if db is not None and ctx.queue is not None and ctx.queue.is_open:
            later = db
            ctx.queue.put((ctx.target,), lambda: (later,))
            db = None
        return dy if gathering is None else gathering.wait(), db, None, None, None


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


def _parameter_gradients(dys: Sequence[Tensor | None], x: Any, needs: Sequence[bool]) -> list[Tensor | None]:
    """dW of each weight, then db of each bias; None where it is not needed."""
    needs_dw, needs_db = _halves(needs)
    dws = [_weight_gradient(dy, x) if needed else None for dy, needed in zip(dys, needs_dw, strict=True)]
    return dws + [_bias_gradient(dy) if needed else None for dy, needed in zip(dys, needs_db, strict=True)]


def _as_it_is(x: Any, tp: Axis) -> Any:
    return x


def _halves(both: Sequence) -> tuple[Sequence, Sequence]:
    """The part that belongs to the weights, and the part that belongs to their biases."""
    return both[: len(both) // 2], both[len(both) // 2 :]


def _rows(x: Tensor) -> Tensor:
    return x.reshape(-1, x.shape[-1])
