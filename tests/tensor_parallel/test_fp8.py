"""Linear layers with another matrix product: wiring with a stand-in, fp8 itself on a CPU where torchao is installed."""

from __future__ import annotations

import importlib.util
from dataclasses import replace

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from megalite.errors import ConfigError
from megalite.grid import Axis
from megalite.tensor_parallel import ColumnParallelLinear, ParallelContext, RowParallelLinear, WeightGradQueue, column_parallel_layers
from megalite.tensor_parallel.fp8 import fp8_product, torchao_product
from tests.ranks import run_ranks
from tests.tensor_parallel.helpers import assert_near, context, load, local, random, share

S, B, IN, OUT = 12, 2, 5, 24


def results(ctx: ParallelContext) -> list[Tensor | None]:
    """y, dx and all dW and db of down(up(x) * gate(x))."""
    settings = dict(ctx=ctx, bias=True, std=0.1)
    up, gate, down = layers = [
        ColumnParallelLinear(IN, OUT, **settings),  # type: ignore[arg-type]
        ColumnParallelLinear(IN, OUT, **settings),  # type: ignore[arg-type]
        RowParallelLinear(OUT, IN, **settings),  # type: ignore[arg-type]
    ]
    for number, layer in enumerate(layers):
        shape = (IN, OUT) if layer is down else (OUT, IN)
        load(layer.double(), weight=random(shape, torch.float64, number), bias=random(shape[:1], torch.float64, number + 7))
    x = random((S, B, IN), torch.float64, 9)
    x = (share(x, ctx.tp) if ctx.sequence_parallel else x).requires_grad_()
    a, b = column_parallel_layers(x, [up, gate])  # type: ignore[list-item]
    y = down(a * b)
    if ctx.weight_grads is None:
        y.square().sum().backward()
    else:
        with ctx.weight_grads.collect() as deferred:
            y.square().sum().backward()
        assert all(p.grad is None for layer in layers for p in layer.parameters())
        deferred.run()
    return [y.detach(), x.grad, *(None if p.grad is None else local(p.grad) for layer in layers for p in layer.parameters())]


def check_wiring(tp: int, sequence_parallel: bool) -> None:
    ctx, calls = context(tp, sequence_parallel), []

    def product(x: Tensor, weight: Tensor) -> Tensor:
        calls.append(weight.shape)
        return F.linear(x, weight)

    expected = results(ctx)
    for queue in (None, WeightGradQueue()):
        found = results(replace(ctx, product=product, weight_grads=queue))
        assert calls == [(OUT // tp, IN), (OUT // tp, IN), (IN, OUT // tp)]
        calls.clear()
        for number, (actual, same) in enumerate(zip(found, expected, strict=True)):
            assert same is not None
            assert_near(actual, same, f"result {number}")


@pytest.mark.parametrize(("tp", "sequence_parallel"), [(1, False), (2, False), (3, True)])
def test_another_product_is_used_for_everything(tp: int, sequence_parallel: bool) -> None:
    run_ranks(check_wiring, tp, tp, sequence_parallel)


def test_the_head_keeps_its_product() -> None:
    ctx = ParallelContext(Axis.single(), False, product=lambda x, weight: pytest.fail("used"))
    head = ColumnParallelLinear(IN, OUT, ctx, bias=False, std=0.1, role="head")
    assert head(torch.zeros(S, B, IN)).shape == (S, B, OUT)


def test_a_cpu_is_refused() -> None:
    with pytest.raises(
        ConfigError, match=r"fp8 rowwise needs an NVIDIA GPU of compute capability 8.9 or more, and this rank is on the CPU"
    ):
        fp8_product("rowwise", torch.device("cpu"))


@pytest.mark.skipif(importlib.util.find_spec("torchao") is None, reason="torchao is not installed")
@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("recipe", ["tensorwise", "rowwise"])
def test_fp8_is_near_bf16(recipe: str) -> None:
    product = torchao_product(recipe)
    x, weight = random((32, 2, 48), torch.bfloat16, 1), random((64, 48), torch.bfloat16, 2)
    dy, results = random((32, 2, 64), torch.bfloat16, 3), []
    for multiply in (F.linear, product):
        a, b = x.clone().requires_grad_(), weight.clone().requires_grad_()
        y = multiply(a, b)
        y.backward(dy)
        assert y.dtype == torch.bfloat16 and a.grad is not None and b.grad is not None
        results.append([t.detach().float() for t in (y, a.grad, b.grad)])
    for exact, found in zip(*results, strict=True):
        error = (found - exact).norm() / exact.norm()
        assert 0.01 < error < 0.08  # e4m3 has 3 bits of mantissa, e5m2 2: bf16 alone is off by 0.002
