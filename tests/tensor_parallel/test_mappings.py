"""The table of conjugate pairs: values forward and backward, and the collective of each movement."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from megalite import comm
from megalite.grid import Axis
from megalite.tensor_parallel import mappings
from tests.ranks import run_ranks
from tests.tensor_parallel.helpers import random, tp_axis

DTYPE = torch.float64
SHAPE = (12, 2, 24)

Expected = Callable[[list[Tensor], int], Tensor]


def total(xs: list[Tensor], rank: int) -> Tensor:
    return torch.stack(xs).sum(0)


def own(xs: list[Tensor], rank: int) -> Tensor:
    return xs[rank]


def joined(dim: int) -> Expected:
    return lambda xs, rank: torch.cat(xs, dim)


def own_slice(dim: int) -> Expected:
    return lambda xs, rank: xs[rank].chunk(len(xs), dim)[rank]


def slice_of_total(xs: list[Tensor], rank: int) -> Tensor:
    return total(xs, rank).chunk(len(xs), 0)[rank]


# name, arguments, forward: (value, operations), backward: (value, operations)
TABLE = {
    "copy_to_tp": ((), (own, []), (total, ["all_reduce"])),
    "reduce_from_tp": ((), (total, ["all_reduce"]), (own, [])),
    "gather_from_tp": ((-1,), (joined(-1), ["all_gather"]), (own_slice(-1), [])),
    "scatter_to_tp": ((-1,), (own_slice(-1), []), (joined(-1), ["all_gather"])),
    "gather_from_sp": ((), (joined(0), ["all_gather"]), (slice_of_total, ["reduce_scatter"])),
    "reduce_scatter_to_sp": ((), (slice_of_total, ["reduce_scatter"]), (joined(0), ["all_gather"])),
    "scatter_to_sp": ((), (own_slice(0), []), (joined(0), ["all_gather"])),
}


def check_pair(name: str, tp_size: int) -> None:
    tp = tp_axis(tp_size)
    arguments, (forward, forward_ops), (backward, backward_ops) = TABLE[name]
    xs = [random(SHAPE, DTYPE, rank).requires_grad_() for rank in range(tp_size)]
    x = xs[tp.rank]
    before = x.detach().clone()
    with comm.record_comms(tp) as records:
        y = getattr(mappings, name)(x, tp, *arguments)
        assert [record.op for record in records] == forward_ops
        torch.testing.assert_close(y, forward([x.detach() for x in xs], tp.rank), rtol=0, atol=1e-13)
        dys = [random(tuple(y.shape), DTYPE, 10 + rank) for rank in range(tp_size)]
        y.backward(dys[tp.rank])
        assert [record.op for record in records] == forward_ops + backward_ops
    torch.testing.assert_close(x.grad, backward(dys, tp.rank), rtol=0, atol=1e-13)
    assert torch.equal(x.detach(), before)
    assert torch.equal(dys[tp.rank], random(tuple(y.shape), DTYPE, 10 + tp.rank))


@pytest.mark.parametrize("tp", [2, 3])
@pytest.mark.parametrize("name", TABLE)
def test_pair(name: str, tp: int) -> None:
    run_ranks(check_pair, tp, name, tp)


@pytest.mark.parametrize("name", TABLE)
def test_one_rank_moves_nothing(name: str) -> None:
    x = torch.ones(SHAPE)
    assert getattr(mappings, name)(x, Axis.single(), *TABLE[name][0]) is x


def test_the_table_is_complete() -> None:
    assert set(TABLE) == set(mappings.__all__)
