"""The gated activation against its formula: values, gradients, and what is kept."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F

from megalite.model.swiglu import swiglu


@pytest.mark.parametrize(("dtype", "tolerance"), [(torch.float64, 1e-14), (torch.float32, 1e-6), (torch.bfloat16, 2e-2)])
def test_equals_the_formula(dtype: torch.dtype, tolerance: float) -> None:
    generator = torch.Generator().manual_seed(5)
    gate, up, dy = (torch.randn(3, 2, 11, generator=generator).to(dtype) for _ in range(3))
    gate.requires_grad_(), up.requires_grad_()
    found, wanted = swiglu(gate, up), F.silu(gate) * up
    torch.testing.assert_close(found, wanted, rtol=tolerance, atol=tolerance)
    for one, other in zip(torch.autograd.grad(found, (gate, up), dy), torch.autograd.grad(wanted, (gate, up), dy), strict=True):
        torch.testing.assert_close(one, other, rtol=tolerance, atol=tolerance)


def test_keeps_its_two_inputs() -> None:
    gate, up = torch.randn(3, 11, requires_grad=True), torch.randn(3, 11, requires_grad=True)
    kept = []
    with torch.autograd.graph.saved_tensors_hooks(lambda tensor: kept.append(tensor) or tensor, lambda tensor: tensor):
        swiglu(gate, up)
    assert [tensor is one for tensor, one in zip(kept, (gate, up), strict=True)] == [True, True]
