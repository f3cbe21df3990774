"""The frozen weights of a run with adapters: where they come from, and what they are of the whole.

Decisions
- They are read from a checkpoint of any layout and are not written again: a run's own checkpoints hold what it trains. So a run that
  resumes reads both, the base and its newest checkpoint.
- That a base is the same model as the run is checked as for a checkpoint that is resumed.
"""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

import torch

from megalite.checkpoint import find_checkpoint, load_tensors, read_manifest
from megalite.errors import CheckpointError, ConfigError
from megalite.log import get_logger
from megalite.model.adapters import begin_magnitudes
from megalite.optim import collect_parameters, local_twins, without_local_copies
from megalite.training.changes import model_conflicts

if TYPE_CHECKING:
    from megalite.training.setup import Run

__all__ = ["load_base"]


def load_base(run: Run) -> None:
    """Fill the frozen weights from `lora_base`, if the run has any. Collective.

    Raises CheckpointError where there is no complete checkpoint, or one of another model, ConfigError without a base.
    """
    lora = run.config.lora
    if lora.lora_r is None:
        return
    if lora.lora_base is None:
        raise ConfigError("lora_r without lora_base: the frozen weights would be random; give --lora-base the folder of a checkpoint")
    checkpoint = find_checkpoint(Path(lora.lora_base), run.grid.world, on_damage=run.config.output.on_damaged_checkpoint)
    run.grid.progress.doing = f"loading {checkpoint}"
    manifest = read_manifest(checkpoint)
    if any(name.endswith(".adapter.a") for name in manifest.tensors):
        raise CheckpointError(
            f"{checkpoint} holds adapters, not a whole model: give --lora-base the model that they belong to, and --load these adapters"
        )
    conflicts = model_conflicts(manifest.config, run.config.model)
    if conflicts:
        listed = "\n  ".join(conflicts)
        raise CheckpointError(f"{checkpoint} is another model than the run's; use its settings (--config FOLDER/config.toml):\n  {listed}")
    frozen = collect_parameters(run.stages.values(), trained=False)
    tensors = {f"model.{parameter.name}": parameter.parameter.detach() for parameter in without_local_copies(frozen)}
    load_tensors(checkpoint, tensors, pp=run.grid.pp, world=run.grid.world, ignore=("optimizer.",), is_checked=True)
    with torch.no_grad():
        for original, copy in local_twins(frozen):
            copy.local.copy_(original.local)
    for stage in run.stages.values():
        begin_magnitudes(stage)
    get_logger().info(f"loaded the frozen weights of {checkpoint}")
