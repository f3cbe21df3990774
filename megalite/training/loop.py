"""The training loop, top to bottom.

One step: micro-batches of this rank -> loss-bearing tokens of the global batch -> pipeline program (forward, backward) -> gradients
finished (sums over tp and over tied copies) -> one norm -> judgement -> clip -> optimizer. There is no second path: one rank runs the same
lines, and so does every precision: outside fp16 the loss scale is 1.

The host never waits for the device inside a step. Whether a step's numbers were right decides the device about its own update; the host
reads it in the next step (`settle`), and before it evaluates, saves or ends.
"""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import nullcontext
from typing import Literal

import torch
from torch import Tensor

from megalite import comm
from megalite.data.batch import MicroBatch
from megalite.data.loader import GlobalBatchLoader
from megalite.errors import NumericsError
from megalite.log import get_logger
from megalite.optim import check_replicas, clip_grads_, grad_squares, lr_at, norm_of
from megalite.training.aftermath import settle
from megalite.training.checkpoints import finish_saving, save_run
from megalite.training.gradients import accumulate_gradients
from megalite.training.metrics import StepRecord
from megalite.training.setup import Run

__all__ = ["evaluate", "train", "train_step"]


def train(run: Run) -> list[float]:
    """Train from the run's state to its last step. Returns the loss of every step made here, the same on every rank."""
    try:
        return _train(run)
    except NumericsError:
        run.metrics.report()  # the step that went wrong is in the log too
        raise


def _train(run: Run) -> list[float]:
    config, state, losses = run.config, run.state, []
    train_iters, save_interval = config.train.train_iters, config.output.save_interval
    while state.step < train_iters:
        if run.rewind is not None and run.rewind.is_due(state.step):
            settle(run)
            run.rewind.keep(run)
        with nullcontext() if run.memory is None else run.memory.around_step(run):
            run.metrics.add(train_step(run))
        is_end, is_stop = state.step == train_iters, run.stop.poll(state.step)
        if is_end or is_stop or any(_is_due(state.step, every) for every in (config.train.eval_interval, save_interval)):
            settle(run)
        if _is_due(state.step, config.numerics.check_replicas_interval):
            _check_replicas(run)
        if is_end or is_stop or state.step % config.train.log_interval == 0:
            losses += run.metrics.report()
            if run.stragglers is not None:
                run.metrics.report_own_seconds(state.step, run.stragglers.report(state.step))
            if run.trace is not None:
                run.trace.flush()
        losses += _evaluate_if_due(run, is_end)
        is_stop = run.stop.reason is not None  # also while evaluating
        if config.output.save is not None and (is_end or is_stop or _is_due(state.step, save_interval)):
            losses += run.metrics.report()
            with run.metrics.pause():
                save_run(run)
        if is_stop and not is_end:
            get_logger().info(f"stopping after step {state.step}: {run.stop.reason}")
            break
    run.stop.finish()
    finish_saving(run)
    if run.memory is not None:
        run.memory.finish(run.grid)
    return losses


def _evaluate_if_due(run: Run, is_end: bool) -> list[float]:
    """Validation every `eval_interval` steps and at the end, test at the end. Returns losses of steps that were not reported yet."""
    losses: list[float] = []
    loaders: dict[Literal["valid", "test"], GlobalBatchLoader | None] = {"valid": run.valid_loader, "test": run.test_loader}
    for name, loader in loaders.items():
        is_due = is_end or (name == "valid" and _is_due(run.state.step, run.config.train.eval_interval))
        if loader is None or not is_due or run.stop.reason is not None:
            continue
        losses += run.metrics.report()
        with run.metrics.pause():
            loss = evaluate(run, loader)
            if run.stop.reason is None:
                run.metrics.report_evaluation(run.state.step, loss, name)
    return losses


def _is_due(step: int, interval: int | None) -> bool:
    return interval is not None and step % interval == 0


