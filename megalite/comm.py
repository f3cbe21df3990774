"""Every collective and transfer of megalite: size-1 aware, out of place, countable.

Decisions
- This is the only module of ours that calls `torch.distributed` on tensors (FSDP2 and the checkpoint library call it
  themselves).
- An axis of size 1 is a branch here and nowhere else: callers never ask how many ranks there are.
- Results are new tensors, or on an axis of size 1 the input itself; an input is never changed, except by functions
  whose name ends with `_`. Functions whose name begins with `start_` return a `Pending` to wait for.
- `record_comms(axes)` lists what was sent, as (operation, axis name, number of elements): the tables in the layers'
  docstrings are tests.
- Over an axis of ranks that do not exist (`Axis.rehearsal`) everything is recorded and shaped, and nothing sent.
- A failure names the operation, the axis, its ranks and what the run was doing. What was started or waited for last is kept in
  `axis.progress`, for the watchdog.
- torch renamed `all_gather_into_tensor` and `reduce_scatter_tensor` in 2.13; both names are tried here.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any, Literal

import torch
import torch.distributed as dist
from torch import Tensor

from megalite.errors import CommError
from megalite.grid import Axis, Grid

__all__ = [
    "Pending",
    "Record",
    "all_gather",
    "all_gather_object",
    "all_reduce",
    "all_reduce_",
    "all_to_all",
    "barrier",
    "broadcast",
    "broadcast_object",
    "count_comms",
    "record_comms",
    "reduce_scatter",
    "start_all_gather",
    "start_all_reduce",
    "start_all_reduce_",
    "start_recv",
    "start_reduce_scatter",
    "start_send",
]

_all_gather_single: Callable[..., Any] = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor
_reduce_scatter_single: Callable[..., Any] = getattr(dist, "reduce_scatter_single", None) or dist.reduce_scatter_tensor
_REDUCE = {"sum": dist.ReduceOp.SUM, "max": dist.ReduceOp.MAX, "min": dist.ReduceOp.MIN}
ReduceName = Literal["sum", "max", "min"]


@dataclass(frozen=True)
class Record:
    """One recorded operation; `numel` counts the elements of the tensor that goes in, `nbytes` its bytes."""

    op: str
    axis: str
    numel: int
    nbytes: int = field(default=0, compare=False)


class Pending:
    """A tensor that is on its way. `wait()` returns it; until then neither it nor the input may be touched."""

    def __init__(self, axis: Axis, op: str, tensor: Tensor, works: Sequence[Any], keep: Tensor | None = None) -> None:
        self._axis, self._op, self._tensor, self._works, self._keep = axis, op, tensor, works, keep

    def wait(self) -> Tensor:
        with _named(self._axis, self._op):
            for work in self._works:
                work.wait()
        self._works, self._keep = (), None
        return self._tensor

    def is_over(self) -> bool:
        """Whether the operation has ended, without waiting."""
        return all(work.is_completed() for work in self._works)


@contextmanager
def _named(axis: Axis, op: str) -> Iterator[None]:
    progress = axis.progress
    progress.last_comm = (op, axis.name)
    progress.num_comms += 1
    try:
        yield
    except RuntimeError as error:
        raise CommError(f"{op} over axis {axis.name} (ranks {_short(axis.ranks)}) failed during {axis.progress.doing}: {error}") from error


def _start(axis: Axis, op: str, function: Callable[[], Any]) -> Sequence[Any]:
    """Call `function`, which hands an operation to torch: the works to wait for. Over ranks that do not exist: none, and no call."""
    if axis.is_rehearsal:
        return ()
    with _named(axis, op):
        works = function()
    return works if isinstance(works, list) else (works,)


def _short(ranks: Sequence[int]) -> str:
    return ", ".join(map(str, ranks)) if len(ranks) <= 8 else f"{ranks[0]}, {ranks[1]}, ... {ranks[-1]}"


def _record(axis: Axis, op: str, tensor: Tensor) -> None:
    if axis.progress.records is not None:
        axis.progress.records.append(Record(op, axis.name, tensor.numel(), tensor.numel() * tensor.itemsize))


@contextmanager
def record_comms(where: Grid | Axis) -> Iterator[list[Record]]:
    """List every operation on the axes of `where` (one axis, or all axes of a grid) inside the `with` block."""
    progress = where.progress
    before, progress.records = progress.records, []
    try:
        yield progress.records
    finally:
        progress.records = before


def count_comms(records: Sequence[Record]) -> dict[tuple[str, str], int]:
    """{(operation, axis name): how often}."""
    return dict(Counter((record.op, record.axis) for record in records))


def start_all_reduce(x: Tensor, axis: Axis, op: ReduceName = "sum") -> Pending:
    """Elementwise reduction over the axis; every rank gets the result, of the shape of `x`."""
    if axis.size == 1:
        return Pending(axis, "all_reduce", x, ())
    _record(axis, "all_reduce", x)
    out = x.detach().clone(memory_format=torch.contiguous_format)
    works = _start(axis, "all_reduce", lambda: dist.all_reduce(out, op=_REDUCE[op], group=axis.group, async_op=True))
    return Pending(axis, "all_reduce", out, works)


def all_reduce(x: Tensor, axis: Axis, op: ReduceName = "sum") -> Tensor:
    """Elementwise reduction over the axis; every rank gets the result, of the shape of `x`."""
    return start_all_reduce(x, axis, op).wait()


def all_reduce_(x: Tensor, axis: Axis, op: ReduceName = "sum") -> Tensor:
    """`all_reduce` in place, for buffers that the caller owns; `x` must be contiguous."""
    return start_all_reduce_(x, axis, op).wait()


def start_all_reduce_(x: Tensor, axis: Axis, op: ReduceName = "sum") -> Pending:
    """`start_all_reduce` in place, for buffers that the caller owns; `x` must be contiguous."""
    assert x.is_contiguous(), "an in-place reduction of a non-contiguous tensor would reduce a copy"
    if axis.size == 1:
        return Pending(axis, "all_reduce", x, ())
    _record(axis, "all_reduce", x)
    works = _start(axis, "all_reduce", lambda: dist.all_reduce(x, op=_REDUCE[op], group=axis.group, async_op=True))
    return Pending(axis, "all_reduce", x, works)


def start_all_gather(x: Tensor, axis: Axis) -> Pending:
    """Concatenate along dimension 0 in axis order: [n, ...] on every rank -> [size * n, ...]."""
    if axis.size == 1:
        return Pending(axis, "all_gather", x, ())
    _record(axis, "all_gather", x)
    source = x.detach().contiguous()
    out = source.new_empty((axis.size * source.shape[0], *source.shape[1:]))
    works = _start(axis, "all_gather", lambda: _all_gather_single(out, source, group=axis.group, async_op=True))
    return Pending(axis, "all_gather", out, works, keep=source)


def all_gather(x: Tensor, axis: Axis, dim: int = 0) -> Tensor:
    """Concatenate along `dim` in axis order."""
    if dim == 0 or axis.size == 1:
        return start_all_gather(x, axis).wait()
    return all_gather(x.movedim(dim, 0), axis).movedim(0, dim).contiguous()


def start_reduce_scatter(x: Tensor, axis: Axis) -> Pending:
    """Sum over the axis and keep this rank's slice of dimension 0: [size * n, ...] -> [n, ...]."""
    if axis.size == 1:
        return Pending(axis, "reduce_scatter", x, ())
    assert x.shape[0] % axis.size == 0, f"{x.shape[0]} rows cannot be scattered over {axis.size} ranks"
    _record(axis, "reduce_scatter", x)
    source = x.detach().contiguous()
    out = source.new_empty((source.shape[0] // axis.size, *source.shape[1:]))
    works = _start(axis, "reduce_scatter", lambda: _reduce_scatter_single(out, source, group=axis.group, async_op=True))
    return Pending(axis, "reduce_scatter", out, works, keep=source)


def reduce_scatter(x: Tensor, axis: Axis, dim: int = 0) -> Tensor:
    """Sum over the axis and keep this rank's slice of `dim`."""
    if dim == 0 or axis.size == 1:
        return start_reduce_scatter(x, axis).wait()
    return reduce_scatter(x.movedim(dim, 0), axis).movedim(0, dim).contiguous()


def all_to_all(parts: Sequence[Tensor], counts: Sequence[int], axis: Axis) -> list[Tensor]:
    """`parts[r]` goes to the rank at position r; returns what each rank sent here, flat: `counts[r]` elements from r.

    On an axis of one rank the part itself, flat.
    """
    if axis.size == 1:
        return [part.reshape(-1) for part in parts]
    source = torch.cat([part.detach().reshape(-1) for part in parts])
    _record(axis, "all_to_all", source)
    out = source.new_empty(sum(counts))
    sizes = [part.numel() for part in parts]
    _start(axis, "all_to_all", lambda: dist.all_to_all_single(out, source, list(counts), sizes, group=axis.group))
    return list(out.split(list(counts)))


def broadcast(x: Tensor, axis: Axis, source: int = 0) -> Tensor:
    """Every rank gets the tensor of the rank at position `source` of the axis; shapes must agree."""
    if axis.size == 1:
        return x
    _record(axis, "broadcast", x)
    out = x.detach().clone(memory_format=torch.contiguous_format)
    _start(axis, "broadcast", lambda: dist.broadcast(out, src=axis.ranks[source], group=axis.group))
    return out


def start_send(x: Tensor, axis: Axis, target: int) -> Pending:
    """Send to the rank at position `target` of the axis; the transfer is over when `wait` returns."""
    _record(axis, "send", x)
    return _transfer(dist.isend, "send", x.detach().contiguous(), axis, target)


def start_recv(buffer: Tensor, axis: Axis, source: int) -> Pending:
    """Receive into `buffer` from the rank at position `source` of the axis; `wait` returns the filled buffer."""
    _record(axis, "recv", buffer)
    return _transfer(dist.irecv, "recv", buffer, axis, source)


def _transfer(function: Callable[..., Any], op: str, x: Tensor, axis: Axis, peer: int) -> Pending:
    # A batch of one: NCCL then uses the axis' own communicator instead of making (and warning about) one per pair of
    # ranks. gloo returns one work per operation and NCCL one for all: wait for each.
    works = _start(axis, op, lambda: dist.batch_isend_irecv([dist.P2POp(function, x, axis.ranks[peer], group=axis.group)]))
    return Pending(axis, op, x, works, keep=x)


def barrier(axis: Axis) -> None:
    """Wait until every rank of the axis is here."""
    if axis.size > 1:
        with _named(axis, "barrier"):
            dist.barrier(group=axis.group)


def all_gather_object(value: Any, axis: Axis) -> list[Any]:
    """The Python values of all ranks, in axis order (start-up and checks only: it pickles)."""
    if axis.size == 1:
        return [value]
    values: list[Any] = [None] * axis.size
    with _named(axis, "all_gather_object"):
        dist.all_gather_object(values, value, group=axis.group)
    return values


def broadcast_object(value: Any, axis: Axis, source: int = 0) -> Any:
    """The Python value of the rank at position `source` (start-up and checks only: it pickles)."""
    if axis.size == 1:
        return value
    box = [value if axis.rank == source else None]
    with _named(axis, "broadcast_object"):
        dist.broadcast_object_list(box, src=axis.ranks[source], group=axis.group)
    return box[0]
