"""Column- and row-parallel layers against plain linear layers with the same whole weights."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from megalite import comm
from megalite.errors import ConfigError
from megalite.grid import Axis
from megalite.tensor_parallel import (
    ColumnParallelLinear,
    ParallelContext,
    RowParallelLinear,
    column_parallel_layers,
    named_parameter_info,
)
from tests.ranks import run_ranks
from tests.tensor_parallel.helpers import assert_gradient, assert_near, context, load, own_part, random, share

S, B, IN, OUTS = 8, 3, 5, (12, 4, 20)
LAYOUTS = [(1, False), (2, False), (2, True), (4, False), (4, True)]


def columns(ctx: ParallelContext, dtype: torch.dtype) -> tuple[list[ColumnParallelLinear], list[Tensor], list[Tensor]]:
    layers = [ColumnParallelLinear(IN, out, ctx, bias=True, std=0.02).to(dtype) for out in OUTS]
    weights = [random((out, IN), dtype, out).requires_grad_() for out in OUTS]
    biases = [random((out,), dtype, 1 + out).requires_grad_() for out in OUTS]
    for layer, weight, bias in zip(layers, weights, biases, strict=True):
        load(layer, weight=weight, bias=bias)
    return layers, weights, biases


def check_column(tp_size: int, sequence_parallel: bool, dtype: torch.dtype, used: tuple[int, ...]) -> None:
    ctx = context(tp_size, sequence_parallel)
    layers, weights, biases = columns(ctx, dtype)
    x = random((S, B, IN), dtype, 1).requires_grad_()
    # [B, S, O]: the gradients that reach the layers are not contiguous
    dys = [random((B, S, out), dtype, 2 + out) for out in OUTS]
    plain = [F.linear(x, weight, bias) for weight, bias in zip(weights, biases, strict=True)]
    sum(((plain[i].transpose(0, 1) * dys[i]).sum() for i in used), torch.zeros(())).backward()

    x_local = share(x, ctx.tp) if ctx.sequence_parallel else x.detach().clone().requires_grad_()
    ys = column_parallel_layers(x_local, layers)
    for number, y in enumerate(ys):
        assert_near(y, share(plain[number].detach(), ctx.tp, -1), f"output {number}")
    sum(((ys[i].transpose(0, 1) * share(dys[i], ctx.tp, -1)).sum() for i in used), torch.zeros(())).backward()

    assert x.grad is not None
    assert_near(x_local.grad, share(x.grad, ctx.tp) if ctx.sequence_parallel else x.grad, "dx")
    for number, layer in enumerate(layers):
        assert layer.bias is not None
        assert_gradient(layer.weight, weights[number].grad, f"dW {number}")
        assert_gradient(layer.bias, biases[number].grad, f"db {number}")


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16], ids=str)
@pytest.mark.parametrize(("tp", "sequence_parallel"), LAYOUTS)
def test_column_parallel_equals_plain_layers(tp: int, sequence_parallel: bool, dtype: torch.dtype) -> None:
    run_ranks(check_column, tp, tp, sequence_parallel, dtype, (0, 1, 2))


@pytest.mark.parametrize("sequence_parallel", [False, True])
def test_an_output_that_nobody_uses_has_no_gradient(sequence_parallel: bool) -> None:
    run_ranks(check_column, 2, 2, sequence_parallel, torch.float64, (0, 2))


def check_row(tp_size: int, sequence_parallel: bool, dtype: torch.dtype) -> None:
    ctx = context(tp_size, sequence_parallel)
    layer = RowParallelLinear(12, 5, ctx, bias=True, std=0.02).to(dtype)
    weight, bias = random((5, 12), dtype, 1).requires_grad_(), random((5,), dtype, 2).requires_grad_()
    load(layer, weight=weight, bias=bias)
    x, dy = random((S, B, 12), dtype, 3).requires_grad_(), random((B, S, 5), dtype, 4)
    plain = F.linear(x, weight, bias)
    (plain.transpose(0, 1) * dy).sum().backward()
    assert x.grad is not None
    assert weight.grad is not None
    assert bias.grad is not None

    x_local = share(x, ctx.tp, -1)
    y = layer(x_local)
    assert_near(y, share(plain.detach(), ctx.tp) if ctx.sequence_parallel else plain.detach(), "output")
    dy_local = share(dy, ctx.tp, 1) if ctx.sequence_parallel else dy
    (y.transpose(0, 1) * dy_local).sum().backward()

    assert_near(x_local.grad, share(x.grad, ctx.tp, -1), "dx")
    assert_gradient(layer.weight, weight.grad, "dW")
    assert layer.bias is not None
    partial = named_parameter_info(layer)["bias"].partial_over_tp
    assert partial == ctx.sequence_parallel
    # each rank's gradient belongs to its own positions: [B, S_local, out] summed
    assert_gradient(layer.bias, dy_local.sum((0, 1)), "own part of db")
    if partial and dtype != torch.bfloat16:
        assert_near(comm.all_reduce(layer.bias.grad.to_local(), ctx.tp), bias.grad, "db")  # type: ignore[union-attr]


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16], ids=str)
@pytest.mark.parametrize(("tp", "sequence_parallel"), LAYOUTS)
def test_row_parallel_equals_a_plain_layer(tp: int, sequence_parallel: bool, dtype: torch.dtype) -> None:
    run_ranks(check_row, tp, tp, sequence_parallel, dtype)


def check_shared_heads(tp_size: int, num_shards: int, sequence_parallel: bool) -> None:
    dtype = torch.float64
    ctx = context(tp_size, sequence_parallel)
    head = 3
    layer = ColumnParallelLinear(IN, num_shards * head, ctx, bias=True, std=0.02, num_shards=num_shards).to(dtype)
    infos = named_parameter_info(layer)
    assert infos["weight"].partial_over_tp
    assert infos["bias"].partial_over_tp
    weight = random((num_shards * head, IN), dtype, 1).requires_grad_()
    bias = random((num_shards * head,), dtype, 2).requires_grad_()
    load(layer, weight=weight, bias=bias)
    x, dys = random((S, B, IN), dtype, 3).requires_grad_(), random((tp_size, S, B, head), dtype, 4)
    pieces = F.linear(x, weight, bias).split(head, -1)
    own_pieces = [pieces[rank * num_shards // tp_size] for rank in range(tp_size)]
    (torch.stack(own_pieces) * dys).sum().backward()  # every rank does something else with its head
    assert x.grad is not None

    x_local = share(x, ctx.tp) if ctx.sequence_parallel else x.detach().clone().requires_grad_()
    y = layer(x_local)
    assert_near(y, own_pieces[ctx.tp.rank].detach(), "output")
    (y * dys[ctx.tp.rank]).sum().backward()
    assert_near(x_local.grad, share(x.grad, ctx.tp) if ctx.sequence_parallel else x.grad, "dx")
    assert layer.bias is not None
    for parameter, expected in ((layer.weight, weight.grad), (layer.bias, bias.grad)):
        assert parameter.grad.placements == parameter.placements  # type: ignore[union-attr]
        assert_near(comm.all_reduce(parameter.grad.to_local(), ctx.tp), expected, "sum of gradients")  # type: ignore[union-attr]


@pytest.mark.parametrize("sequence_parallel", [False, True])
@pytest.mark.parametrize(("tp", "num_shards"), [(2, 1), (4, 1), (4, 2)])
def test_gradients_of_shared_heads_add_up(tp: int, num_shards: int, sequence_parallel: bool) -> None:
    run_ranks(check_shared_heads, tp, tp, num_shards, sequence_parallel)


def test_as_many_heads_as_ranks_are_cut() -> None:
    run_ranks(check_cut_heads, 2)


def check_cut_heads() -> None:
    layer = ColumnParallelLinear(IN, 12, context(2, False), bias=False, std=0.02, num_shards=4)
    full = random((12, IN), torch.float32, 1)
    load(layer, weight=full)
    assert not named_parameter_info(layer)["weight"].partial_over_tp
    assert torch.equal(layer.local_weight(), own_part(layer.weight, full))
    assert layer.local_weight().shape == (6, IN)


def test_heads_and_ranks_must_divide_one_another() -> None:
    three = ParallelContext(Axis("tp", 3, 0, (0, 1, 2)), False)
    with pytest.raises(ConfigError, match="2 pieces"):
        ColumnParallelLinear(5, 12, three, bias=False, std=0.02, num_shards=2)
    with pytest.raises(ConfigError, match="13 entries, which 3 tp ranks"):
        RowParallelLinear(13, 5, three, bias=False, std=0.02)


# operations of forward and backward together: the table in the docstring of megalite.tensor_parallel.linear
COLUMN = {"all_reduce": 1}
COLUMN_SP = {"all_gather": 2, "reduce_scatter": 1}
ROW = {"all_reduce": 1}
ROW_SP = {"reduce_scatter": 1, "all_gather": 1}


def counted(ctx: ParallelContext, needs_dx: bool, needs_dw: bool) -> tuple[dict[str, int], dict[str, int]]:
    def count(run) -> dict[str, int]:
        with comm.record_comms(ctx.tp) as records:
            run()
        assert {record.axis for record in records} <= {"tp"}
        return {op: number for (op, _), number in comm.count_comms(records).items()}

    length = S // ctx.tp.size if ctx.sequence_parallel else S
    layers, _, _ = columns(ctx, torch.float32)
    row = RowParallelLinear(12, 5, ctx, bias=True, std=0.02)
    load(row, weight=random((5, 12), torch.float32, 1), bias=random((5,), torch.float32, 2))
    for layer in (*layers, row):
        layer.requires_grad_(needs_dw)
    x = torch.ones(length, B, IN, requires_grad=needs_dx)
    x_row = torch.ones(S, B, 12 // ctx.tp.size, requires_grad=needs_dx)
    return (
        count(lambda: sum((y.sum() for y in column_parallel_layers(x, layers)), torch.zeros(())).backward()),
        count(lambda: row(x_row).sum().backward()),
    )


def check_counts(tp_size: int) -> None:
    plain, sharded = context(tp_size, False), context(tp_size, True)
    if tp_size == 1:
        assert counted(plain, True, True) == ({}, {})
        return
    assert counted(plain, True, True) == (COLUMN, ROW)
    assert counted(sharded, True, True) == (COLUMN_SP, ROW_SP)
    # what nobody asks for is not communicated
    assert counted(plain, False, True) == ({}, ROW)
    assert counted(sharded, False, True) == ({"all_gather": 2}, ROW_SP)
    assert counted(sharded, True, False) == ({"all_gather": 1, "reduce_scatter": 1}, ROW_SP)


@pytest.mark.parametrize("tp", [1, 2, 4])
def test_the_number_of_collectives_is_that_of_the_table(tp: int) -> None:
    run_ranks(check_counts, tp, tp)


def check_saved_memory() -> None:
    ctx = context(2, True)
    layers, _, _ = columns(ctx, torch.float32)
    saved: list[Tensor] = []

    def pack(x: Tensor) -> Tensor:
        saved.append(x)
        return x

    x = torch.ones(S // 2, B, IN, requires_grad=True)
    with torch.autograd.graph.saved_tensors_hooks(pack, lambda x: x):
        column_parallel_layers(x, layers)
    assert sorted(tuple(tensor.shape) for tensor in saved) == sorted([(S // 2, B, IN), *((out // 2, IN) for out in OUTS)])


def test_sequence_parallel_saves_the_sharded_input() -> None:
    run_ranks(check_saved_memory, 2)
