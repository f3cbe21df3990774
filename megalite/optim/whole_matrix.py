"""Applies a function to whole matrices that are cut over ranks, each matrix on one rank.

A round takes as many matrices as there are ranks to share them, n dp_shard ranks x t tp ranks. An all-to-all over dp_shard joins the rows
that FSDP cut, one over tp joins what tp cut, the function runs once per matrix, and two all-to-alls bring the parts back. Every rank then
computes 1 / (n t) of the matrices and sends and receives about one matrix each way per round.

Legend: r rows and c columns of what tp leaves to a rank; ceil(r / n) rows of FSDP's slices, of which the last are shorter or empty.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import accumulate

import torch
from torch import Tensor

from megalite import comm
from megalite.grid import Axis

__all__ = ["MatrixPart", "on_whole_matrices"]


@dataclass(frozen=True, kw_only=True)
class MatrixPart:
    """This rank's rows of a matrix, [rows of the slice, c]. rows: r. tp_dim: the dimension that tp cuts, where it does."""

    local: Tensor
    rows: int
    tp_dim: int | None

    def slice_rows(self, size: int) -> list[int]:
        """Rows of every rank of dp_shard, as FSDP cuts them."""
        most = -(-self.rows // size)
        return [max(0, min(most, self.rows - most * rank)) for rank in range(size)]


def on_whole_matrices(parts: Sequence[MatrixPart], function: Callable[[Tensor], Tensor], tp: Axis, dp_shard: Axis) -> list[Tensor]:
    """`function` of every whole matrix, of which each rank gets the rows and columns that it gave. Collective over both axes.

    parts: at most as many as the axes have ranks together, the same matrices in the same order on all of them. Either tp cuts all of them,
    or none, and then `tp` is an axis of one rank. function: [m, n] -> [m, n]; runs for one matrix on this rank, or for none.
    """
    assert len(parts) <= tp.size * dp_shard.size, "one matrix for each rank"
    owned = [list(parts[rank * tp.size : (rank + 1) * tp.size]) for rank in range(dp_shard.size)]
    here = owned[dp_shard.rank]
    joined = _join_rows(owned, dp_shard)
    whole = _join_tp(here, joined, tp)
    results = _cut_tp(here, None if whole is None else function(whole), tp)
    return _cut_rows(owned, results, dp_shard)


def _join_rows(owned: list[list[MatrixPart]], axis: Axis) -> list[Tensor]:
    """What tp leaves to a rank of each matrix of this dp_shard rank: [r, c] each."""
    here = owned[axis.rank]
    sizes = [_sizes(here, rank, axis) for rank in range(axis.size)]
    sent = [_flat([part.local for part in parts], parts[0].local if parts else owned[0][0].local) for parts in owned]
    received = comm.all_to_all(sent, [sum(counts) for counts in sizes], axis)
    slices = [piece.split(counts) for piece, counts in zip(received, sizes, strict=True)]
    return [torch.cat([rows[place] for rows in slices]).view(part.rows, -1) for place, part in enumerate(here)]


def _join_tp(here: list[MatrixPart], joined: list[Tensor], tp: Axis) -> Tensor | None:
    """This rank's own matrix, whole; None where there are fewer matrices than ranks."""
    if tp.size == 1:
        return joined[0] if joined else None
    if not here:
        return None
    mine = joined[tp.rank] if tp.rank < len(here) else None
    sent = [joined[rank] if rank < len(here) else joined[0].new_empty(0) for rank in range(tp.size)]
    received = comm.all_to_all(sent, [0 if mine is None else mine.numel()] * tp.size, tp)
    if mine is None:
        return None
    dim = here[tp.rank].tp_dim
    assert dim is not None
    return torch.cat([piece.view(mine.shape) for piece in received], dim)


def _cut_tp(here: list[MatrixPart], result: Tensor | None, tp: Axis) -> list[Tensor]:
    """The reverse of `_join_tp`: this tp rank's share of each result of this dp_shard rank, flat."""
    if tp.size == 1 or not here:
        return [] if result is None else [result]
    empty = here[0].local.new_empty(0)
    dim = 0 if result is None else here[tp.rank].tp_dim
    sent = [empty] * tp.size if result is None or dim is None else list(result.chunk(tp.size, dim))
    counts = [part.rows * part.local.shape[1] for part in here] + [0] * (tp.size - len(here))
    return comm.all_to_all(sent, counts, tp)[: len(here)]


def _cut_rows(owned: list[list[MatrixPart]], results: list[Tensor], axis: Axis) -> list[Tensor]:
    """The reverse of `_join_rows`: this rank's rows of all results."""
    here, example = owned[axis.rank], owned[0][0].local
    columns = [part.local.shape[1] for part in here]
    cuts = [
        result.reshape(-1).split([rows * width for rows in part.slice_rows(axis.size)])
        for part, result, width in zip(here, results, columns, strict=True)
    ]
    sent = [_flat([cut[rank] for cut in cuts], example) for rank in range(axis.size)]
    received = comm.all_to_all(sent, [sum(part.local.numel() for part in parts) for parts in owned], axis)
    found: list[Tensor] = []
    for piece, parts in zip(received, owned, strict=True):
        ends = list(accumulate(part.local.numel() for part in parts))
        found += [piece[end - part.local.numel() : end].view(part.local.shape) for part, end in zip(parts, ends, strict=True)]
    return found


def _sizes(parts: list[MatrixPart], rank: int, axis: Axis) -> list[int]:
    return [part.slice_rows(axis.size)[rank] * part.local.shape[1] for part in parts]


def _flat(tensors: Sequence[Tensor], example: Tensor) -> Tensor:
    return torch.cat([tensor.reshape(-1) for tensor in tensors]) if tensors else example.new_empty(0)
