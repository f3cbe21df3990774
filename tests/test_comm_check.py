"""Requirement 57: gloo once summed where it should average and averaged where it should sum; a run looks before it starts."""

from __future__ import annotations

from datetime import timedelta

import torch

from megalite import comm, comm_check
from megalite.errors import CommError
from megalite.grid import Axis, Grid, GridShape
from tests.ranks import run_ranks


def check_everything(tp: int, dp: int, factor: float) -> str:
    grid = Grid.build(GridShape(tp=tp, dp_shard=dp), "cpu", timedelta(seconds=30))
    reduce_scatter = comm.reduce_scatter
    comm.reduce_scatter = lambda x, axis: reduce_scatter(x, axis) * factor  # type: ignore[assignment]
    try:
        comm_check.check_sums([grid.tp, grid.dp_shard, grid.dp_replicate, grid.pp], torch.device("cpu"))
    except CommError as error:
        return str(error)
    finally:
        comm.reduce_scatter = reduce_scatter
    return ""


def test_requirement_57_this_backend_sums() -> None:
    assert run_ranks(check_everything, 6, 2, 3, 1.0) == [""] * 6


def test_requirement_57_an_average_is_noticed() -> None:
    for message in run_ranks(check_everything, 2, 2, 1, 0.5):
        assert "reduce-scatter over axis tp of 2 ranks gave" in message
        assert "all-reduce" not in message


def test_one_rank_has_nothing_to_check() -> None:
    comm_check.check_sums([Axis.single()], torch.device("cpu"))
