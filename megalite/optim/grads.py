"""Between the last backward and the optimizer: missing sums, the global gradient norm, clipping.

Decisions
- Gradients that are parts (`partial_over_tp`) and gradients of tied copies (`shared_over_pp`) are summed once per step,
  in one flat buffer.
- The sum over tp gathers and adds in rank order. An all-reduce adds in an order that depends on the place in the
  buffer, hence on how many layers a stage has, and would cost the bitwise equality over pp. Over the two embedding
  ranks a + b has only one order.
- The norm counts each logical parameter once: tp-replicated ones on the first tp rank, copies not at all, replicas over
  dp not again.
- Its terms, one per logical parameter, stand in a vector in global name order and are added in that order. So it has
  the same bits for every pp and schedule: the ranks of a pipeline contribute disjoint entries, and x + 0 is exact.
- Squares are taken per local tensor from an fp32 norm and added in fp64, which cannot overflow.
- Nothing here waits for the device.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import torch
from torch import Tensor

from megalite import comm
from megalite.grid import Axis, Grid
from megalite.optim.parameters import OptimParameter, local_twins

__all__ = ["clip_grads_", "finalize_grads", "global_names", "grad_norm", "grad_squares", "norm_of"]

PIECE = 2**24
"""Elements per gather over tp: bounds its memory to 64 MiB x tp in fp32. Cutting changes no sum."""


def finalize_grads(parameters: Sequence[OptimParameter], grid: Grid) -> None:
    """Complete the gradients in place. Collective over tp, and over the embedding axis at its ends.

    One gather over tp per 2**24 elements (that is one, unless key and value weights are replicated), and one all-reduce
    over the embedding axis; none where both copies of a tied embedding are on one rank, which adds them itself.
    """
    if grid.tp.size > 1:
        for grads in _by_dtype([_grad(p) for p in parameters if p.info.partial_over_tp]):
            _sum_in_rank_order_(grads, grid.tp)
    twins = local_twins(parameters)
    for original, copy in twins:
        torch.add(_grad(original), _grad(copy), out=_grad(original))
        _grad(copy).copy_(_grad(original))
    if twins:
        return
    shared = [p for p in parameters if p.info.shared_over_pp]
    assert not shared or grid.embedding.rank >= 0, "tied copies stand on the first and the last pipeline rank"
    if grid.embedding.size > 1:
        for grads in _by_dtype([_grad(p) for p in shared]):
            _scatter_flat_(comm.all_reduce(_flatten(grads), grid.embedding), grads)


def _grad(parameter: OptimParameter) -> Tensor:
    grad = parameter.local_grad
    assert grad is not None, f"{parameter.name} has no gradient"
    return grad


def _by_dtype(grads: Sequence[Tensor]) -> Iterator[list[Tensor]]:
    for dtype in sorted({grad.dtype for grad in grads}, key=str):
        yield [grad for grad in grads if grad.dtype == dtype]


def _sum_in_rank_order_(grads: list[Tensor], axis: Axis) -> None:
    flat = _flatten(grads)
    for piece in flat.split(PIECE):
        if piece.numel() == 0:
            continue
        parts = comm.all_gather(piece, axis).chunk(axis.size)
        piece.copy_(parts[0])
        for part in parts[1:]:
            piece += part
    _scatter_flat_(flat, grads)


def _flatten(grads: list[Tensor]) -> Tensor:
    return torch.cat([grad.reshape(-1) for grad in grads])


def _scatter_flat_(flat: Tensor, grads: list[Tensor]) -> None:
    pieces = flat.split([grad.numel() for grad in grads])
    sums = [piece.view_as(grad) for piece, grad in zip(pieces, grads, strict=True)]
    torch._foreach_copy_(grads, sums)  # pyright: ignore[reportPrivateImportUsage]


def global_names(parameters: Sequence[OptimParameter], grid: Grid) -> list[str]:
    """Sorted names of all logical parameters of the model. Collective over pp; for start-up."""
    mine = [parameter.name for parameter in parameters if not parameter.is_copy]
    names = [name for part in comm.all_gather_object(mine, grid.pp) for name in part]
    assert len(names) == len(set(names)), "two pipeline stages have the same parameter"
    return sorted(names)


def grad_norm(parameters: Sequence[OptimParameter], all_names: Sequence[str], grid: Grid) -> Tensor:
    """L2 norm of the whole gradient, an fp32 scalar on the device, with the same bits on all ranks. Collective; see `grad_squares`."""
    return norm_of(grad_squares(parameters, all_names, grid))


def norm_of(squares: Tensor) -> Tensor:
    """The norm whose square is the sum of `squares`: an fp32 scalar."""
    return squares.sum().sqrt().float()


def grad_squares(parameters: Sequence[OptimParameter], all_names: Sequence[str], grid: Grid) -> Tensor:
    """Squared L2 norm of every logical parameter's gradient, fp64, in the order of the names, the same on all ranks. Collective.

    all_names: what `global_names` gave. Gradients must be final. Parameters without a gradient count as 0.
    """
    counted = [p for p in parameters if not p.is_copy and (p.tp_sharded or grid.tp.is_first)]
    grads = {p.name: grad for p in counted if (grad := p.local_grad) is not None and grad.numel() > 0}
    norms: dict[str, Tensor] = {}
    if grads:
        values = torch._foreach_norm(list(grads.values()))  # pyright: ignore[reportPrivateImportUsage]
        norms = dict(zip(grads, values, strict=True))
    zero = torch.zeros((), dtype=torch.float32, device=grid.device)
    squares = torch.stack([norms.get(name, zero) for name in all_names]).double().square()
    for axis in (grid.tp, grid.dp_shard, grid.pp):
        squares = comm.all_reduce(squares, axis)
    return squares


def clip_grads_(parameters: Sequence[OptimParameter], norm: Tensor, max_norm: float, scale: Tensor | None = None) -> None:
    """Scale all gradients by max_norm / (norm + 1e-6) where that is below 1; max_norm 0 switches clipping off.

    scale: what the gradients are multiplied with, and `norm` is not: it is divided out in the same pass.
    """
    if max_norm == 0 and scale is None:
        return
    coefficient = torch.ones_like(norm) if max_norm == 0 else (max_norm / (norm + 1e-6)).clamp(max=1.0)
    if scale is not None:
        coefficient = coefficient / scale
    grads = [grad for p in parameters if (grad := p.local_grad) is not None]
    if grads:
        torch._foreach_mul_(grads, coefficient)  # pyright: ignore[reportPrivateImportUsage]
