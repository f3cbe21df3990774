"""Every collective against a plain computation over the ranks' inputs, for axes of 1 to 4 ranks."""

from __future__ import annotations

import time
from datetime import timedelta

import pytest
import torch
from torch import Tensor

from megalite import comm
from megalite.comm import Record
from megalite.errors import CommError
from megalite.grid import Axis, Grid, GridShape
from tests.ranks import run_ranks

SHAPE = (12, 2, 24)  # dimensions 0 and 2 can be cut among 1, 2, 3 and 4 ranks


def axis_of(size: int) -> Axis:
    return Axis.single() if size == 1 else Grid.build(GridShape(tp=size), timeout=timedelta(seconds=30)).tp


def input_of(rank: int) -> Tensor:
    return torch.randn(SHAPE, dtype=torch.float64, generator=torch.Generator().manual_seed(rank))


def near(actual: Tensor, expected: Tensor) -> None:
    torch.testing.assert_close(actual, expected, rtol=0, atol=1e-14)
    assert actual.is_contiguous()


def check_reductions(size: int) -> None:
    axis = axis_of(size)
    xs = torch.stack([input_of(rank) for rank in range(size)])
    x = xs[axis.rank].clone()
    for op, expected in (("sum", xs.sum(0)), ("max", xs.amax(0)), ("min", xs.amin(0))):
        near(comm.all_reduce(x, axis, op), expected)
        near(comm.start_all_reduce(x, axis, op).wait(), expected)
        own = x.clone()
        assert comm.all_reduce_(own, axis, op) is own
        near(own, expected)
        own = x.clone()
        assert comm.start_all_reduce_(own, axis, op).wait() is own
        near(own, expected)
    transposed = comm.all_reduce(x.movedim(0, 2), axis)
    torch.testing.assert_close(transposed, xs.sum(0).movedim(0, 2), rtol=0, atol=1e-14)
    with pytest.raises(AssertionError, match="non-contiguous"):
        comm.all_reduce_(x.movedim(0, 2), axis)
    assert torch.equal(x, xs[axis.rank])


def check_gathers_and_scatters(size: int) -> None:
    axis = axis_of(size)
    xs = [input_of(rank) for rank in range(size)]
    x = xs[axis.rank].clone()
    total = torch.stack(xs).sum(0)
    for dim in (0, 2, -1):
        near(comm.all_gather(x, axis, dim), torch.cat(xs, dim))
        near(comm.reduce_scatter(x, axis, dim), total.chunk(size, dim)[axis.rank].contiguous())
    near(comm.start_all_gather(x, axis).wait(), torch.cat(xs))
    near(comm.start_reduce_scatter(x, axis).wait(), total.chunk(size)[axis.rank])
    swapped = comm.all_gather(x.transpose(0, 1), axis)  # not contiguous
    torch.testing.assert_close(swapped, torch.cat([x.transpose(0, 1) for x in xs]), rtol=0, atol=0)
    assert torch.equal(x, xs[axis.rank])
    if size > 1:
        with pytest.raises(AssertionError, match="13 rows cannot be scattered"):
            comm.reduce_scatter(torch.ones(13), axis)


def check_all_to_all(size: int) -> None:
    """Rank a sends a + 2 b elements to rank b, so that all counts differ and some are 0."""
    axis = axis_of(size)
    sent = [[torch.arange(a + 2 * b, dtype=torch.float64) + 100 * a + 10 * b for b in range(size)] for a in range(size)]
    found = comm.all_to_all(sent[axis.rank], [a + 2 * axis.rank for a in range(size)], axis)
    assert len(found) == size
    for a, piece in enumerate(found):
        near(piece, sent[a][axis.rank])


def check_broadcast_and_objects(size: int) -> None:
    axis = axis_of(size)
    x = input_of(axis.rank)
    for source in range(size):
        near(comm.broadcast(x, axis, source), input_of(source))
        assert comm.broadcast_object({"rank": axis.rank}, axis, source) == {"rank": source}
    assert torch.equal(x, input_of(axis.rank))
    assert comm.all_gather_object(("rank", axis.rank), axis) == [("rank", rank) for rank in range(size)]
    comm.barrier(axis)


@pytest.mark.parametrize("size", [1, 2, 3, 4])
@pytest.mark.parametrize("check", [check_reductions, check_gathers_and_scatters, check_broadcast_and_objects, check_all_to_all])
def test_collectives_equal_plain_computations(check, size: int) -> None:
    if size == 1:
        check(size)  # without any process group
    else:
        run_ranks(check, size, size)


def check_ring(size: int) -> None:
    axis = axis_of(size)
    x, buffer = input_of(axis.rank), torch.empty(SHAPE, dtype=torch.float64)
    with comm.record_comms(axis) as records:
        sending = comm.start_send(x, axis, (axis.rank + 1) % size)
        receiving = comm.start_recv(buffer, axis, (axis.rank - 1) % size)
        assert receiving.wait() is buffer
        sending.wait()
    assert sending.is_over()
    assert receiving.is_over()
    assert torch.equal(buffer, input_of((axis.rank - 1) % size))
    assert records == [Record("send", "tp", x.numel()), Record("recv", "tp", x.numel())]


@pytest.mark.parametrize("size", [2, 3, 4])
def test_transfers_around_a_ring(size: int) -> None:
    run_ranks(check_ring, size, size)


def check_records() -> None:
    grid = Grid.build(GridShape(pp=2, tp=2), timeout=timedelta(seconds=30))
    x = torch.ones(4, 3)
    comm.all_reduce(x, grid.tp)  # before: not recorded
    with comm.record_comms(grid) as records:
        comm.all_reduce(x, grid.tp)
        comm.all_gather(x, grid.pp)
        comm.all_gather(x, grid.cp)  # one rank: nothing is sent
        with comm.record_comms(grid.tp) as inner:
            comm.reduce_scatter(x, grid.tp)
        comm.all_reduce_(x, grid.tp)
        comm.broadcast(x, grid.pp)
    comm.all_reduce(x, grid.tp)
    assert inner == [Record("reduce_scatter", "tp", 12)]
    assert records == [
        Record("all_reduce", "tp", 12),
        Record("all_gather", "pp", 12),
        Record("all_reduce", "tp", 12),
        Record("broadcast", "pp", 12),
    ]
    expected = {("all_reduce", "tp"): 2, ("all_gather", "pp"): 1, ("broadcast", "pp"): 1}
    assert comm.count_comms(records) == expected


def test_records_name_operation_axis_and_size() -> None:
    run_ranks(check_records, 4)


def error_message() -> str:
    grid = Grid.build(GridShape(tp=2), timeout=timedelta(seconds=1))
    grid.progress.doing = "step 7"
    if grid.rank == 1:
        time.sleep(2.5)  # it does not come
        return ""
    with pytest.raises(CommError) as caught:
        comm.all_reduce(torch.ones(2), grid.tp)
    return str(caught.value)


def test_an_error_names_the_axis_its_ranks_and_what_was_done() -> None:
    message = run_ranks(error_message, 2)[0]
    assert message.startswith("all_reduce over axis tp (ranks 0, 1) failed during step 7: ")
