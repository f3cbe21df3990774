"""Frozen linear weights as 8-bit integers: a quarter of the memory, for training adapters beside them (as QLoRA, arXiv:2305.14314, does
with 4 bits).

Decisions
- One scale per row of W [out, in], the row's largest magnitude / 127, rounding to nearest. A row's error is at most half a scale, and a
  row lies on one rank or is cut along `in`; its scale is that of the whole row, so a layout changes no value.
- Multiplication makes the weight in the type of the computation, for one product at a time, in forward and again in backward: what
  is kept for backward are the integers themselves. There is no gradient for them.
- The integers are buffers, not parameters: no optimizer, no gradient, and data parallelism does not cut them.
- Plain torch operations, on any device. Kernels that multiply integers directly are faster on some GPUs and round the activations too.

Legend: S sequence, B micro-batch, I in features, O out features.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.autograd.function import once_differentiable

__all__ = ["Int8Weight", "QuantizedWeight", "as_float", "int8_product", "quantize_rows", "row_scales"]

_LARGEST = 127


class Int8Weight(NamedTuple):
    """values: int8 [O, I]; scales: fp32 [O]. The weight is values * scales."""

    values: Tensor
    scales: Tensor

    def to_dtype(self, dtype: torch.dtype) -> Tensor:
        """[O, I], rounded to `dtype` once."""
        return (self.values * self.scales[:, None]).to(dtype)


def as_float(weight: Tensor | Int8Weight) -> Tensor:
    """The weight in fp32."""
    return weight.to_dtype(torch.float32) if isinstance(weight, Int8Weight) else weight.float()


def row_scales(weight: Tensor) -> Tensor:
    """Of whole rows [O, I] -> fp32 [O]; 1.0 for a row of zeros."""
    largest = weight.detach().float().abs().amax(1)
    return torch.where(largest > 0, largest / _LARGEST, 1.0)


def quantize_rows(weight: Tensor, scales: Tensor) -> Int8Weight:
    """weight: [O, I], or a part of the columns of the rows that the scales are of."""
    return Int8Weight((weight.detach().float() / scales[:, None]).round().to(torch.int8), scales)


class QuantizedWeight(nn.Module):
    """Stands in a layer in place of `weight`; shape: this rank's share of [O, I]. Without values until they are copied in."""

    values: Tensor
    scales: Tensor

    def __init__(self, shape: tuple[int, int], device: torch.device | str) -> None:
        super().__init__()
        self.register_buffer("values", torch.empty(shape, dtype=torch.int8, device=device), persistent=False)
        self.register_buffer("scales", torch.empty(shape[0], dtype=torch.float32, device=device), persistent=False)

    def local(self) -> Int8Weight:
        return Int8Weight(self.values, self.scales)

    @torch.no_grad()
    def fill(self, weight: Int8Weight) -> None:
        self.values.copy_(weight.values)
        self.scales.copy_(weight.scales)

    def extra_repr(self) -> str:
        return f"int8 {tuple(self.values.shape)}"


def int8_product(x: Tensor, weight: Int8Weight) -> Tensor:
    """x [..., I] -> x @ weight.T [..., O], in the type of x, which gets the gradient."""
    return _Int8Product.apply(x, *weight)  # type: ignore[return-value]


class _Int8Product(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, values: Tensor, scales: Tensor) -> Tensor:
        ctx.save_for_backward(values, scales)
        return x @ Int8Weight(values, scales).to_dtype(x.dtype).t()

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        weight = Int8Weight(*ctx.saved_tensors)
        return grads[0] @ weight.to_dtype(grads[0].dtype), None, None
