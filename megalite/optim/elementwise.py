"""AdamW and SGD: rules that update every element by itself, so each rank updates its own part.

Decisions
- Both are torch's fused kernels, called as functions: one kernel for all parameters, which takes `found_inf`, a scalar on the device
  that turns the update into nothing.
- AdamW's decay is decoupled: weights shrink by lr x decay before the update. SGD's is coupled: decay x weight is added to the gradient
  and goes through the momentum, as in torch.optim.SGD, which Megatron uses too.
- AdamW's bias correction counts in tensors on the device, one per parameter because the kernel advances each of them.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor
from torch.optim.adamw import adamw
from torch.optim.sgd import sgd

from megalite.config import OptimConfig
from megalite.optim.groups import Entry, Rule, streamed

__all__ = ["SGD", "AdamW"]


class AdamW(Rule):
    """Loshchilov and Hutter, arXiv 1711.05101, equal to torch.optim.AdamW. Moments: exp_avg, exp_avg_sq."""

    def __init__(self, entries: Sequence[Entry], config: OptimConfig) -> None:
        super().__init__([entry for entry in entries if entry.local.numel() > 0])
        self._config = config
        self._counters = {entry: torch.zeros((), dtype=torch.float32, device=entry.local.device) for entry in self.entries}

    @torch.no_grad()
    def step(self, lr: float, skip: Tensor | None) -> None:
        config = self._config
        for entries, moments in streamed(self.entries, ("exp_avg", "exp_avg_sq")):
            adamw(
                [entry.local for entry in entries],
                [entry.grad for entry in entries],
                moments["exp_avg"],
                moments["exp_avg_sq"],
                [],
                [self._counters[entry] for entry in entries],
                fused=True,
                found_inf=skip,
                amsgrad=False,
                beta1=config.adam_beta1,
                beta2=config.adam_beta2,
                lr=lr * entries[0].lr_factor,
                weight_decay=entries[0].weight_decay,
                eps=config.adam_eps,
                maximize=False,
            )

    def load_step(self, num_steps: int) -> None:
        for counter in self._counters.values():
            counter.fill_(num_steps)


class SGD(Rule):
    """Gradient descent with momentum, equal to torch.optim.SGD. Moment: momentum_buffer, unused where the momentum is 0."""

    def __init__(self, entries: Sequence[Entry], config: OptimConfig) -> None:
        super().__init__([entry for entry in entries if entry.local.numel() > 0])
        self._momentum = config.sgd_momentum

    @torch.no_grad()
    def step(self, lr: float, skip: Tensor | None) -> None:
        for entries, moments in streamed(self.entries, ("momentum_buffer",)):
            sgd(
                [entry.local for entry in entries],
                [entry.grad for entry in entries],
                list[Tensor | None](moments["momentum_buffer"]),
                fused=True,
                found_inf=skip,
                weight_decay=entries[0].weight_decay,
                momentum=self._momentum,
                lr=lr * entries[0].lr_factor,
                dampening=0.0,
                nesterov=False,
                maximize=False,
            )
