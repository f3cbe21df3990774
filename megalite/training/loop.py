"""The training loop, top to bottom.

One step: micro-batches of this rank -> loss-bearing tokens of the global batch -> pipeline program (forward, backward) -> gradients
finished (sums over tp and over tied copies) -> one norm -> clip -> optimizer. There is no second path: one rank runs the same lines.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
from torch import Tensor

from megalite import comm
from megalite.data.batch import MicroBatch
from megalite.data.loader import GlobalBatchLoader
from megalite.errors import MegaliteError
from megalite.optim import clip_grads_, grad_norm, lr_at
from megalite.training.checkpoints import save_run
from megalite.training.gradients import accumulate_gradients
from megalite.training.metrics import StepRecord
from megalite.training.setup import Run

__all__ = ["evaluate", "train", "train_step"]


def train(run: Run) -> list[float]:
    """Train from the run's state to its last step. Returns the loss of every step made here, the same on every rank."""
    config, state, losses = run.config, run.state, []
    train_iters, save_interval = config.train.train_iters, config.output.save_interval
    while state.step < train_iters:
        run.metrics.add(train_step(run))
        is_end = state.step == train_iters
        if is_end or state.step % config.train.log_interval == 0:
            losses += run.metrics.report()
            if run.trace is not None:
                run.trace.flush()
        if run.valid_loader is not None and (is_end or _is_due(state.step, config.train.eval_interval)):
            losses += run.metrics.report()
            with run.metrics.pause():
                run.metrics.report_evaluation(state.step, evaluate(run, run.valid_loader))
        if run.test_loader is not None and is_end:
            losses += run.metrics.report()
            with run.metrics.pause():
                run.metrics.report_evaluation(state.step, evaluate(run, run.test_loader), "test")
        if config.output.save is not None and (is_end or _is_due(state.step, save_interval)):
            losses += run.metrics.report()
            with run.metrics.pause():
                save_run(run)
    return losses


def _is_due(step: int, interval: int | None) -> bool:
    return interval is not None and step % interval == 0


def train_step(run: Run) -> StepRecord:
    """One optimizer update. Raises MegaliteError when the gradient norm is not finite (the weights are still the good ones)."""
    state, config = run.state, run.config
    run.grid.progress.doing = f"step {state.step + 1}"
    num_samples = run.batch_sizes.at(state.consumed_samples)
    microbatches = _to_device(run, run.train_loader.next_step())
    num_tokens = _count_tokens(run, microbatches)
    loss_sum = accumulate_gradients(run, microbatches, num_tokens.clamp(min=1), num_samples)
    norm = grad_norm(run.parameters, run.parameter_names, run.grid)
    norm_value = norm.item()
    if not math.isfinite(norm_value):
        raise MegaliteError(_nonfinite_message(run, norm_value))
    clip_grads_(run.parameters, norm, config.optim.clip_grad)
    lr = _learning_rate(run)
    run.optimizer.step(lr)
    run.optimizer.zero_grad()
    state.step += 1
    state.consumed_samples += num_samples
    return StepRecord(
        step=state.step,
        consumed_samples=state.consumed_samples,
        num_samples=num_samples,
        loss_sum=loss_sum,
        num_tokens=num_tokens,
        grad_norm=norm_value,
        lr=lr,
        noise_scale=None if run.noise_scale is None else run.noise_scale.value,
    )


def evaluate(run: Run, loader: GlobalBatchLoader) -> float:
    """Sum of losses over sum of tokens on the loader's first samples: the same ones every time, the same value on every rank."""
    total = torch.zeros(2, dtype=torch.float64, device=run.grid.device)
    _set_training(run, False)
    for batch in range(run.config.train.eval_iters):
        run.grid.progress.doing = f"evaluation at step {run.state.step}, batch {batch + 1}"
        microbatches = _to_device(run, loader.batch(batch * run.global_batch_size))
        tokens = torch.stack([microbatch.loss_mask.sum() for microbatch in microbatches]).sum()
        loss_sum = run.runtime.evaluate(run.eval_program, microbatches)
        total += torch.stack([loss_sum.double(), tokens.double() if run.has_head else torch.zeros_like(total[0])])
    _set_training(run, True)
    total = comm.all_reduce(comm.all_reduce(total, run.grid.dp), run.grid.pp)
    return (total[0] / total[1].clamp(min=1)).item()


def _learning_rate(run: Run) -> float:
    """Of the next step: a function of the step, or of the samples where the batch size ramps up."""
    config, state, sizes = run.config, run.state, run.batch_sizes
    if sizes.rampup is None:
        return lr_at(config.optim, state.step, config.train.train_iters, batch_size=sizes.full)
    end = sizes.consumed_before(config.train.train_iters) / sizes.full
    length = sizes.at(state.consumed_samples) / sizes.full
    return lr_at(config.optim, state.consumed_samples / sizes.full, end, length, sizes.full)


def _to_device(run: Run, microbatches: Sequence[MicroBatch]) -> list[MicroBatch]:
    if run.grid.device.type == "cpu":
        return list(microbatches)
    return [microbatch.to(run.grid.device) for microbatch in microbatches]


def _count_tokens(run: Run, microbatches: Sequence[MicroBatch]) -> Tensor:
    """Loss-bearing tokens of the global batch, an fp32 scalar (exact up to 2^24 per step and rank line)."""
    local = torch.stack([microbatch.loss_mask.sum() for microbatch in microbatches]).sum()
    return comm.all_reduce(local, run.grid.dp)


def _set_training(run: Run, mode: bool) -> None:
    for stage in run.stages.values():
        stage.train(mode)


def _nonfinite_message(run: Run, norm: float) -> str:
    first = run.state.consumed_samples
    return (
        f"the gradient norm is {norm} at step {run.state.step + 1} (lr {_learning_rate(run):.3e}, "
        f"clip_grad {run.config.optim.clip_grad:g}); the weights were not updated and not "
        "saved. Resume from the last checkpoint with a lower lr or a longer warm-up, or look at the data of "
        f"samples {first} to {first + run.batch_sizes.at(first) - 1}"
    )
