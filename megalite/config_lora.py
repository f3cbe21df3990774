"""What is trained beside frozen weights: low-rank adapters (LoRA, arXiv:2106.09685), their scale and where they stand.

Decisions
- A layer's update is scale * B @ A, with A [r, in] and B [out, r]. scale is alpha / r, or alpha / sqrt(r) with rsLoRA
  (arXiv:2312.03732). DoRA (arXiv:2402.09353) also trains the length of every row of the sum.
- Ranks and alphas may differ by layer: REGEX=NUMBER settings, of which the last one that is found in a layer's name counts, as
  in PEFT's rank_pattern and alpha_pattern. A rank from there does not change alpha.
- Adapters are a property of the run, not of the model: `ModelConfig` stays what it is, and a checkpoint of a run with adapters
  holds the adapters alone.
"""

from __future__ import annotations

import math
import re
from dataclasses import dataclass
from typing import Literal

__all__ = ["ALL_LINEAR", "TARGETS", "LoraConfig"]

ALL_LINEAR = "all-linear"
TARGETS = ("q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj")


@dataclass(frozen=True, kw_only=True)
class LoraConfig:
    """Low-rank adapters beside frozen weights."""

    lora_r: int | None = None
    """Rank of the adapters; not set: no adapters, all weights are trained."""
    lora_alpha: float = 16.0
    """What an adapter adds is multiplied by alpha / rank."""
    lora_dropout: float = 0.0
    """Probability with which an element of an adapter's input is dropped in training."""
    lora_targets: tuple[str, ...] = ("q_proj", "v_proj")
    """Linear layers with an adapter: q_proj, k_proj, v_proj, o_proj, gate_proj, up_proj, down_proj; all-linear stands for all of these."""
    lora_ranks: tuple[str, ...] = ()
    """REGEX=RANK: another rank for layers in whose name (layers.3.mlp.up_proj) the expression is found; 0: no adapter."""
    lora_alphas: tuple[str, ...] = ()
    """REGEX=ALPHA: another alpha for such layers."""
    use_rslora: bool = False
    """Multiply by alpha / sqrt(rank) instead."""
    use_dora: bool = False
    """Also train the length of every row of an adapted weight (DoRA)."""
    quantize_base: Literal["int8"] | None = None
    """Keep the frozen weights of linear layers as 8-bit integers with a scale per row; not set: as they are."""
    lora_average_rank: float | None = None
    """Drop the least important directions of all adapters during training until this many per adapter are left on average."""
    lora_allocation_start: int = 0
    """Updates before the first directions are dropped."""
    lora_allocation_end: int | None = None
    """Update after which no more are dropped; not set: half of train_iters."""
    lora_allocation_interval: int = 10
    """Updates between two choices."""
    lora_base: str | None = None
    """Checkpoint, or --save folder of a run, with the frozen weights, of any layout."""

    def allocation_end(self, train_iters: int) -> int:
        """The update of the last choice of directions."""
        return train_iters // 2 if self.lora_allocation_end is None else self.lora_allocation_end

    def rank_of(self, layer: str) -> int:
        """Rank for the linear layer with this dotted name (layers.3.attention.q_proj); 0 where it has no adapter."""
        targets = TARGETS if ALL_LINEAR in self.lora_targets else self.lora_targets
        if self.lora_r is None or layer.rpartition(".")[2] not in targets:
            return 0
        return int(_last_found(self.lora_ranks, layer, self.lora_r))

    def scale_of(self, layer: str) -> float:
        """What B @ A is multiplied with; for a layer with an adapter."""
        rank, alpha = self.rank_of(layer), _last_found(self.lora_alphas, layer, self.lora_alpha)
        return alpha / (math.sqrt(rank) if self.use_rslora else rank)


def _last_found(settings: tuple[str, ...], layer: str, default: float) -> float:
    for setting in reversed(settings):
        expression, _, number = setting.rpartition("=")
        if re.search(expression, layer):
            return float(number)
    return default
