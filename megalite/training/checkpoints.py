"""What of a run goes into a checkpoint, and back: weights, optimizer moments, the state, the configuration.

Nothing else is needed: learning rate, data order and random numbers are functions of the state.
"""

from __future__ import annotations

from pathlib import Path

import torch

from megalite import __version__, comm
from megalite.checkpoint import Manifest, find_checkpoint, load_tensors, prune, read_manifest, save_checkpoint
from megalite.checkpoint.changes import changed_settings, model_conflicts
from megalite.checkpoint.store import describe
from megalite.errors import CheckpointError
from megalite.grid import AXES
from megalite.log import get_logger
from megalite.training.setup import Run
from megalite.training.tensors import run_tensors

__all__ = ["finish_saving", "load_run", "save_run"]


def save_run(run: Run) -> None:
    """Save below `output.save`, or begin to where saves are made in the background. Collective.

    Raises CheckpointError for a save that failed, this one or the one in the background before it, unless the run is to go on.
    """
    for action in (finish_saving, _save):  # the end of the save before, then this one
        try:
            with run.grid.progress.long_work():
                action(run)
        except CheckpointError as error:
            if run.config.output.on_save_failure == "stop":
                raise
            get_logger().warning(f"{error}; training goes on without this checkpoint (--on-save-failure continue)")


def finish_saving(run: Run) -> None:
    """Wait for a save in the background. Collective. Raises CheckpointError where it failed: nothing comes after it."""
    if run.saver is not None:
        with run.grid.progress.long_work():
            run.saver.wait()


def _save(run: Run) -> None:
    output = run.config.output
    assert output.save is not None
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
    if run.saver is None:
        _saved(run, save_checkpoint(Path(output.save), tensors, manifest, run.grid.world, hash_tensors=output.hash_tensors))
    else:
        run.saver.start(Path(output.save), tensors, manifest, lambda path: _saved(run, path))


def _saved(run: Run, path: Path) -> None:
    """Announce a complete checkpoint, and delete what it has made expendable. In every rank; perhaps beside training."""
    get_logger().info(f"saved {path}")
    output = run.config.output
    if output.keep_last is None or not run.grid.world.is_first:
        return
    try:
        removed = prune(path.parent, output.keep_last, output.keep_every)
    except OSError as error:
        get_logger().warning(f"an older checkpoint cannot be deleted: {error}")
        return
    if removed:
        get_logger().info(f"deleted {', '.join(old.name for old in removed)}")


def load_run(run: Run, path: Path) -> None:
    """Fill a freshly built run from a checkpoint of any layout. Collective. Raises CheckpointError."""
    checkpoint = find_checkpoint(path, run.grid.world, on_damage=run.config.output.on_damaged_checkpoint)
    run.grid.progress.doing = f"loading {checkpoint}"
    manifest = read_manifest(checkpoint)
    if run.config.output.load_weights_only:
        _load_weights(run, checkpoint, manifest)
        return
    _check_position(run, manifest)
    tensors = run_tensors(run)
    load_tensors(checkpoint, tensors, pp=run.grid.pp, world=run.grid.world, is_checked=True)
    _check_model(run, checkpoint, manifest)
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


def _load_weights(run: Run, checkpoint: Path, manifest: Manifest) -> None:
    weights = {name: tensor for name, tensor in run_tensors(run).items() if name.startswith("model.")}
    load_tensors(checkpoint, weights, pp=run.grid.pp, world=run.grid.world, ignore=("optimizer.",), is_checked=True)
    _check_model(run, checkpoint, manifest)
    get_logger().info(f"loaded the weights of {checkpoint}; optimizer, data and step begin anew")


def _check_model(run: Run, checkpoint: Path, manifest: Manifest) -> None:
    conflicts = model_conflicts(manifest.config, run.config.model)
    if conflicts:
        listed = "\n  ".join(conflicts)
        raise CheckpointError(f"{checkpoint} is another model, although its tensors fit; use the checkpoint's settings:\n  {listed}")


def _check_position(run: Run, manifest: Manifest) -> None:
    """Train on only when the run does not end before the checkpoint."""
    if manifest.step > run.config.train.train_iters:
        raise CheckpointError(
            f"the checkpoint is at step {manifest.step}, the run ends at train_iters {run.config.train.train_iters}; raise --train-iters"
        )
