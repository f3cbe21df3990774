"""Writes a checkpoint of weights that another project made: step 0, without optimizer state, for any layout to load.

Tensors are made and written one at a time. The result is a folder like one that --save was given, with config.toml beside the checkpoint.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Mapping
from pathlib import Path

import torch
from torch import Tensor

from megalite.checkpoint import Manifest, has_checkpoints, save_checkpoint
from megalite.checkpoint.lazy import LazyPlanner
from megalite.checkpoint.manifest import write_atomically
from megalite.config import ModelConfig, RunConfig
from megalite.errors import CheckpointError, ConfigError
from megalite.grid import Axis
from megalite.model import GPTStage
from megalite.pipeline.partition import split_layers
from megalite.tensor_parallel.parameter import ParallelContext, logical_name, named_parameter_info

__all__ = ["VOCABULARY", "check_free", "logical_shapes", "mismatches", "whole_tensor", "write_weights"]

VOCABULARY = ("embedding.word.weight", "head.output.weight")
_MOST_SHOWN = 20


def check_free(out: Path) -> None:
    """Raises ConfigError where `out` holds checkpoints already."""
    if out.exists() and (not out.is_dir() or has_checkpoints(out)):
        raise ConfigError(f"{out} exists and is not a folder without checkpoints; give --output another path")


def logical_shapes(model: ModelConfig) -> dict[str, torch.Size]:
    """{logical name: shape} of all weights, the vocabulary padded."""
    context = ParallelContext(tp=Axis.single(), sequence_parallel=False, device="meta")
    stage = GPTStage(model, split_layers(model.num_layers, 1)[0], context, num_stages=1, seed=0)
    infos = named_parameter_info(stage)
    return {logical_name(name, infos[name]): value.shape for name, value in stage.named_parameters()}


def write_weights(out: Path, config: RunConfig, shapes: Mapping[str, torch.Size], make: Callable[[str], Tensor], source: Path) -> Path:
    """make(logical name): a new fp32 tensor of that shape, for each of `shapes`. Returns the checkpoint's path.

    Raises CheckpointError; nothing that looks like a checkpoint is left behind then.
    """
    planned = {f"model.{name}": torch.empty(shape, device="meta") for name, shape in shapes.items()}
    tensors = {name: {"shape": list(value.shape), "dtype": "float32"} for name, value in planned.items()}
    manifest = Manifest(step=0, consumed_samples=0, config=config.to_dict(), tensors=tensors, made_of=[str(source)])
    planner = LazyPlanner(lambda name: make(name.removeprefix("model.")))
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="torch.distributed is disabled", category=UserWarning)  # one process is meant
        path = save_checkpoint(out, planned, manifest, Axis.single("world"), planner=planner)
    write_atomically(out / "config.toml", config.to_toml())
    return path


def whole_tensor(value: Tensor, name: str, shape: torch.Size, source: str) -> Tensor:
    """`value` as fp32 in memory of its own; rows of a vocabulary are filled up with zeros. Raises CheckpointError for another shape."""
    fits = value.shape == shape or (name in VOCABULARY and value.shape[1:] == shape[1:] and value.shape[0] <= shape[0])
    if not fits:
        raise CheckpointError(f"{source} has shape {list(value.shape)}, {list(shape)} is wanted for {name}")
    made = torch.zeros(shape)  # memory of its own: the planner gives it back once it is written
    made[: value.shape[0]] = value
    return made


def mismatches(problems: list[str], settings: str) -> CheckpointError:
    """One error for all `problems` of weights that do not fit `settings`."""
    hidden = len(problems) - _MOST_SHOWN
    listed = "\n  ".join(problems[:_MOST_SHOWN] + ([f"... {hidden} more"] if hidden > 0 else []))
    return CheckpointError(f"the weights do not fit {settings} in {len(problems)} places:\n  {listed}")
