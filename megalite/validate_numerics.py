"""What can be wrong with precision and with the policies for numbers that went wrong; see `validate`."""

from __future__ import annotations

import math

from megalite.config import NumericsConfig

__all__ = ["numerics_violations"]


def numerics_violations(numerics: NumericsConfig) -> list[str]:
    """One sentence each."""
    return _scale_violations(numerics) + _spike_violations(numerics) + _rewind_violations(numerics)


def _scale_violations(numerics: NumericsConfig) -> list[str]:
    defaults, found = NumericsConfig(), []
    settings = ("loss_scale", "initial_loss_scale", "min_loss_scale")
    for name in settings:
        value = getattr(numerics, name)
        if value is not None and not (0 < value < math.inf and math.frexp(value)[0] == 0.5):
            found.append(f"{name} is {value}: use a power of two above 0, so that scaling rounds nothing")
    if numerics.min_loss_scale > numerics.initial_loss_scale:
        found.append(
            f"min_loss_scale {numerics.min_loss_scale:g} is above initial_loss_scale {numerics.initial_loss_scale:g}: exchange them"
        )
    changed = [name for name in (*settings, "loss_scale_window", "hysteresis") if getattr(numerics, name) != getattr(defaults, name)]
    if changed and numerics.precision != "fp16":
        found.append(f"{', '.join(changed)} belong to fp16, and precision is {numerics.precision}: leave them out, or add --precision fp16")
    if numerics.loss_scale is not None and len(changed) > 1:
        others = [name for name in changed if name != "loss_scale"]
        found.append(f"loss_scale {numerics.loss_scale:g} is fixed, so {', '.join(others)} would have no effect: leave one side out")
    return found


def _spike_violations(numerics: NumericsConfig) -> list[str]:
    factor, found = numerics.spike_factor, []
    if factor is not None and not 1 < factor < math.inf:
        found.append(f"spike_factor is {factor}: use a number above 1, such as 3")
    if factor is None and numerics.skip_spikes:
        found.append("skip_spikes needs to know what a spike is: add --spike-factor 3, or leave it out")
    if numerics.spike_window < 8:
        found.append(f"spike_window is {numerics.spike_window}: a median of fewer than 8 steps says too little, use 8 or more")
    return found


def _rewind_violations(numerics: NumericsConfig) -> list[str]:
    if numerics.rewind_steps is not None and numerics.on_nonfinite == "stop" and numerics.spike_factor is None:
        return ["rewind_steps has nothing to go back from: add --on-nonfinite skip or --spike-factor 3"]
    return []
