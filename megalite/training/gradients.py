"""From micro-batches to finished gradients.

Decisions
- A step is one pass of the pipeline. Only where the gradient noise scale is asked for it is two, of half the micro-batches each: the
  gradient of a half then exists as an ordinary, finished gradient in every layout, and no part of the run needs to know. It costs a
  second copy of the gradients, another fill and drain of the pipeline, another round of reductions, and two norms.
- The halves' gradients are added after they are finished, so the step's gradient differs from that of one pass in rounding only.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from megalite import comm
from megalite.data.batch import MicroBatch
from megalite.optim import finalize_grads, grad_norm

if TYPE_CHECKING:
    from megalite.optim import NoiseScale
    from megalite.training.setup import Run

__all__ = ["accumulate_gradients"]


def accumulate_gradients(
    run: Run, microbatches: Sequence[MicroBatch], divisor: Tensor, num_samples: int, scale: float | Tensor = 1.0
) -> Tensor:
    """Forward and backward of this rank's micro-batches of a step of `num_samples`, and all sums that its gradients lack. Collective.

    divisor: of the sum of token losses, the same on all ranks: the tokens of the global batch, divided by `scale`. Returns this rank's
    undivided sum of token losses (0 where it has no last stage), an fp32 scalar.
    """
    if run.noise_scale is None:
        return _one_pass(run, microbatches, divisor)
    half = len(microbatches) // 2
    assert len(microbatches) == 2 * half, "the noise scale compares two equal halves of a step"
    loss_sum = _one_pass(run, microbatches[:half], divisor)
    first, first_norm = _take_grads(run), _norm(run)
    run.optimizer.zero_grad()
    loss_sum = loss_sum + _one_pass(run, microbatches[half:], divisor)
    second_norm = _norm(run)
    torch._foreach_add_(_take_grads(run), first)  # pyright: ignore[reportPrivateImportUsage]
    norms = (first_norm / scale, second_norm / scale, _norm(run) / scale)
    _add(run.noise_scale, run, norms, (microbatches[:half], microbatches[half:]), num_samples)
    return loss_sum


def _one_pass(run: Run, microbatches: Sequence[MicroBatch], divisor: Tensor) -> Tensor:
    loss_sum = run.runtime.train_step(run.train_programs[len(microbatches)], microbatches, divisor)
    finalize_grads(run.parameters, run.grid)
    return loss_sum


def _take_grads(run: Run) -> list[Tensor]:
    return [grad for parameter in run.parameters if (grad := parameter.local_grad) is not None]


def _norm(run: Run) -> Tensor:
    return grad_norm(run.parameters, run.parameter_names, run.grid)


def _add(
    noise_scale: NoiseScale, run: Run, norms: tuple[Tensor, Tensor, Tensor], halves: tuple[Sequence[MicroBatch], ...], num_samples: int
) -> None:
    counts = [torch.stack([microbatch.num_losses for microbatch in half]).sum() for half in halves]
    noise_scale.add(norms, comm.all_reduce(torch.stack(counts), run.grid.dp), num_samples)
