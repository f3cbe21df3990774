"""The norm against torch's, which computes in another order: values and both gradients, odd sizes, every type."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F

from megalite.model.rms_norm import rms_norm

EPSILON = 1e-3  # large enough that a wrong place for it shows


def _case(dtype: torch.dtype) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(3)
    x, dy = (torch.randn(5, 3, 7, generator=generator).to(dtype) for _ in range(2))
    x[0, 0] = 0.0  # only epsilon keeps this row finite
    return x.requires_grad_(), (torch.rand(7, generator=generator) + 0.5).to(dtype).requires_grad_(), dy


@pytest.mark.parametrize(("dtype", "tolerance"), [(torch.float64, 1e-12), (torch.float32, 2e-6), (torch.bfloat16, 2e-2)])
def test_equals_torchs(dtype: torch.dtype, tolerance: float) -> None:
    x, weight, dy = _case(dtype)
    found = rms_norm(x, weight, EPSILON)
    wanted = F.rms_norm(x, (7,), weight, EPSILON)
    assert found.dtype == dtype
    torch.testing.assert_close(found, wanted, rtol=tolerance, atol=tolerance)
    for one, other in zip(torch.autograd.grad(found, (x, weight), dy), torch.autograd.grad(wanted, (x, weight), dy), strict=True):
        assert one.dtype == dtype
        torch.testing.assert_close(one, other, rtol=10 * tolerance, atol=10 * tolerance)


def test_keeps_its_input_and_one_number_per_row() -> None:
    x, weight, _ = _case(torch.float32)
    kept = []
    with torch.autograd.graph.saved_tensors_hooks(lambda tensor: kept.append(tensor) or tensor, lambda tensor: tensor):
        rms_norm(x, weight, EPSILON)
    assert sorted(tensor.numel() for tensor in kept) == [7, 15, 105]


def test_a_frozen_weight_or_input_needs_no_gradient() -> None:
    x, weight, dy = _case(torch.float32)
    both = torch.autograd.grad(rms_norm(x, weight, EPSILON), (x, weight), dy)
    assert torch.equal(torch.autograd.grad(rms_norm(x, weight.detach(), EPSILON), x, dy)[0], both[0])
    assert torch.equal(torch.autograd.grad(rms_norm(x.detach(), weight, EPSILON), weight, dy)[0], both[1])
