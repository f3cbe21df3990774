"""The loss scale of fp16: gradients are computed times a factor, so that small ones do not vanish in a format without room below.

Decisions
- The scale lives on the device and moves there: whether a step overflowed is known to the host only later.
- The rule is Megatron's: an overflow takes one of `hysteresis` lives, and with none left the scale halves, at each further overflow too;
  `loss_scale_window` steps without overflow double the scale and give all lives back.
- A fixed scale (`loss_scale`) never moves. Other formats than fp16 have the fixed scale 1, so there is one path for all.
- An overflow at `min_loss_scale` cannot be cured by scaling: the caller ends the run.
"""

from __future__ import annotations

import torch
from torch import Tensor

from megalite.config import NumericsConfig

__all__ = ["LossScale"]


class LossScale:
    """scale: an fp32 scalar on the device, which the loss is multiplied by."""

    def __init__(self, config: NumericsConfig, device: torch.device) -> None:
        self.is_dynamic = config.precision == "fp16" and config.loss_scale is None
        self.is_used = config.precision == "fp16"
        self._config = config
        first = 1.0 if not self.is_used else config.initial_loss_scale if config.loss_scale is None else config.loss_scale
        self.scale = torch.tensor(first, dtype=torch.float32, device=device)
        self._good_steps = torch.zeros((), dtype=torch.float32, device=device)
        self._lives = torch.full((), float(config.hysteresis), dtype=torch.float32, device=device)

    @property
    def is_at_minimum(self) -> Tensor:
        """Bool scalar: an overflow now has no remedy."""
        return self.scale <= self._config.min_loss_scale if self.is_dynamic else torch.ones_like(self.scale, dtype=torch.bool)

    def update(self, overflowed: Tensor) -> None:
        """After a step; `overflowed` is a bool scalar on the device."""
        if not self.is_dynamic:
            return
        config = self._config
        lives = torch.where(overflowed, self._lives - 1, self._lives)
        halves = overflowed & (lives <= 0)
        good_steps = torch.where(overflowed, torch.zeros_like(self._good_steps), self._good_steps + 1)
        doubles = good_steps >= config.loss_scale_window
        scale = torch.where(halves, (self.scale / 2).clamp(min=config.min_loss_scale), self.scale)
        self.scale = torch.where(doubles, scale * 2, scale)
        self._good_steps = torch.where(doubles, torch.zeros_like(good_steps), good_steps)
        self._lives = torch.where(doubles, torch.full_like(lives, float(config.hysteresis)), lives.clamp(min=0))

    def state(self) -> dict[str, float]:
        """What a checkpoint keeps; waits for the device. Empty without a dynamic scale."""
        if not self.is_dynamic:
            return {}
        return {"loss_scale": self.scale.item(), "good_steps": self._good_steps.item(), "lives": self._lives.item()}

    def load(self, state: dict[str, float]) -> None:
        """Go on from `state`; an empty one (of a run in another format) leaves the first scale."""
        if self.is_dynamic and state:
            self.scale.fill_(state["loss_scale"])
            self._good_steps.fill_(state["good_steps"])
            self._lives.fill_(state["lives"])
