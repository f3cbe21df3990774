"""Saves a model in many layouts, loads each checkpoint in every layout, and trains on: "any layout loads any checkpoint" as a table.

Decisions
- Equality after loading is that of the content hashes of all tensors, weights and moments, over the whole world, with those in the
  manifest. The target is filled with NaN before, so that what is not loaded cannot be equal.
- The saving run trains on from its checkpoint without a stop; the loading runs are compared with its losses: bit for bit in the same
  layout, within the relative tolerance of the parity tool in another.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from pathlib import Path

from megalite.checkpoint import read_manifest, step_directory
from megalite.checkpoint.hashes import content_hashes
from megalite.config import RunConfig
from megalite.testing.layouts import Layout
from megalite.testing.parity import Tolerance, build_in_this_world, tiny_config
from megalite.training.checkpoints import load_run
from megalite.training.loop import train
from megalite.training.tensors import run_tensors

__all__ = [
    "LAYOUTS",
    "SAVED_AT",
    "STEPS",
    "Loaded",
    "largest_relative",
    "load_and_train_on",
    "problems",
    "reshard_config",
    "train_and_save",
]

SAVED_AT, STEPS = 1, 6
LAYOUTS = (
    Layout(),
    Layout(tp=2, sequence_parallel=True),
    Layout(pp=2),
    Layout(dp=2, zero=3),
    Layout(tp=2, pp=2, dp=2, zero=2, sequence_parallel=True),
    Layout(pp=4, schedule="interleaved-1f1b"),
    Layout(dp=4, zero=1),
    Layout(dp=3),
)
"""Every axis, every way of cutting a parameter, and a number of ranks that divides nothing."""


@dataclass(frozen=True, kw_only=True)
class Loaded:
    """What one layout made of one checkpoint. unequal: names of tensors; losses: of the steps after it, empty where none were made."""

    unequal: list[str]
    losses: list[float]


def reshard_config() -> RunConfig:
    """Three layers of few tensors (some of 8 stages have none), 12 samples a step (for dp 2, 3 and 4), a learning rate that moves."""
    config = tiny_config()
    return replace(
        config,
        model=replace(config.model, num_layers=3, activation="gelu"),
        data=replace(config.data, num_workers=0),
        optim=replace(config.optim, lr_decay_style="cosine", lr_warmup_iters=2, lr_decay_iters=STEPS),
        train=replace(config.train, global_batch_size=12, train_iters=STEPS, log_interval=STEPS),
    )


def _laid_out(config: RunConfig, layout: Layout) -> RunConfig:
    """With as few micro-batches as the schedule needs: their size is part of the layout, and small ones are slow."""
    number = layout.pp if layout.pp > 2 else 2 if layout.pp == 2 else 1
    size = config.global_batch(1) // (layout.dp * number)
    config = layout.apply(replace(config, train=replace(config.train, micro_batch_size=size)))
    num_stages = layout.pp * layout.num_chunks
    if num_stages > config.model.num_layers:
        counts = tuple(int(stage % 2 == 1 and stage < 2 * config.model.num_layers) for stage in range(num_stages))
        config = replace(config, parallel=replace(config.parallel, pipeline_layer_split=counts))
    return config.resolve()


def train_and_save(config: RunConfig, layout: Layout, folder: Path) -> list[float]:
    """Train to the last step with a checkpoint at step SAVED_AT, below `folder`; the losses after it. In every rank."""
    run = build_in_this_world(_laid_out(config, layout))
    whole = run.config
    run.config = replace(whole, train=replace(whole.train, train_iters=SAVED_AT), output=replace(whole.output, save=str(folder)))
    train(run)
    run.config = whole
    losses = train(run)
    run.metrics.close()
    return losses


def load_and_train_on(config: RunConfig, layout: Layout, folders: dict[Path, bool]) -> list[Loaded]:
    """What this layout makes of every checkpoint of `train_and_save`, in order. True: train on. In every rank."""
    run = build_in_this_world(_laid_out(config, layout))
    found = []
    for folder, is_trained_on in folders.items():
        checkpoint = step_directory(folder, SAVED_AT)
        for tensor in run_tensors(run).values():
            tensor.fill_(math.nan)
        load_run(run, checkpoint)
        hashes = content_hashes(run_tensors(run), run.grid.world)
        tables = read_manifest(checkpoint).tensors
        unequal = sorted(name for name in hashes.keys() | tables.keys() if hashes.get(name, "") != tables.get(name, {}).get("hash"))
        found.append(Loaded(unequal=unequal, losses=train(run) if is_trained_on else []))
    run.metrics.close()
    return found


def problems(saved: Layout, loaded: Layout, result: Loaded, straight: list[float]) -> list[str]:
    """Why `result`, of a checkpoint that `saved` wrote, is not what it should be; straight: losses of the run that never stopped."""
    found = [f"{len(result.unequal)} tensors differ after loading: {', '.join(result.unequal[:3])}"] if result.unequal else []
    if not result.losses:
        return found
    if saved == loaded:
        return found + ([] if result.losses == straight else ["losses in the same layout are not equal bit for bit"])
    largest = largest_relative(result.losses, straight)
    tolerance = Tolerance().loss
    return found + ([] if largest <= tolerance else [f"losses differ by {largest:.1e} (relative), {tolerance:.0e} is accepted"])


def largest_relative(losses: list[float], straight: list[float]) -> float:
    """The largest relative difference of losses of the same steps; infinite where one is not finite."""
    assert len(losses) == len(straight), "the runs made different numbers of steps"
    apart = [abs(a - b) / abs(b) for a, b in zip(losses, straight, strict=True)]
    return max(value if math.isfinite(value) else math.inf for value in apart)
