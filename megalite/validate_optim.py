"""What can be wrong with the optimizer, its parameter groups and its learning rate; see `validate`.

Decisions
- A setting of another optimizer or schedule is only reported where its default means "not set": a preset may carry the rest.
- Times in samples are compared with times in steps through the full batch size, where that is known.
"""

from __future__ import annotations

import math

from megalite.config import OptimConfig, RunConfig
from megalite.config_multipliers import Multipliers
from megalite.errors import ConfigError

__all__ = ["optim_violations"]

_FRACTIONS = ("adam_beta1", "adam_beta2", "sgd_momentum", "muon_momentum")


def optim_violations(config: RunConfig, world_size: int | None) -> list[str]:
    """Optimizer and learning rate. world_size: None where sizes are not sound, so that batches cannot be computed."""
    batch, numbers = _batches(config, world_size)
    optim = config.optim
    found = _number_violations(optim) + _multiplier_violations(optim) + _state_violations(optim)
    return found + _schedule_violations(optim, config.train.train_iters, batch) + _noise_violations(config, numbers)


def _batches(config: RunConfig, world_size: int | None) -> tuple[int, list[int]]:
    """Full batch size and all numbers of micro-batches; 0 and none where they cannot be told, for which others give the reason."""
    if world_size is None:
        return 0, []
    try:
        config.all_num_microbatches(world_size)
        divisor = config.train.micro_batch_size * config.dp_size(world_size)
        return config.global_batch(world_size), [size // divisor for size in config.batch_sizes(world_size).possible]
    except ConfigError:
        return 0, []


def _number_violations(optim: OptimConfig) -> list[str]:
    found = []
    if not 0 < optim.lr < math.inf:
        found.append(f"lr is {optim.lr}: use a number above 0")
    if not 0 <= optim.min_lr <= optim.lr:
        found.append(f"min_lr is {optim.min_lr}: use 0 or more, at most lr {optim.lr}")
    for name in _FRACTIONS:
        if not 0 <= getattr(optim, name) < 1:
            found.append(f"{name} is {getattr(optim, name)}: use 0 or more and less than 1")
    if not 0 < optim.adam_eps < math.inf:
        found.append(f"adam_eps is {optim.adam_eps}: use a number above 0")
    if not 0 <= optim.weight_decay < math.inf:
        found.append(f"weight_decay is {optim.weight_decay}: use 0 or more")
    if not 0 <= optim.clip_grad < math.inf:
        found.append(f"clip_grad is {optim.clip_grad}: use 0 (no clipping) or a number above 0")
    return found


def _multiplier_violations(optim: OptimConfig) -> list[str]:
    found = []
    for name in ("lr_multipliers", "weight_decay_multipliers"):
        try:
            Multipliers.parse(getattr(optim, name), name)
        except ConfigError as error:
            found += error.violations
    return found


def _state_violations(optim: OptimConfig) -> list[str]:
    if optim.optimizer == "sgd" and optim.exp_avg_sq_dtype != "fp32":
        return [f"exp_avg_sq_dtype {optim.exp_avg_sq_dtype} has no effect: sgd has no second moment; leave it out"]
    return []


def _schedule_violations(optim: OptimConfig, train_iters: int, batch: int) -> list[str]:
    found = _double_violations(optim)
    if found:
        return found
    fraction = optim.lr_warmup_fraction
    if fraction is not None and not 0 <= fraction < 1:
        return [f"lr_warmup_fraction is {fraction}: use 0 or more and less than 1"]
    end = _Time("lr_decay_iters", optim.lr_decay_iters, "lr_decay_samples", optim.lr_decay_samples, batch)
    if not end.is_set:
        end = _Time("train_iters", train_iters, "", None, batch)
    warmup = _Time("lr_warmup_iters", optim.lr_warmup_iters, "lr_warmup_samples", optim.lr_warmup_samples, batch)
    decays = optim.lr_decay_style != "constant"
    if decays and fraction is None and end.steps is not None and warmup.steps is not None and warmup.steps >= end.steps > 0:
        found.append(
            f"{warmup} leaves nothing of {end} for the decay: warm up in fewer than {end.steps:g} steps, or use --lr-decay-style constant"
        )
    return found + _wsd_violations(optim, end, warmup, batch)


class _Time:
    """A time of the schedule in steps or in samples: `steps` is None where the batch size that would tell is unknown."""

    def __init__(self, in_steps: str, iters: int | None, in_samples: str, samples: int | None, batch: int) -> None:
        self.is_set = iters is not None or samples is not None
        self.name, self.value = (in_steps, iters) if samples is None else (in_samples, samples)
        self.steps: float | None = iters if samples is None else samples / batch if batch > 0 else None

    def __str__(self) -> str:
        return f"{self.name} {self.value}"


def _double_violations(optim: OptimConfig) -> list[str]:
    """Times that are given twice."""
    found = []
    warmups = {
        "lr_warmup_iters": optim.lr_warmup_iters or None,
        "lr_warmup_samples": optim.lr_warmup_samples,
        "lr_warmup_fraction": optim.lr_warmup_fraction,
    }
    decays = {"lr_decay_iters": optim.lr_decay_iters, "lr_decay_samples": optim.lr_decay_samples}
    last = {"lr_wsd_decay_iters": optim.lr_wsd_decay_iters, "lr_wsd_decay_samples": optim.lr_wsd_decay_samples}
    for times in (warmups, decays, last):
        both = [f"{name} {value}" for name, value in times.items() if value is not None]
        if len(both) == 2:
            found.append(f"{both[0]} and {both[1]} are both set: leave one of them out")
        elif len(both) > 2:
            found.append(f"{', '.join(both)} are all set: leave all but one of them out")
    return found


def _wsd_violations(optim: OptimConfig, end: _Time, warmup: _Time, batch: int) -> list[str]:
    last = _Time("lr_wsd_decay_iters", optim.lr_wsd_decay_iters, "lr_wsd_decay_samples", optim.lr_wsd_decay_samples, batch)
    if optim.lr_decay_style != "WSD":
        if not last.is_set:
            return []
        return [f"{last} has no effect with lr_decay_style {optim.lr_decay_style}: leave it out, or use --lr-decay-style WSD"]
    if not last.is_set:
        steps = "" if end.steps is None else f": use up to {math.floor(end.steps)}"
        return [f"lr_decay_style WSD needs lr_wsd_decay_iters, the steps of its final decay{steps}"]
    if end.steps is None or last.steps is None or warmup.steps is None:
        return []
    before = warmup.steps if optim.lr_warmup_fraction is None else round(optim.lr_warmup_fraction * end.steps)
    if last.steps > end.steps - before:
        return [
            f"{last} and {before:g} warm-up steps are more than {end}: use at most {max(math.floor(end.steps - before), 0)} steps of "
            "final decay"
        ]
    return []


def _noise_violations(config: RunConfig, numbers: list[int]) -> list[str]:
    """The estimate compares the two halves of a step (`training.gradients`). numbers: of micro-batches, for every batch size."""
    if not config.numerics.log_gradient_noise_scale:
        return []
    found = []
    odd = sorted(number for number in numbers if number % 2)
    if odd:
        found.append(
            f"log_gradient_noise_scale compares two halves of each step, but a rank has {', '.join(map(str, odd))} micro-batches in it: "
            "use a global_batch_size that makes their number even, or a smaller micro_batch_size"
        )
    if config.output.trace_pipeline is not None:
        found.append(
            "log_gradient_noise_scale makes two pipeline passes of each step, which trace_pipeline would draw as steps: leave one out"
        )
    return found
