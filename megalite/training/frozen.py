"""The frozen weights of a run with adapters: where they come from, and what they are of the whole.

Decisions
- They are read from a checkpoint of any layout and are not written again: a run's own checkpoints hold what it trains. So a run that
  resumes reads both, the base and its newest checkpoint.
- Weights that are kept as integers are read whole, one after another, so that memory is bounded by the largest of them.
- That a base is the same model as the run is checked as for a checkpoint that is resumed.
"""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from megalite import comm
from megalite.checkpoint import find_checkpoint, has_checkpoints, load_tensors, read_manifest
from megalite.checkpoint.changes import model_conflicts
from megalite.checkpoint.reading import TensorReader
from megalite.errors import CheckpointError, ConfigError
from megalite.log import get_logger
from megalite.model.adapters import begin_magnitudes, quantized_layers
from megalite.optim import collect_parameters, local_twins, without_local_copies
from megalite.tensor_parallel.layers import ColumnParallelLinear, RowParallelLinear
from megalite.tensor_parallel.quantized import Int8Weight, quantize_rows, row_scales

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
    folder = Path(lora.lora_base)
    if (folder / "config.json").is_file() and not has_checkpoints(folder):
        raise CheckpointError(
            f"--lora-base {folder} is a Hugging Face folder: convert it first (python tools/convert_checkpoint.py --from hf --to megalite "
            f"--input {folder} --output DIR), and give --lora-base DIR"
        )
    checkpoint = find_checkpoint(folder, run.grid.world, on_damage=run.config.output.on_damaged_checkpoint)
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
    apart = tuple(_fill_integers(run, checkpoint))
    load_tensors(checkpoint, tensors, pp=run.grid.pp, world=run.grid.world, ignore=("optimizer.", *apart), is_checked=True)
    with torch.no_grad():
        for original, copy in local_twins(frozen):
            copy.local.copy_(original.local)
    for stage in run.stages.values():
        begin_magnitudes(stage)
    get_logger().info(f"loaded the frozen weights of {checkpoint}")


def _fill_integers(run: Run, checkpoint: Path) -> list[str]:
    """Fill the layers whose weights are integers, one whole tensor in memory at a time. Returns the names of all such tensors of the model.
    Collective over pp. Raises CheckpointError."""
    names: list[str] = []
    problem: str | None = None
    try:
        reader = TensorReader(checkpoint)
        for stage in run.stages.values():
            for name, layer in quantized_layers(stage).items():
                names.append(f"model.{name}.weight")
                _fill(layer, reader.read(names[-1]))
    except CheckpointError as error:
        problem = str(error)
    gathered = comm.all_gather_object((names, problem), run.grid.world)
    problems = [other for _, other in gathered if other is not None]
    if problems:
        raise CheckpointError(problems[0])
    return sorted({name for others, _ in gathered for name in others})


def _fill(layer: ColumnParallelLinear | RowParallelLinear, whole: Tensor) -> None:
    quantized, dim, tp = layer.quantized, layer.adapter_shape.shard_dim, layer.tp
    assert quantized is not None
    if tuple(whole.shape) != (layer.out_features, layer.in_features):
        raise CheckpointError(f"a weight has shape {list(whole.shape)}, the model's is {[layer.out_features, layer.in_features]}")
    values, scales = quantize_rows(whole, row_scales(whole))
    if dim is not None:
        values = values.chunk(tp.size, dim)[tp.rank]
        scales = scales.chunk(tp.size)[tp.rank] if dim == 0 else scales
    quantized.fill(Int8Weight(values, scales))
