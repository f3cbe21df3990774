"""Rotary frequencies for sequences longer than those that a model was trained on first.

| kind    | what changes                                                                                             |
|---------|----------------------------------------------------------------------------------------------------------|
| linear  | all frequencies are divided by the factor (Chen et al. 2023, arXiv:2306.15595)                           |
| dynamic | the base grows once a sequence is longer than the original length ("NTK-aware")                          |
| llama3  | long wavelengths are divided, short ones kept, between them a blend (Llama 3.1)                          |
| yarn    | the same by the number of turns, and cosines and sines grow (Peng et al. 2023, arXiv:2309.00071)          |

The conventions, down to rounding of borders, are those of Hugging Face transformers, whose checkpoints are the reason for these settings.

Legend: R rotated channels of a head.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import Tensor

from megalite.config import ModelConfig

__all__ = ["RopeScaling", "rope_frequencies"]


def rope_frequencies(rotated: int, base: float) -> Tensor:
    """base^(-2i/R) for i < R/2: fp32 [R/2] on the CPU, in radians per position."""
    assert rotated % 2 == 0, f"{rotated} channels cannot turn in pairs"
    exponents = torch.arange(0, rotated, 2, dtype=torch.int64, device="cpu").float() / rotated
    return 1.0 / (base**exponents)


@dataclass(frozen=True, kw_only=True)
class RopeScaling:
    """Settings of the same names without the prefix, in `ModelConfig`. length: the original one."""

    kind: str
    factor: float
    length: int
    low_freq_factor: float = 1.0
    high_freq_factor: float = 4.0
    beta_fast: float = 32.0
    beta_slow: float = 1.0
    attention_factor: float | None = None
    mscale: float | None = None
    mscale_all_dim: float | None = None
    truncate: bool = True

    @classmethod
    def of(cls, config: ModelConfig) -> RopeScaling | None:
        """None where nothing is stretched."""
        if config.rope_scaling == "none":
            return None
        return cls(
            kind=config.rope_scaling,
            factor=config.rope_scaling_factor,
            length=config.rope_scaling_original_length or config.max_position_embeddings or 0,
            low_freq_factor=config.rope_scaling_low_freq_factor,
            high_freq_factor=config.rope_scaling_high_freq_factor,
            beta_fast=config.rope_scaling_beta_fast,
            beta_slow=config.rope_scaling_beta_slow,
            attention_factor=config.rope_scaling_attention_factor,
            mscale=config.rope_scaling_mscale,
            mscale_all_dim=config.rope_scaling_mscale_all_dim,
            truncate=config.rope_scaling_truncate,
        )

    def frequencies(self, rotated: int, base: float, positions: int) -> Tensor:
        """fp32 [R/2] on the CPU, for a sequence of `positions` tokens."""
        plain = rope_frequencies(rotated, base)
        if self.kind == "linear":
            return plain / self.factor
        if self.kind == "dynamic":
            ratio = self.factor * max(positions, self.length) / self.length - (self.factor - 1)
            return rope_frequencies(rotated, base * ratio ** (rotated / (rotated - 2)))
        return self._llama3(plain) if self.kind == "llama3" else self._yarn(plain, rotated, base)

    @property
    def amplitude(self) -> float:
        """Factor of cosines and sines."""
        if self.kind != "yarn":
            return 1.0
        if self.attention_factor is not None:
            return self.attention_factor
        if self.mscale and self.mscale_all_dim:
            return self._growth(self.mscale) / self._growth(self.mscale_all_dim)
        return self._growth(1.0)

    def _growth(self, share: float) -> float:
        return 0.1 * share * math.log(self.factor) + 1.0 if self.factor > 1 else 1.0

    def _llama3(self, plain: Tensor) -> Tensor:
        wavelength = 2 * math.pi / plain
        share = (self.length / wavelength - self.low_freq_factor) / (self.high_freq_factor - self.low_freq_factor)
        blend = (1 - share) * plain / self.factor + share * plain
        stretched = torch.where(wavelength > self.length / self.low_freq_factor, plain / self.factor, blend)
        return torch.where(wavelength < self.length / self.high_freq_factor, plain, stretched)

    def _yarn(self, plain: Tensor, rotated: int, base: float) -> Tensor:
        low, high = (self._channel(turns, rotated, base) for turns in (self.beta_fast, self.beta_slow))
        if self.truncate:
            low, high = math.floor(low), math.ceil(high)
        low, high = max(low, 0), min(high, rotated - 1)
        high += 0.001 if low == high else 0
        ramp = ((torch.arange(rotated // 2, dtype=torch.float32) - low) / (high - low)).clamp(0, 1)
        return plain / self.factor * ramp + plain * (1 - ramp)

    def _channel(self, turns: float, rotated: int, base: float) -> float:
        """Of the channel that turns so often over the original length."""
        return rotated * math.log(self.length / (turns * 2 * math.pi)) / (2 * math.log(base))
