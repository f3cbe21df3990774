"""What `pretrain_gpt.py` does after its settings are known: build, resume, train, say the end."""

from __future__ import annotations

import time
from pathlib import Path

from megalite.checkpoint.manifest import write_atomically
from megalite.config import RunConfig
from megalite.log import get_logger
from megalite.training.checkpoints import load_run
from megalite.training.frozen import load_base
from megalite.training.launch import Launch, library_comm_error
from megalite.training.loop import train
from megalite.training.outputs import check_save_folder
from megalite.training.setup import Run, build_run
from megalite.training.watchdog import watch

__all__ = ["run_training"]


def run_training(config: RunConfig, launch: Launch) -> int:
    """Train to the last step, or until the run is asked to stop. Collective. Returns the exit code (see `stop`).

    Raises MegaliteError subclasses.
    """
    run = build_run(config, launch)
    try:
        load_base(run)
        if run.checkpoint is not None:
            load_run(run, run.checkpoint)
        _prepare_save_folder(run)
        begin, began_at = time.perf_counter(), run.state.step
        with run.stop.signals(), watch(run, launch):
            train(run)
    except Exception as error:
        error.add_note(f"(during {run.grid.progress.doing})")
        failed = library_comm_error(error, run.grid)
        if failed is not None:
            raise failed from error
        raise
    finally:
        if run.stragglers is not None:
            run.stragglers.close()
        run.metrics.close()  # also on failure: TensorBoard holds values back, and a progress bar hides the cursor
    run.train_loader.close()  # only now: after a failure it might wait for a thread that is stuck
    if run.trace is not None:
        run.trace.close()
    if run.state.step == began_at:
        get_logger().info(f"nothing to do: the checkpoint is at step {run.state.step} and train_iters is {config.train.train_iters}")
    else:
        minutes, seconds = divmod(round(time.perf_counter() - begin), 60)
        get_logger().info(f"done: {run.state.step} steps, {run.state.consumed_samples} samples, {minutes} min {seconds} s")
    return run.stop.exit_code


def _prepare_save_folder(run: Run) -> None:
    """The resolved configuration beside the run: `--config SAVE/config.toml` starts it again."""
    if run.grid.world.is_first and run.config.output.save is not None:
        folder = Path(run.config.output.save)
        check_save_folder(folder, run.state.step)
        write_atomically(folder / "config.toml", run.full_config.to_toml())
