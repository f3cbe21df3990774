"""The learning rate as a pure function of the step: nothing to save, nothing to resume.

Decisions
- Steps count from 0 and are optimizer updates. Warm-up takes lr * (step + 1) / warmup, so that no step is spent on a
  rate of 0.
- The decay begins at lr in the first step after the warm-up and would reach min_lr in step `decay_iters`, the first one
  after the end: no step inside is spent on min_lr either. From there on the rate is min_lr; it never falls below.
- "constant" has no end. "WSD" (warm-up, stable, decay) is constant until the last `lr_wsd_decay_iters` steps.
- Warm-up comes first: it may go below min_lr.
- While the batch size ramps up, steps are counted in full ones: a step of a quarter of the full batch size is a quarter of a step.
"""

from __future__ import annotations

import math

from megalite.config import OptimConfig
from megalite.errors import ConfigError

__all__ = ["lr_at"]


def lr_at(config: OptimConfig, step: float, train_iters: float, length: float = 1.0) -> float:
    """Learning rate of the update that begins `step` steps after the start and is `length` full steps long.

    Raises ConfigError for "WSD" without lr_wsd_decay_iters.
    """
    end = train_iters if config.lr_decay_iters is None else config.lr_decay_iters
    warmup = _warmup_iters(config, end)
    if step < warmup:
        return min(config.lr * (step + length) / warmup, config.lr)
    if config.lr_decay_style == "constant":
        return config.lr
    if step >= end:
        return config.min_lr
    return config.min_lr + (config.lr - config.min_lr) * _remaining(config, step, warmup, end)


def _warmup_iters(config: OptimConfig, end: float) -> int:
    return config.lr_warmup_iters if config.lr_warmup_fraction is None else round(config.lr_warmup_fraction * end)


def _remaining(config: OptimConfig, step: float, start: float, end: float) -> float:
    """What is left of the way from lr to min_lr: 1 at the start, 0 at the end."""
    shape = config.lr_decay_style
    if shape == "WSD":
        if config.lr_wsd_decay_iters is None:
            raise ConfigError("lr_decay_style WSD needs --lr-wsd-decay-iters, the number of steps of its final decay")
        shape, start = config.lr_wsd_decay_style, max(start, end - config.lr_wsd_decay_iters)
    if step < start:
        return 1.0
    done = (step - start) / (end - start)
    if shape == "linear":
        return 1.0 - done
    if shape == "cosine":
        return 0.5 * (1.0 + math.cos(math.pi * done))
    assert shape == "minus_sqrt", f"unknown decay {shape}"
    return 1.0 - math.sqrt(done)
