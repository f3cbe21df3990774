"""Rotary position embedding.

Decisions:
- Half-rotation layout: channel i turns with channel i + R/2 (not 2i with 2i + 1); converters for the other layout
  permute weights.
- Frequencies and angles are always fp32 and come from integer positions. They live in a plain object that
  `module.to(bfloat16)` cannot reach: bf16 has 8 bits of mantissa, so a table in bf16 would give positions 256 and 257
  the same angle.
- Frequencies are computed on the CPU and copied, so that a GPU starts from the same bits as a CPU.
- Positions come with the micro-batch (they may restart inside a sequence), so tables are computed per micro-batch,
  once for all layers.

Legend: S sequence, B micro-batch, N heads, D head size, R rotated channels of a head (R <= D, even).
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

__all__ = ["Rotary", "Rotation", "rope_frequencies", "rotate"]

Rotation = tuple[Tensor, Tensor]
"""cos and sin of the angles, fp32 [S, B, 1, R/2] each."""


def rope_frequencies(rotated: int, base: float) -> Tensor:
    """base^(-2i/R) for i < R/2: fp32 [R/2] on the CPU, in radians per position."""
    assert rotated % 2 == 0, f"{rotated} channels cannot turn in pairs"
    exponents = torch.arange(0, rotated, 2, dtype=torch.int64, device="cpu").float() / rotated
    return 1.0 / (base**exponents)


class Rotary:
    """Gives the rotation of every position; not a module, so no cast and no checkpoint ever touches it."""

    def __init__(self, rotated: int, base: float) -> None:
        self._rotated, self._base = rotated, base
        self._frequencies: dict[torch.device, Tensor] = {}

    def __call__(self, positions: Tensor) -> Rotation:
        """positions: integers [B, S] -> cos and sin, fp32 [S, B, 1, R/2] each."""
        frequencies = self._frequencies.get(positions.device)
        if frequencies is None:
            frequencies = rope_frequencies(self._rotated, self._base).to(positions.device)
            self._frequencies[positions.device] = frequencies
        angles = positions.t()[:, :, None, None].float() * frequencies
        return angles.cos(), angles.sin()


def rotate(x: Tensor, rotation: Rotation) -> Tensor:
    """Turn the first R channels of every head: [S, B, N, D] -> the same shape and type; the arithmetic is fp32.

    Only the rotation is kept for backward.
    """
    return _Rotate.apply(x, *rotation)  # type: ignore[return-value]


class _Rotate(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        ctx.save_for_backward(cos, sin)
        return _turn(x, cos, sin, 1)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None, None]:
        cos, sin = ctx.saved_tensors
        return _turn(grads[0], cos, sin, -1), None, None


def _turn(x: Tensor, cos: Tensor, sin: Tensor, direction: int) -> Tensor:
    """direction: 1, or -1 for the transposed map, which is the gradient's."""
    half = cos.shape[-1]
    wide = x.to(torch.promote_types(x.dtype, torch.float32))
    out = torch.empty_like(wide)
    first, second = wide[..., :half], wide[..., half : 2 * half]
    torch.mul(first, cos, out=out[..., :half]).addcmul_(second, sin, value=-direction)
    torch.mul(second, cos, out=out[..., half : 2 * half]).addcmul_(first, sin, value=direction)
    if 2 * half < x.shape[-1]:
        out[..., 2 * half :] = wide[..., 2 * half :]
    return out.to(x.dtype)
