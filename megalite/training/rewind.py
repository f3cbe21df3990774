"""A copy of the run's state in host memory, to go back to when a step went wrong.

Decisions
- A copy is made every `rewind_steps` steps, after that step's verdict: it is never one of a state that went wrong.
- Weights, optimizer state and the guard's statistics go back. The data do not: training goes on behind the batch that did harm. Steps are
  counted on, and the updates that were undone count as skipped, so the learning rate goes back too and the run ends where it would have.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor

from megalite.training.tensors import run_tensors

if TYPE_CHECKING:
    from megalite.training.setup import Run

__all__ = ["Rewind"]


class Rewind:
    """Keeps the newest copy."""

    def __init__(self, every: int) -> None:
        self._every = every
        self._tensors: dict[str, Tensor] = {}
        self._guard: dict[str, Any] = {}
        self._updates = self._useful_samples = self._step = -1

    def is_due(self, step: int) -> bool:
        return self._step < 0 or step % self._every == 0

    @torch.no_grad()
    def keep(self, run: Run) -> None:
        """Copy the state as it is; waits for the device."""
        self._tensors = {name: _local(tensor).to("cpu", copy=True) for name, tensor in run_tensors(run).items()}
        self._guard = run.guard.state()
        self._step, self._updates, self._useful_samples = run.state.step, run.state.updates, run.state.useful_samples

    @torch.no_grad()
    def restore(self, run: Run) -> int:
        """Put the copy back; returns the step after which it was made."""
        assert self._step >= 0, "no copy was made"
        for name, tensor in run_tensors(run).items():
            _local(tensor).copy_(self._tensors[name])
        run.optimizer.load_step(self._updates)
        run.guard.load(self._guard)
        run.state.skipped_steps = run.state.step - self._updates
        run.state.skipped_samples = run.state.consumed_samples - self._useful_samples
        return self._step


def _local(tensor: Tensor) -> Tensor:
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor
