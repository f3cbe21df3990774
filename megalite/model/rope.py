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

from megalite.model.rope_scaling import RopeScaling, rope_frequencies

__all__ = ["Rotary", "Rotation", "rope_frequencies", "rotate"]

Rotation = tuple[Tensor, Tensor]
"""cos and sin of the angles, fp32 [S, B, 1, R/2] each."""


class Rotary:
    """Gives the rotation of every position; not a module, so no cast and no checkpoint ever touches it."""

    def __init__(self, rotated: int, base: float, scaling: RopeScaling | None = None) -> None:
        self._rotated, self._base, self._scaling = rotated, base, scaling
        self._frequencies: dict[tuple[torch.device, int], Tensor] = {}

    def __call__(self, positions: Tensor, length: int | None = None) -> Rotation:
        """positions: integers [B, S] -> cos and sin, fp32 [S, B, 1, R/2] each.

        length: of the sequence that they belong to, for frequencies that depend on it; None: S.
        """
        angles = positions.t()[:, :, None, None].float() * self._at(positions.device, length or positions.shape[1])
        cos, sin = angles.cos(), angles.sin()
        amplitude = 1.0 if self._scaling is None else self._scaling.amplitude
        return (cos, sin) if amplitude == 1.0 else (cos * amplitude, sin * amplitude)

    def _at(self, device: torch.device, length: int) -> Tensor:
        depends = self._scaling is not None and self._scaling.kind == "dynamic"
        key = device, length if depends else 0
        if key not in self._frequencies:
            scaling = self._scaling
            plain = rope_frequencies(self._rotated, self._base)
            found = plain if scaling is None else scaling.frequencies(self._rotated, self._base, length)
            self._frequencies[key] = found.to(device)
        return self._frequencies[key]


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
