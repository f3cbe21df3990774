"""AdamW over local tensors, with its state as named logical tensors.

Decisions
- AdamW is elementwise, so each rank updates its own part and no DTensor dispatch is paid for. The one kernel for all
  (`fused`) is used where the device has it.
- Weight decay goes by role, settled before any wrapping: weights that multiply (linear, head) and tables (embedding,
  position) decay, norms and biases do not. Shapes are not asked: a slice may have any.
- State exists from the start, as zeros, so that a checkpoint has the same tensors at step 0 as later. It is fp32 like
  the master weights.
- All parameters take every step together; a missing gradient is a mistake of ours.
- The caller decides about gradients that are not finite; `step` does not look at them.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor

from megalite.config import OptimConfig
from megalite.optim.parameters import OptimParameter, local_twins, without_local_copies

__all__ = ["Optimizer"]

DECAYED = frozenset({"linear", "head", "embedding", "position"})
MOMENTS = ("exp_avg", "exp_avg_sq")
FUSED_DEVICES = frozenset({"cpu", "cuda"})


class Optimizer:
    """Updates `parameters` (of `collect_parameters`) in place."""

    def __init__(self, parameters: Sequence[OptimParameter], config: OptimConfig) -> None:
        self.num_steps = 0
        self._parameters = list(parameters)
        self._locals = [parameter.local for parameter in self._parameters]
        self._moments = [{key: torch.zeros_like(local) for key in MOMENTS} for local in self._locals]
        self._counters: list[Tensor] = []
        self._adamw = self._build(config)

    def _build(self, config: OptimConfig) -> torch.optim.AdamW | None:
        """None where this rank has nothing to update: empty slices are left out."""
        groups: dict[float, list[Tensor]] = {config.weight_decay: [], 0.0: []}
        for parameter, local in zip(self._parameters, self._locals, strict=True):
            if local.numel() > 0:
                groups[config.weight_decay if parameter.info.role in DECAYED else 0.0].append(local)
        settings: list[dict[str, Any]] = [{"params": tensors, "weight_decay": decay} for decay, tensors in groups.items() if tensors]
        if not settings:
            return None
        fused = all(local.device.type in FUSED_DEVICES for local in self._locals)
        adamw = torch.optim.AdamW(
            settings,
            lr=0.0,
            betas=(config.adam_beta1, config.adam_beta2),
            eps=config.adam_eps,
            fused=fused or None,
            foreach=None if fused else True,
        )
        for local, moments in zip(self._locals, self._moments, strict=True):
            if local.numel() > 0:
                counter = torch.zeros((), dtype=torch.float32, device=local.device if fused else "cpu")
                self._counters.append(counter)
                adamw.state[local] = {"step": counter, **moments}
        return adamw

    @property
    def group_counts(self) -> dict[str, tuple[int, int]]:
        """{"decay" or "no_decay": (logical parameters, their elements)} of this rank's stages.

        Padding of the vocabulary and copies do not count: the sums over pp are the model's.
        """
        counts = {"decay": (0, 0), "no_decay": (0, 0)}
        for parameter in self._parameters:
            if not parameter.is_copy:
                group = "decay" if parameter.info.role in DECAYED else "no_decay"
                number, elements = counts[group]
                counts[group] = (number + 1, elements + parameter.num_elements)
        return counts

    def step(self, lr: float) -> None:
        """One update from the gradients as they are."""
        for parameter, local in zip(self._parameters, self._locals, strict=True):
            grad = parameter.local_grad
            assert grad is not None, f"{parameter.name} has no gradient"
            local.grad = grad
        if self._adamw is not None:
            for group in self._adamw.param_groups:
                group["lr"] = lr
            self._adamw.step()
        self.num_steps += 1
        for local in self._locals:
            local.grad = None

    def zero_grad(self) -> None:
        """Release all gradients."""
        for parameter in self._parameters:
            parameter.parameter.grad = None

    def named_state(self) -> dict[str, dict[str, Tensor]]:
        """{logical name: {"exp_avg": ..., "exp_avg_sq": ...}}, placed like the parameters.

        The tensors share storage with the optimizer. Filling these tensors in place, then `load_step`, restores a
        state.
        """
        saved = set(without_local_copies(self._parameters))
        return {
            parameter.name: {key: _placed_like(parameter, moment) for key, moment in moments.items()}
            for parameter, moments in zip(self._parameters, self._moments, strict=True)
            if parameter in saved
        }

    def load_step(self, num_steps: int) -> None:
        """The end of a restoration: set the number of updates made so far, which AdamW's bias correction depends on, and
        give local copies of tied parameters the values and the state of their originals."""
        self.num_steps = num_steps
        moments = dict(zip(self._parameters, self._moments, strict=True))
        for original, copy in local_twins(self._parameters):
            copy.local.copy_(original.local)
            for key, moment in moments[copy].items():
                moment.copy_(moments[original][key])
        for counter in self._counters:
            counter.fill_(num_steps)


def _placed_like(parameter: OptimParameter, local: Tensor) -> Tensor:
    model = parameter.parameter
    if not isinstance(model, DTensor):
        return local
    return DTensor.from_local(local, model.device_mesh, model.placements, run_check=False, shape=model.shape, stride=model.stride())
