"""The learning rate as a pure function of the updates made: nothing to save, nothing to resume.

Decisions
- Steps count from 0 and are optimizer updates, never micro-batches. Warm-up takes lr * (step + 1) / warmup, so that no step is spent on
  a rate of 0.
- The decay begins at lr in the first step after the warm-up and would reach min_lr in step `decay_iters`, the first one
  after the end: no step inside is spent on min_lr either. From there on the rate is min_lr; it never falls below.
- "constant" has no end. "WSD" (warm-up, stable, decay) is constant until the last `lr_wsd_decay_iters` steps.
- "inverse-square-root" is lr * sqrt(warmup / step), not below min_lr: its length plays no part before its end.
- Warm-up comes first: it may go below min_lr.
- While the batch size ramps up, steps are counted in full ones: a step of a quarter of the full batch size is a quarter of a step.
- Times in samples are divided by the full batch size and not rounded, so they mean samples during a ramp-up too, as Megatron's do.
"""

from __future__ import annotations

import math

from megalite.config import OptimConfig
from megalite.errors import ConfigError

__all__ = ["lr_at"]


def lr_at(config: OptimConfig, step: float, train_iters: float, length: float = 1.0, batch_size: int | None = None) -> float:
    """Learning rate of the update that begins `step` steps after the start and is `length` full steps long.

    batch_size: samples of a full step, needed where a time is given in samples. Raises ConfigError for "WSD" without the length of its
    decay.
    """
    end = _steps(config.lr_decay_iters, config.lr_decay_samples, batch_size)
    end = train_iters if end is None else end
    warmup = _warmup(config, end, batch_size)
    if step < warmup:
        return min(config.lr * (step + length) / warmup, config.lr)
    if config.lr_decay_style == "constant":
        return config.lr
    if step >= end:
        return config.min_lr
    if config.lr_decay_style == "inverse-square-root":
        return max(config.min_lr, config.lr * min(1.0, math.sqrt(max(warmup, 1.0) / max(step, 1.0))))
    return config.min_lr + (config.lr - config.min_lr) * _remaining(config, step, (warmup, end), batch_size)


def _steps(iters: int | None, samples: int | None, batch_size: int | None) -> float | None:
    if samples is None:
        return iters
    assert batch_size is not None, "times in samples need the batch size"
    return samples / batch_size


def _warmup(config: OptimConfig, end: float, batch_size: int | None) -> float:
    if config.lr_warmup_fraction is not None:
        return round(config.lr_warmup_fraction * end)
    return _steps(config.lr_warmup_iters, config.lr_warmup_samples, batch_size) or 0


def _remaining(config: OptimConfig, step: float, span: tuple[float, float], batch_size: int | None) -> float:
    """What is left of the way from lr to min_lr: 1 at the start of the span, 0 at its end."""
    start, end = span
    shape = config.lr_decay_style
    if shape == "WSD":
        last = _steps(config.lr_wsd_decay_iters, config.lr_wsd_decay_samples, batch_size)
        if last is None:
            raise ConfigError("lr_decay_style WSD needs --lr-wsd-decay-iters, the number of steps of its final decay")
        shape, start = config.lr_wsd_decay_style, max(start, end - last)
    if step < start:
        return 1.0
    done = (step - start) / (end - start)
    if shape == "linear":
        return 1.0 - done
    if shape == "cosine":
        return 0.5 * (1.0 + math.cos(math.pi * done))
    if shape == "exponential":
        return 2.0 * 0.5**done - 1.0  # a halving, stretched to reach 0
    assert shape == "minus_sqrt", f"unknown decay {shape}"
    return 1.0 - math.sqrt(done)
