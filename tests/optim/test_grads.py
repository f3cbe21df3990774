"""Sums, norm and clipping on gradients that are set by hand."""

from __future__ import annotations

import math

import pytest
import torch
from torch import nn
from torch.distributed.tensor import DTensor, Replicate, Shard

from megalite import comm
from megalite.grid import Grid, GridShape
from megalite.optim import (
    OptimParameter,
    clip_grads_,
    collect_parameters,
    finalize_grads,
    global_names,
    grad_norm,
)
from megalite.optim import grads as grads_module
from megalite.tensor_parallel.parameter import ParameterInfo, add_parameter
from tests.ranks import run_ranks

SHAPES = {"cut_rows": (4, 3), "cut_columns": (5, 4), "whole": (3,), "parts": (7,)}


def info(**settings: bool) -> ParameterInfo:
    return ParameterInfo(role="linear", init="ones", **settings)


def module_on(grid: Grid) -> nn.Module:
    module = nn.Module()
    for name, dim in (("cut_rows", 0), ("cut_columns", 1), ("whole", None), ("parts", None)):
        record = info(partial_over_tp=name == "parts")
        add_parameter(module, name, SHAPES[name], tp=grid.tp, shard_dim=dim, info=record, device="cpu")
    return module


def dense_gradients() -> dict[str, torch.Tensor]:
    generator = torch.Generator().manual_seed(3)
    return {name: torch.randn(shape, generator=generator) for name, shape in SHAPES.items()}


def set_gradients(parameters: list[OptimParameter], grid: Grid) -> None:
    """This rank's share of the dense gradients; of `parts` each tp rank gets a part."""
    dense = dense_gradients()
    for p in parameters:
        part = dense[p.name]
        if p.name == "parts":
            part = part * (grid.tp.rank + 1) / (grid.tp.size * (grid.tp.size + 1) / 2)
        if p.tp_sharded:
            part = part.chunk(grid.tp.size, p.parameter.placements[0].dim)[grid.tp.rank].contiguous()
        if isinstance(p.parameter, DTensor):
            part = DTensor.from_local(part, p.parameter.device_mesh, p.parameter.placements, run_check=False)
        p.parameter.grad = part


def norm_over_tp(tp: int, piece: int) -> dict:
    grid = Grid.build(GridShape(tp=tp))
    parameters = collect_parameters([module_on(grid)])
    names = global_names(parameters, grid)
    before, grads_module.PIECE = grads_module.PIECE, piece
    try:
        set_gradients(parameters, grid)
        with comm.record_comms(grid) as records:
            finalize_grads(parameters, grid)
        finishing = comm.count_comms(records)
        with comm.record_comms(grid) as records:
            norm = grad_norm(parameters, names, grid)
    finally:
        grads_module.PIECE = before
    parts = next(p for p in parameters if p.name == "parts").local_grad
    return {
        "norm": norm,
        "parts": parts,
        "sharded": [p.name for p in parameters if p.tp_sharded],
        "finishing": finishing,
        "for the norm": comm.count_comms(records),
    }


@pytest.mark.parametrize(("tp", "piece"), [(1, 2**24), (2, 2**24), (2, 3), (4, 2**24), (4, 2)])
def test_norm_counts_each_logical_parameter_once(tp: int, piece: int) -> None:
    dense = dense_gradients()
    expected = torch.cat([grad.flatten() for grad in dense.values()]).double().norm()
    ranks = run_ranks(norm_over_tp, tp, tp, piece)
    for found in ranks:
        assert found["norm"].dtype == torch.float32
        assert found["norm"].item() == pytest.approx(expected.item(), rel=1e-6)
        assert found["norm"].equal(ranks[0]["norm"])
        assert found["parts"].equal(ranks[0]["parts"])
        torch.testing.assert_close(found["parts"], dense["parts"])
        assert found["sharded"] == ([] if tp == 1 else ["cut_columns", "cut_rows"])
        gathers = math.ceil(7 / piece)
        assert found["finishing"] == ({} if tp == 1 else {("all_gather", "tp"): gathers})
        assert found["for the norm"] == ({} if tp == 1 else {("all_reduce", "tp"): 1})


def plain_parameters(**gradients: list[float]) -> list[OptimParameter]:
    module = nn.Module()
    for name, values in gradients.items():
        module.register_parameter(name, nn.Parameter(torch.ones(len(values))))
        module.__dict__.setdefault("parameter_info", {})[name] = info()
        module.get_parameter(name).grad = torch.tensor(values)
    return collect_parameters([module])


def norm_of_values(**gradients: list[float]) -> torch.Tensor:
    grid = Grid.build(GridShape())
    parameters = plain_parameters(**gradients)
    return grad_norm(parameters, global_names(parameters, grid), grid)


def test_norm_by_hand() -> None:
    assert run_ranks(norm_of_values, 1, a=[3.0], b=[0.0, 4.0], c=[12.0])[0].item() == 13.0


def test_norm_of_huge_gradients_does_not_overflow() -> None:
    found = run_ranks(norm_of_values, 1, a=[3e30], b=[4e30])[0]
    assert found.item() == pytest.approx(5e30)
    assert math.isfinite(found.item())


@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf])
def test_one_bad_value_makes_the_norm_not_finite(bad: float) -> None:
    assert not math.isfinite(run_ranks(norm_of_values, 1, a=[1.0, bad], b=[1.0])[0].item())


def test_clip_scales_to_the_largest_norm() -> None:
    parameters = plain_parameters(a=[3.0], b=[0.0, 4.0])
    clip_grads_(parameters, torch.tensor(5.0), 1.0)
    values = torch.cat([p.local_grad for p in parameters])
    torch.testing.assert_close(values, torch.tensor([3.0, 0.0, 4.0]) / (5.0 + 1e-6), rtol=1e-7, atol=0)


@pytest.mark.parametrize("max_norm", [0.0, 5.1])
def test_clip_leaves_small_gradients_and_zero_switches_it_off(max_norm: float) -> None:
    parameters = plain_parameters(a=[3.0], b=[0.0, 4.0])
    clip_grads_(parameters, torch.tensor(5.0), max_norm)
    assert torch.cat([p.local_grad for p in parameters]).tolist() == [3.0, 0.0, 4.0]


def test_a_missing_gradient_is_named() -> None:
    parameters = plain_parameters(a=[3.0])
    parameters[0].parameter.grad = None
    with pytest.raises(AssertionError, match="a has no gradient"):
        grads_module._grad(parameters[0])


def placements_of_views() -> list[bool]:
    """Whether `local` and `local_grad` share storage with what FSDP2 and autograd hold."""
    grid = Grid.build(GridShape(tp=2))
    mesh = grid.tp.mesh
    shared = []
    for placement in (Shard(0), Replicate()):
        module = nn.Module()
        value = DTensor.from_local(torch.zeros(3, 2), mesh, [placement], run_check=False)
        module.register_parameter("w", nn.Parameter(value))
        module.__dict__["parameter_info"] = {"w": info()}
        (p,) = collect_parameters([module])
        p.local.fill_(5.0)
        shared.append(bool((module.w.detach().to_local() == 5.0).all()))
        module.w.grad = DTensor.from_local(torch.zeros(3, 2), mesh, [placement], run_check=False)
        p.local_grad.fill_(6.0)
        shared.append(bool((module.w.grad.to_local() == 6.0).all()))
        shared.append(p.tp_sharded == (placement == Shard(0)))
    return shared


def test_local_tensors_share_storage() -> None:
    assert run_ranks(placements_of_views, 2) == [[True] * 6] * 2
