"""What of a run goes into a checkpoint, and back: weights, optimizer moments, the state, the configuration.

Nothing else is needed: learning rate, data order and random numbers are functions of the state.
"""

from __future__ import annotations

from pathlib import Path

import torch

from megalite import __version__, comm
from megalite.checkpoint import Manifest, find_checkpoint, load_tensors, read_manifest, save_checkpoint
from megalite.checkpoint.store import describe
from megalite.errors import CheckpointError
from megalite.grid import AXES
from megalite.log import get_logger
from megalite.training.changes import changed_settings, model_conflicts
from megalite.training.setup import Run
from megalite.training.tensors import run_tensors

__all__ = ["load_run", "save_run"]


def save_run(run: Run) -> Path:
    """Save below `output.save`. Collective."""
    assert run.config.output.save is not None
    run.grid.progress.doing = f"saving after step {run.state.step}"
    tensors = run_tensors(run)
    named = {name: describe(tensor) for name, tensor in tensors.items()}
    everything: dict[str, dict] = {}
    for part in comm.all_gather_object(named, run.grid.pp):
        everything.update(part)
    manifest = Manifest(
        step=run.state.step,
        consumed_samples=run.state.consumed_samples,
        config=run.full_config.to_dict(),
        tensors=everything,
        layout=dict(zip(AXES, run.grid.shape.sizes, strict=True)),
        numerics={"skipped_steps": run.state.skipped_steps, "skipped_samples": run.state.skipped_samples, **run.guard.state()},
        versions={"torch": torch.__version__, "megalite": __version__},
    )
    path = save_checkpoint(Path(run.config.output.save), tensors, manifest, run.grid.world)
    get_logger().info(f"saved {path}")
    return path


def load_run(run: Run, path: Path) -> None:
    """Fill a freshly built run from a checkpoint of any layout. Collective. Raises CheckpointError."""
    checkpoint = find_checkpoint(path, run.grid.world)
    run.grid.progress.doing = f"loading {checkpoint}"
    manifest = read_manifest(checkpoint)
    _check_position(run, manifest)
    tensors = run_tensors(run)
    load_tensors(checkpoint, tensors, pp=run.grid.pp, world=run.grid.world)
    conflicts = model_conflicts(manifest.config, run.config.model)
    if conflicts:
        listed = "\n  ".join(conflicts)
        raise CheckpointError(f"{checkpoint} is another model, although its tensors fit; use the checkpoint's settings:\n  {listed}")
    run.state.step, run.state.consumed_samples = manifest.step, manifest.consumed_samples
    numerics = dict(manifest.numerics)
    run.state.skipped_steps, run.state.skipped_samples = numerics.pop("skipped_steps", 0), numerics.pop("skipped_samples", 0)
    run.optimizer.load_step(run.state.updates)
    run.guard.load(numerics)
    run.train_loader.consumed_samples = manifest.consumed_samples
    get_logger().info(f"loaded {checkpoint}: step {manifest.step}, {manifest.consumed_samples} samples consumed")
    changes = changed_settings(manifest.config, run.full_config.to_dict())
    if changes:
        get_logger().info("changed since then: " + ", ".join(changes))


def _check_position(run: Run, manifest: Manifest) -> None:
    """Train on only when the run does not end before the checkpoint."""
    if manifest.step > run.config.train.train_iters:
        raise CheckpointError(
            f"the checkpoint is at step {manifest.step}, the run ends at train_iters {run.config.train.train_iters}; raise --train-iters"
        )
