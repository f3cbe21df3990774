"""Judges every step's loss and gradient norm, in every precision, without waiting for the device.

Decisions
- The judgement is a tensor. The optimizer takes its `skip` as it is, so an update with numbers that went wrong never happens; the host
  reads the rest one step later, when the device has long finished with it. On a CPU nothing is gained by that, but it is the same path.
- Loss and norm are the same on all ranks when they come here, so is every decision that follows.
- A step is a spike when its loss or norm is above `spike_factor` times the median of the last `spike_window` finite values, once there
  are 8. Spikes enter the window: a level that stays becomes the median.
- In fp16 a norm that is not finite beside a finite loss is an overflow, which the loss scale cures: no policy is asked.
"""

from __future__ import annotations

from dataclasses import dataclass, fields
from typing import Any

import torch
from torch import Tensor

from megalite.config import NumericsConfig
from megalite.optim import LossScale

__all__ = ["Guard", "Verdict"]

FEWEST_VALUES = 8


@dataclass(frozen=True, kw_only=True)
class Verdict:
    """What the host knows of a step, once it does.

    step counts from 1; the step used `num_samples` samples from `first_sample` on. squares: of the gradient norm of every logical
    parameter, not unscaled, on the device. is_overflow: of fp16; it is hopeless at the smallest scale.
    """

    step: int
    first_sample: int
    num_samples: int
    lr: float
    squares: Tensor
    loss: float
    grad_norm: float
    loss_scale: float
    median_loss: float
    median_grad_norm: float
    is_nonfinite: bool
    is_overflow: bool
    is_hopeless: bool
    is_spike: bool
    was_skipped: bool


_ON_DEVICE = [field.name for field in fields(Verdict) if field.name not in ("step", "first_sample", "num_samples", "lr", "squares")]


@dataclass(frozen=True)
class _Pending:
    """Numbers of a step on their way to the host."""

    values: Tensor
    event: Any
    facts: dict[str, Any]


class Guard:
    """loss_scale moves with the verdicts: the guard tells it."""

    def __init__(self, config: NumericsConfig, loss_scale: LossScale, device: torch.device) -> None:
        self._config, self.loss_scale = config, loss_scale
        self._window = torch.full((2, config.spike_window), float("nan"), dtype=torch.float32, device=device)
        self._pending: _Pending | None = None

    def judge(self, loss: Tensor, norm: Tensor, squares: Tensor) -> tuple[Tensor, dict[str, Tensor]]:
        """loss: of the step, per token; norm: of its gradient, unscaled; fp32 scalars. Returns `skip` for the optimizer, and what `file`
        is to be given."""
        config, scale = self._config, self.loss_scale
        numbers = torch.stack([loss.float(), norm.float()])
        finite = torch.isfinite(numbers)
        medians = self._window.nanmedian(dim=1).values
        is_spike = torch.zeros_like(finite[0])
        if config.spike_factor is not None:
            enough = (~self._window[0].isnan()).sum() >= FEWEST_VALUES
            is_spike = enough & finite.all() & (numbers > config.spike_factor * medians).any()
            moved = torch.cat([self._window[:, 1:], numbers[:, None]], dim=1)
            self._window = torch.where(finite.all(), moved, self._window)
        is_overflow = finite[0] & ~finite[1] & scale.is_used
        skip = ~finite.all() | (is_spike & config.skip_spikes)
        found = {
            "loss": loss,
            "grad_norm": norm,
            "loss_scale": scale.scale,
            "median_loss": medians[0],
            "median_grad_norm": medians[1],
            "is_nonfinite": ~finite.all() & ~is_overflow,
            "is_overflow": is_overflow,
            "is_hopeless": is_overflow & scale.is_at_minimum,
            "is_spike": is_spike,
            "was_skipped": skip,
            "squares": squares,
        }
        scale.update(is_overflow)
        return skip.float(), found

    def file(self, found: dict[str, Tensor], **facts: Any) -> None:
        """Send the judgement to the host; facts: the other fields of the verdict. One can be on its way."""
        assert self._pending is None, "the verdict of the step before has not been read"
        values = torch.stack([found[name].double() for name in _ON_DEVICE])
        event = None
        if values.device.type == "cuda":
            host = torch.empty(values.shape, dtype=values.dtype, pin_memory=True)
            values = host.copy_(values, non_blocking=True)
            event = torch.cuda.Event()
            event.record()
        self._pending = _Pending(values, event, {"squares": found["squares"], **facts})

    def read(self) -> Verdict | None:
        """The verdict that is on its way; None where none is."""
        pending, self._pending = self._pending, None
        if pending is None:
            return None
        if pending.event is not None:
            pending.event.synchronize()
        values = dict(zip(_ON_DEVICE, pending.values.tolist(), strict=True))
        values |= {name: bool(value) for name, value in values.items() if name.startswith(("is_", "was_"))}
        return Verdict(**values, **pending.facts)

    @staticmethod
    def undone(found: dict[str, Tensor]) -> dict[str, Tensor]:
        """The judgement of a step whose gradient belongs to weights that are gone: it was skipped, and nothing else is said of it."""
        nothing = {name: torch.zeros_like(value) for name, value in found.items() if name.startswith("is_")}
        return found | nothing | {"was_skipped": torch.ones_like(found["was_skipped"])}

    def state(self) -> dict[str, Any]:
        """What a checkpoint keeps; waits for the device."""
        losses, norms = ([value for value in row if value == value] for row in self._window.tolist())
        return {**self.loss_scale.state(), "losses": losses, "grad_norms": norms}

    def load(self, state: dict[str, Any]) -> None:
        """Go on from `state`; of a window of another size the newest values are kept."""
        self.loss_scale.load({name: value for name, value in state.items() if name not in ("losses", "grad_norms")})
        for row, values in zip(self._window, (state.get("losses", []), state.get("grad_norms", [])), strict=True):
            row.fill_(float("nan"))
            kept = values[-len(row) :]
            if kept:
                row[-len(kept) :] = torch.tensor(kept, dtype=torch.float32, device=row.device)
