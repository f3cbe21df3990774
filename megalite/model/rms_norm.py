"""RMS normalization that keeps little: its input and one number per row.

Decisions
- On GPUs torch's fused kernel is used as it is. On CPUs torch 2.13 composes the norm of seven operations, which keep two
  fp32 copies of the input for backward and take twice the time of these.
- The arithmetic is fp32 (fp64 for fp64) whatever the type of x; the result is rounded once, after the weight.

Legend: H hidden (or head size: the last dim).
"""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.autograd.function import once_differentiable

__all__ = ["rms_norm"]


def rms_norm(x: Tensor, weight: Tensor, epsilon: float) -> Tensor:
    """x / sqrt(mean(x^2) + epsilon) * weight over the last dim: [..., H], [H] -> [..., H] in the type of x."""
    if x.device.type == "cpu":
        return _RMSNorm.apply(x, weight, epsilon)  # type: ignore[return-value]
    return F.rms_norm(x, (x.shape[-1],), weight, epsilon)


class _RMSNorm(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, epsilon: float) -> Tensor:
        wide = x.to(torch.promote_types(x.dtype, torch.float32))
        scale = torch.linalg.vector_norm(wide, dim=-1, keepdim=True).square_()
        scale.div_(x.shape[-1]).add_(epsilon).rsqrt_()
        ctx.save_for_backward(x, weight, scale)
        return (wide * scale).mul_(weight).to(x.dtype)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        x, weight, scale = ctx.saved_tensors
        wide = grads[0].to(scale.dtype)
        normed = x.to(scale.dtype) * scale
        dweight = (wide * normed).flatten(0, -2).sum(0).to(weight.dtype) if ctx.needs_input_grad[1] else None
        if not ctx.needs_input_grad[0]:
            return None, dweight, None
        weighted = wide * weight
        mean = torch.linalg.vecdot(weighted, normed).unsqueeze(-1).div_(-x.shape[-1])
        return weighted.addcmul_(normed, mean).mul_(scale).to(x.dtype), dweight, None
