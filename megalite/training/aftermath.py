"""What follows a step's verdict: counting, a log line, an autopsy, going back, or the end of the run.

The verdict of a step is read during the next one (`verdict`), before that step's update. All ranks read the same verdict, so all of them
do the same here.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from megalite.errors import NumericsError
from megalite.log import get_logger
from megalite.training.autopsy import write_autopsy
from megalite.training.verdict import Verdict

if TYPE_CHECKING:
    from megalite.training.setup import Run

__all__ = ["settle"]

MOST_AUTOPSIES = 10


def settle(run: Run) -> bool:
    """Read the verdict that is on its way, if any, and act on it. Collective where something went wrong.

    Returns whether the state went back to a copy: gradients that exist belong to weights that are gone. Raises NumericsError where the run
    must end; the weights are then those before the step, unless it was a spike whose update was made.
    """
    verdict = run.guard.read()
    if verdict is None:
        return False
    state = run.state
    if verdict.was_skipped:
        run.optimizer.undo_step_count()
        state.skipped_steps += 1
        state.skipped_samples += verdict.num_samples
    if not (verdict.is_nonfinite or verdict.is_overflow or verdict.is_spike):
        run.skipped_in_a_row = 0
        return False
    if verdict.is_overflow:
        return _overflow(run, verdict)
    path = write_autopsy(run, verdict) if run.num_autopsies < MOST_AUTOPSIES else None
    run.num_autopsies += 1
    where = "" if path is None else f"; see {path}"
    if verdict.is_nonfinite and run.config.numerics.on_nonfinite == "stop":
        raise NumericsError(_nonfinite_message(run, verdict) + where)
    get_logger().warning(_warning(verdict) + where)
    if run.rewind is not None:
        step = run.rewind.restore(run)
        get_logger().warning(f"going back to the state after step {step}, on with sample {state.consumed_samples}")
        return True
    if verdict.was_skipped:
        _count_in_a_row(run, verdict)
    return False


def _overflow(run: Run, verdict: Verdict) -> bool:
    scale = verdict.loss_scale
    if verdict.is_hopeless:
        dynamic = run.guard.loss_scale.is_dynamic
        kind = f"the smallest loss scale, {scale:g}" if dynamic else f"the fixed loss scale {scale:g}"
        remedy = "use --precision bf16, a lower lr or a longer warm-up" + ("" if dynamic else ", or a smaller or dynamic loss scale")
        raise NumericsError(
            f"fp16 gradients overflow at step {verdict.step} with {kind} (loss {verdict.loss:g}, lr {verdict.lr:.3e}); the weights were "
            f"not updated and not saved. {remedy[0].upper()}{remedy[1:]}"
        )
    get_logger().info(f"step {verdict.step}: fp16 gradients overflow at loss scale {scale:g}, no update")
    return False


def _count_in_a_row(run: Run, verdict: Verdict) -> None:
    run.skipped_in_a_row += 1
    most = run.config.numerics.max_skipped_steps
    if run.skipped_in_a_row > most:
        raise NumericsError(
            f"{run.skipped_in_a_row} steps in a row went without an update, up to step {verdict.step}; max_skipped_steps is {most}. Resume "
            "from an earlier checkpoint with a lower lr, or look at the autopsies in the --save folder"
        )


def _warning(verdict: Verdict) -> str:
    what = "not finite" if verdict.is_nonfinite else "a spike"
    medians = "" if verdict.is_nonfinite else f" (medians {verdict.median_loss:.4f} and {verdict.median_grad_norm:.3f})"
    update = "no update" if verdict.was_skipped else "the update was made"
    return f"step {verdict.step} is {what}: loss {verdict.loss:.4f}, gradient norm {verdict.grad_norm:.3f}{medians}; {update}"


def _nonfinite_message(run: Run, verdict: Verdict) -> str:
    last = verdict.first_sample + verdict.num_samples - 1
    return (
        f"the loss is {verdict.loss:g} and the gradient norm is {verdict.grad_norm:g} at step {verdict.step} "
        f"(lr {verdict.lr:.3e}, clip_grad {run.config.optim.clip_grad:g}); the weights were not updated and not saved. "
        "Resume from the last checkpoint with a lower lr or a longer warm-up, with --on-nonfinite skip, or look at the data "
        f"of samples {verdict.first_sample} to {last}"
    )