def train_step(run: Run) -> StepRecord:
    """One step. Raises NumericsError when the step before it ends the run by its numbers (the weights are still the good ones)."""
    state, config = run.state, run.config
    run.grid.progress.doing = f"step {state.step + 1}"
    num_samples = run.batch_sizes.at(state.consumed_samples)
    microbatches = _to_device(run, run.train_loader.next_step())
    num_tokens = _count_tokens(run, microbatches)
    scale = run.guard.loss_scale.scale
    probes = run.probes if run.probes is not None and run.probes.is_due(state.step + 1) else None
    with nullcontext() if probes is None else probes.passes():
        loss_sum = accumulate_gradients(run, microbatches, num_tokens.clamp(min=1) / scale, num_samples, scale)
    if probes is not None:
        probes.gradients(run.parameters, scale)
    went_back = settle(run)
    squares = grad_squares(run.parameters, run.parameter_names, run.grid)
    norm = norm_of(squares) / scale
    loss = _loss_per_token(run, loss_sum, num_tokens)
    lr = _learning_rate(run)
    skip, found = run.guard.judge(loss, norm, squares)
    if went_back:
        skip, found = torch.ones_like(skip), run.guard.undone(found)
    run.guard.file(found, step=state.step + 1, first_sample=state.consumed_samples, num_samples=num_samples, lr=lr)
    clip_grads_(run.parameters, norm, config.optim.clip_grad, scale if run.guard.loss_scale.is_used else None)
    if run.ranks is not None:
        run.ranks.observe(skip)
    run.optimizer.step(lr, skip)
    run.optimizer.zero_grad()
    if run.ranks is not None and (said := run.ranks.drop(state.updates + 1)) is not None:
        get_logger().info(said)
    if probes is not None:
        probes.finish(state.step + 1, run.parameters)
    state.step += 1
    state.consumed_samples += num_samples
    return StepRecord(
        step=state.step,
        consumed_samples=state.consumed_samples,
        num_samples=num_samples,
        loss=loss,
        grad_norm=norm,
        lr=lr,
        loss_scale=scale if run.guard.loss_scale.is_used else None,
        noise_scale=None if run.noise_scale is None else run.noise_scale.value,
    )


def evaluate(run: Run, loader: GlobalBatchLoader) -> float:
    """Sum of losses over sum of tokens on the loader's first samples: the same ones every time, the same value on every rank.

    Of fewer samples where the run is asked to stop meanwhile.
    """
    total = torch.zeros(2, dtype=torch.float64, device=run.grid.device)
    _set_training(run, False)
    for batch in range(run.config.train.eval_iters):
        run.grid.progress.doing = f"evaluation at step {run.state.step}, batch {batch + 1}"
        microbatches = _to_device(run, loader.batch(batch * run.global_batch_size))
        tokens = torch.stack([microbatch.num_losses for microbatch in microbatches]).sum()
        loss_sum = run.runtime.evaluate(run.eval_program, microbatches)
        total += torch.stack([loss_sum.double(), tokens.double() if run.has_head else torch.zeros_like(total[0])])
        if run.stop.poll():
            break
    _set_training(run, True)
    total = comm.all_reduce(comm.all_reduce(total, run.grid.dp), run.grid.pp)
    return (total[0] / total[1].clamp(min=1)).item()


def _learning_rate(run: Run) -> float:
    """Of the next update: a function of the updates made, or of their samples where the batch size ramps up."""
    config, state, sizes = run.config, run.state, run.batch_sizes
    if sizes.rampup is None:
        return lr_at(config.optim, state.updates, config.train.train_iters, batch_size=sizes.full)
    end = sizes.consumed_before(config.train.train_iters) / sizes.full
    length = sizes.at(state.consumed_samples) / sizes.full
    return lr_at(config.optim, state.useful_samples / sizes.full, end, length, sizes.full)


def _loss_per_token(run: Run, loss_sum: Tensor, num_tokens: Tensor) -> Tensor:
    """Only last pipeline stages hold a sum, the others 0: adding over pp is exact."""
    total = comm.all_reduce(comm.all_reduce(loss_sum, run.grid.dp), run.grid.pp)
    return total / num_tokens.clamp(min=1)


def _check_replicas(run: Run) -> None:
    run.grid.progress.doing = f"comparing replicas after step {run.state.step}"
    found = [line for lines in comm.all_gather_object(check_replicas(run.parameters, run.grid), run.grid.world) for line in lines]
    if found:
        listed = "\n  ".join(sorted(set(found))[:20])
        raise NumericsError(
            f"after step {run.state.step}, ranks that should hold equal weights do not ({len(set(found))} findings):\n  {listed}\nResume "
            "from a checkpoint before it; if it happens again, a device computes wrongly or a gradient is not summed"
        )


def _to_device(run: Run, microbatches: Sequence[MicroBatch]) -> list[MicroBatch]:
    if run.grid.device.type == "cpu":
        return list(microbatches)
    return [microbatch.to(run.grid.device) for microbatch in microbatches]


def _count_tokens(run: Run, microbatches: Sequence[MicroBatch]) -> Tensor:
    """Loss-bearing tokens of the global batch, an fp32 scalar (exact up to 2^24 per step and rank line)."""
    local = torch.stack([microbatch.num_losses for microbatch in microbatches]).sum()
    return comm.all_reduce(local, run.grid.dp)


def _set_training(run: Run, mode: bool) -> None:
    for stage in run.stages.values():
        stage.train(mode)
