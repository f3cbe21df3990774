"""What `pretrain_gpt.py` does after its settings are known: build, resume, train, say the end."""

from __future__ import annotations

from pathlib import Path

from megalite.checkpoint.manifest import write_atomically
from megalite.config import RunConfig
from megalite.log import get_logger
from megalite.training.checkpoints import load_run
from megalite.training.launch import Launch
from megalite.training.loop import train
from megalite.training.setup import Run, build_run

__all__ = ["run_training"]


def run_training(config: RunConfig, launch: Launch) -> list[float]:
    """Train to the last step. Collective. Returns the losses of the steps made here. Raises MegaliteError subclasses."""
    run = build_run(config, launch)
    _save_config(run)
    if config.output.load is not None:
        load_run(run, Path(config.output.load))
    try:
        losses = train(run)
    except Exception as error:
        error.add_note(f"(during {run.grid.progress.doing})")
        raise
    run.metrics.close()
    run.train_loader.close()
    get_logger().info(f"done: {run.state.step} steps, {run.state.consumed_samples} samples")
    return losses


def _save_config(run: Run) -> None:
    """The resolved configuration beside the run: `--config SAVE/config.toml` starts it again."""
    if run.grid.world.is_first and run.config.output.save is not None:
        folder = Path(run.config.output.save)
        folder.mkdir(parents=True, exist_ok=True)
        write_atomically(folder / "config.toml", run.config.to_toml())
