"""A whole model on one rank, from a checkpoint that any layout wrote.

Decisions
- The manifest says what the model is, so a checkpoint is all that is needed; weights are read, optimizer state is not.
- No process group is made: one process reads the whole model. Inside a process group the call is collective, and every
  rank gets the whole model.
- The model is built without memory and without initial values: every value comes from the checkpoint, and the loader
  refuses a checkpoint that lacks one.
"""

from __future__ import annotations

import warnings
from pathlib import Path

import torch

from megalite.checkpoint.manifest import read_manifest
from megalite.checkpoint.store import load_tensors, newest_checkpoint
from megalite.config import RunConfig
from megalite.errors import CheckpointError, ConfigError
from megalite.grid import Axis
from megalite.model import GPTStage
from megalite.pipeline.partition import split_layers
from megalite.tensor_parallel.parameter import ParallelContext, logical_name, named_parameter_info

__all__ = ["load_model"]


def load_model(path: Path | str, device: torch.device | str = "cpu") -> tuple[GPTStage, RunConfig]:
    """The model in evaluation mode (fp32, both ends in one stage) and the configuration of the run that saved it.

    path: a checkpoint, or the folder that --save was given, which means its newest checkpoint.
    Raises CheckpointError when there is none, or when it does not hold the model that its manifest describes.
    """
    checkpoint = newest_checkpoint(Path(path))
    config = _stored_config(checkpoint)
    ctx = ParallelContext(tp=Axis.single(), sequence_parallel=False, device="meta")
    spec = split_layers(config.model.num_layers, 1)[0]
    stage = GPTStage(config.model, spec, ctx, num_stages=1, seed=config.train.seed).to_empty(device=device)
    infos = named_parameter_info(stage)
    tensors = {f"model.{logical_name(name, infos[name])}": value.detach() for name, value in stage.named_parameters()}
    with warnings.catch_warnings():
        # one process is what is meant here, so being told so is noise
        warnings.filterwarnings("ignore", message="torch.distributed is disabled", category=UserWarning)
        load_tensors(checkpoint, tensors, pp=Axis.single("pp"), world=Axis.single("world"), ignore=("optimizer.",))
    return stage.eval(), config


def _stored_config(checkpoint: Path) -> RunConfig:
    try:
        return RunConfig.from_dict(read_manifest(checkpoint).config)
    except ConfigError as error:
        raise CheckpointError(f"the manifest of {checkpoint} holds settings this megalite cannot read: {error}") from error
