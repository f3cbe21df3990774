"""A model for inference, from a checkpoint that any layout wrote: whole on one rank, or this rank's stage of it.

Decisions
- The manifest says what the model is, so a checkpoint is all that is needed; weights are read, optimizer state is not.
- Without a grid no process group is made: one process reads the whole model. Inside a process group the call is
  collective, and every rank gets the whole model.
- With a grid every rank gets its layers (pp) and its part of them (tp). Sequence parallelism is off, because inference
  reads one token at a time.
- The model is built without memory and without initial values: every value comes from the checkpoint, and the loader
  refuses a checkpoint that lacks one.
"""

from __future__ import annotations

import warnings
from pathlib import Path

import torch

from megalite.checkpoint.manifest import read_manifest
from megalite.checkpoint.store import load_tensors, newest_checkpoint
from megalite.config import ModelConfig, RunConfig
from megalite.errors import CheckpointError, ConfigError
from megalite.grid import Axis, Grid
from megalite.model import GPTStage
from megalite.pipeline.partition import split_layers
from megalite.tensor_parallel.parameter import ParallelContext, logical_name, named_parameter_info

__all__ = ["empty_stage", "load_model"]


def load_model(path: Path | str, device: torch.device | str = "cpu", grid: Grid | None = None) -> tuple[GPTStage, RunConfig]:
    """The model in evaluation mode (fp32) and the configuration of the run that saved it.

    path: a checkpoint, or the folder that --save was given, which means its newest checkpoint. grid: whose pp and tp
    the model is cut over; None: both ends in one stage.
    Raises CheckpointError when there is none, or when it does not hold the model that its manifest describes, and
    ConfigError when the model cannot be cut so.
    """
    checkpoint = newest_checkpoint(Path(path))
    config = _stored_config(checkpoint)
    stage = empty_stage(config.model, device, grid, seed=config.train.seed)
    infos = named_parameter_info(stage)
    tensors = {f"model.{logical_name(name, infos[name])}": value.detach() for name, value in stage.named_parameters()}
    pp, world = (Axis.single("pp"), Axis.single("world")) if grid is None else (grid.pp, grid.world)
    with warnings.catch_warnings():
        # one process is what is meant here, so being told so is noise
        warnings.filterwarnings("ignore", message="torch.distributed is disabled", category=UserWarning)
        load_tensors(checkpoint, tensors, pp=pp, world=world, ignore=("optimizer.",))
    return stage.eval(), config


def empty_stage(model: ModelConfig, device: torch.device | str, grid: Grid | None = None, *, seed: int = 0) -> GPTStage:
    """This rank's stage for inference, with memory but without values."""
    tp, pp = (Axis.single(), Axis.single("pp")) if grid is None else (grid.tp, grid.pp)
    ctx = ParallelContext(tp=tp, sequence_parallel=False, device="meta")
    spec = split_layers(model.num_layers, pp.size)[pp.rank]
    return GPTStage(model, spec, ctx, num_stages=pp.size, seed=seed).to_empty(device=device)


def _stored_config(checkpoint: Path) -> RunConfig:
    try:
        return RunConfig.from_dict(read_manifest(checkpoint).config)
    except ConfigError as error:
        raise CheckpointError(f"the manifest of {checkpoint} holds settings this megalite cannot read: {error}") from error
