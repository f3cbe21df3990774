"""Low-rank adapters beside frozen linear weights that are cut over tp: y = x @ W.T + scale * (x @ A.T) @ B.T.

                     A [r, in]                            B [out, r]                             collectives added
    column parallel  whole, gradient a part of the whole  cut along out, as W is                 none
    row parallel     cut along in, as W is                whole, gradient a part of the whole    none

Decisions
- Column parallel: A is one more weight of the layers' shared `column_parallel` call, so x is gathered once and dx, which
  then holds both paths, is reduced once. Each rank's dA misses the other ranks' rows of B: it is summed over tp once per step.
- Row parallel: a rank adds its part of the low-rank product to its part of y before the one reduction. Its B sees only a
  part of A x, so dB is summed over tp once per step.
- With dropout the adapters read another input than W, so column-parallel ones gather and reduce it once more. Layers that share an
  input share its mask.
- DoRA (arXiv:2402.09353): W + scale * B A has its rows scaled to the trained lengths m. As in the paper, the norm in
  m / norm is a constant of the backward pass. Dropout stays inside the low-rank path.
- A starts normal with the variance of torch's and PEFT's uniform start, 1 / (3 in), B as zeros: the first step starts from the
  base model.
- Where W is fp8 (`product`) or quantized, adapters multiply in the type of the computation.

Legend: S sequence, B micro-batch, I in features, O out features, r rank; `_local` is this tp rank's share.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import cast

import torch
from torch import Tensor, nn

from megalite import comm
from megalite.grid import Axis
from megalite.tensor_parallel.deferral import WeightGradQueue, add_later
from megalite.tensor_parallel.linear import column_parallel, linear, reduce_row_parallel
from megalite.tensor_parallel.parameter import ParallelContext, ParameterInfo, add_parameter, to_local
from megalite.tensor_parallel.quantized import Int8Weight, as_float
from megalite.tensor_parallel.rng import DropoutKey, dropout

__all__ = ["Adapter", "AdapterSettings", "AdapterShape", "Where", "adapted_columns", "adapted_row"]


@dataclass(frozen=True)
class Where:
    """How the layers of a call are cut, and where weight gradients may have to wait."""

    tp: Axis
    sequence_parallel: bool
    queue: WeightGradQueue | None


@dataclass(frozen=True, kw_only=True)
class AdapterShape:
    """What an adapter stands beside: the global sizes of W and the dimension that tp cuts (None: whole on each rank, of which this
    rank multiplies with `rows` only: first row and number)."""

    in_features: int
    out_features: int
    shard_dim: int | None
    rows: tuple[int, int] | None = None


@dataclass(frozen=True, kw_only=True)
class AdapterSettings:
    """scale: of B A. dropout: of the input in training; its masks depend on `site`, which no other input of the block may have."""

    rank: int
    scale: float
    dropout: float
    site: str
    use_dora: bool


class Adapter(nn.Module):
    """A, B and with DoRA the lengths m (`magnitude`, [out]) of one linear layer; trained, and never frozen."""

    a: nn.Parameter
    b: nn.Parameter
    magnitude: nn.Parameter | None

    def __init__(self, shape: AdapterShape, ctx: ParallelContext, settings: AdapterSettings) -> None:
        super().__init__()
        self.settings, self.rows = settings, shape.rows
        rank, tp, device, is_row = settings.rank, ctx.tp, ctx.device, shape.shard_dim == 1
        start = ParameterInfo(role="linear", init="normal", std=(3 * shape.in_features) ** -0.5, partial_over_tp=tp.size > 1 and not is_row)
        end = ParameterInfo(role="linear", init="zeros", partial_over_tp=tp.size > 1 and shape.shard_dim != 0)
        size, cut = (rank, shape.in_features), 1 if is_row else None
        add_parameter(self, "a", size, tp=tp, shard_dim=cut, info=start, device=device)
        size, cut = (shape.out_features, rank), 0 if shape.shard_dim == 0 else None
        add_parameter(self, "b", size, tp=tp, shard_dim=cut, info=end, device=device)
        if settings.use_dora:
            length = ParameterInfo(role="norm", init="ones", partial_over_tp=end.partial_over_tp)
            add_parameter(self, "magnitude", (shape.out_features,), tp=tp, shard_dim=cut, info=length, device=device)
        else:
            self.register_parameter("magnitude", None)

    def local_a(self) -> Tensor:
        """[r, in_local]"""
        return to_local(self.a)

    def local_b(self) -> Tensor:
        """[out_local, r]: the rows that this rank multiplies with."""
        return self._own(to_local(self.b))

    def row_factors(self, weight: Tensor | Int8Weight, tp: Axis, queue: WeightGradQueue | None) -> Tensor | None:
        """[out_local], m / ||row of W + scale * B A||, in the type of the weight; None without DoRA. weight: the rows [out_local,
        in_local] of W. tp: over which rows are cut along in; an axis of one rank where they are not."""
        if self.magnitude is None:
            return None
        with torch.no_grad():
            squares = (as_float(weight) + self.settings.scale * (self.local_b().float() @ self.local_a().float())).square().sum(1)
            if tp.size > 1:
                squares = comm.all_reduce(squares, tp)
        return add_later(self._own(to_local(self.magnitude)), queue) / squares.sqrt().to(self.magnitude.dtype)

    def _own(self, x: Tensor) -> Tensor:
        return x if self.rows is None else x.narrow(0, *self.rows)

    def extra_repr(self) -> str:
        return ", ".join(f"{name}={value}" for name, value in vars(self.settings).items())


def adapted_columns(
    x: Tensor,
    weights: Sequence[Tensor | Int8Weight],
    biases: Sequence[Tensor | None],
    adapters: Sequence[Adapter | None],
    where: Where,
    key: DropoutKey | None,
    product: Callable[[Tensor], Sequence[Tensor]] | None = None,
) -> tuple[Tensor, ...]:
    """`column_parallel` of several layers of one input, of which some have adapters.

    product: gives x @ W.T of every weight, without biases, in another way than `column_parallel`. key: for dropout, where there is any.
    """
    present = [adapter for adapter in adapters if adapter is not None]
    low = [adapter.local_a() for adapter in present]
    dropped = _dropped(x, present, where, key)
    nothing, plain = [None] * len(weights), cast("Sequence[Tensor]", weights)  # integers come with their product
    if dropped is x and product is None:
        both = column_parallel(x, [*plain, *low], [None] * (len(weights) + len(low)), where.tp, where.sequence_parallel, where.queue)
        ys, hidden = both[: len(weights)], both[len(weights) :]
    else:
        multiply = product or (lambda x: column_parallel(x, plain, nothing, where.tp, where.sequence_parallel, where.queue))
        ys = multiply(x)
        hidden = column_parallel(dropped, low, [None] * len(low), where.tp, where.sequence_parallel, where.queue)
    results, waiting = [], iter(hidden)
    for y, weight, bias, adapter in zip(ys, weights, biases, adapters, strict=True):
        if adapter is not None:
            y = _adapted(y, next(waiting), adapter, adapter.row_factors(weight, Axis.single(), where.queue), where.queue)
        results.append(y if bias is None else y + add_later(bias, where.queue))
    return tuple(results)


def adapted_row(
    x: Tensor,
    weight: Tensor | Int8Weight,
    bias: Tensor | None,
    adapter: Adapter,
    where: Where,
    key: DropoutKey | None,
    product: Callable[[Tensor], Tensor] | None = None,
) -> Tensor:
    """`row_parallel` of a layer with an adapter. product: gives this rank's part of x @ W.T in another way than `F.linear`."""
    part = linear(x, cast("Tensor", weight), None, where.queue) if product is None else product(x)
    dropped = _dropped(x, [adapter], where, key, is_split=True)
    hidden = linear(dropped, adapter.local_a(), None, where.queue)
    part = _adapted(part, hidden, adapter, adapter.row_factors(weight, where.tp, where.queue), where.queue)
    return reduce_row_parallel(part, bias, where.tp, where.sequence_parallel, where.queue)


def _adapted(y: Tensor, hidden: Tensor, adapter: Adapter, factors: Tensor | None, queue: WeightGradQueue | None) -> Tensor:
    """(y + scale * hidden @ B.T) * factors: hidden [S, B, r], y [S, B, O]."""
    y = torch.add(y, linear(hidden, adapter.local_b(), None, queue), alpha=adapter.settings.scale)
    return y if factors is None else y * factors


def _dropped(x: Tensor, adapters: Sequence[Adapter], where: Where, key: DropoutKey | None, *, is_split: bool = False) -> Tensor:
    """The adapters' input. is_split: tp ranks hold different features of x; otherwise, under sequence parallelism, other positions."""
    settings, training = adapters[0].settings, adapters[0].training
    p = settings.dropout
    if p == 0.0 or not training:
        return x
    assert key is not None, "adapters with dropout need to know the layer and the micro-batch"
    return dropout(x, p, key, settings.site, training=training, split_over=where.tp if is_split or where.sequence_parallel else None)
