"""From a Hugging Face folder to a checkpoint that any layout loads.

Decisions
- Tensors are read, reshaped and written one at a time: memory is that of a few of the largest.
- Every tensor of the folder must be used and every one of ours found; what is missing and what is left over is listed together.
- A head is tied where the configuration says so. A folder that says so and ships another head is refused.
- The result is a folder like one that --save was given: step 0, config.toml with the model's settings, and in `hf/` what goes with the
  weights (configuration, tokenizer, generation settings), which an export takes along again.
"""

from __future__ import annotations

import shutil
import warnings
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from megalite.checkpoint import Manifest, has_checkpoints, save_checkpoint
from megalite.checkpoint.lazy import LazyPlanner
from megalite.checkpoint.manifest import write_atomically
from megalite.config import DataConfig, ModelConfig, RunConfig
from megalite.convert.hf_config import model_from_hf, read_hf_config
from megalite.convert.hf_files import HFReader
from megalite.convert.hf_names import is_leftover, source_of
from megalite.errors import CheckpointError, ConfigError
from megalite.grid import Axis
from megalite.model import GPTStage
from megalite.pipeline.partition import split_layers
from megalite.tensor_parallel.parameter import ParallelContext, logical_name, named_parameter_info

__all__ = ["COMPANIONS", "import_hf", "logical_shapes"]

COMPANIONS = (
    *("config.json", "generation_config.json", "tokenizer.json", "tokenizer.model", "tokenizer_config.json", "special_tokens_map.json"),
    *("added_tokens.json", "vocab.json", "merges.txt", "chat_template.jinja"),
)
_MOST_SHOWN = 20
_LONGEST = 4096  # tokens of a training sequence, unless the model's positions end earlier


def import_hf(folder: Path, out: Path) -> Path:
    """Write a checkpoint of the model in `folder` below `out`, and return its path.

    Raises ConfigError for a model that is not known here or an `out` in use, CheckpointError for weights that do not fit.
    """
    raw = read_hf_config(folder)
    model = model_from_hf(raw)
    family = raw["model_type"]
    if out.exists() and (not out.is_dir() or has_checkpoints(out)):
        raise ConfigError(f"{out} exists and is not a folder without checkpoints; give --output another path")
    shapes = logical_shapes(model)
    with HFReader(folder) as reader:
        _check_names(reader, shapes, family, model)
        planned = {f"model.{name}": torch.empty(shape, device="meta") for name, shape in shapes.items()}
        config = _run_config(model, out, folder)
        tensors = {name: {"shape": list(value.shape), "dtype": "float32"} for name, value in planned.items()}
        manifest = Manifest(step=0, consumed_samples=0, config=config.to_dict(), tensors=tensors, made_of=[str(folder)])
        planner = LazyPlanner(lambda name: _make(reader, name.removeprefix("model."), family, shapes))
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", message="torch.distributed is disabled", category=UserWarning)  # one process is meant
            path = save_checkpoint(out, planned, manifest, Axis.single("world"), planner=planner)
    (out / "hf").mkdir(exist_ok=True)
    for name in COMPANIONS:
        if (folder / name).is_file():
            shutil.copyfile(folder / name, out / "hf" / name)
    write_atomically(out / "config.toml", config.to_toml())
    return path


def logical_shapes(model: ModelConfig) -> dict[str, torch.Size]:
    """{logical name: shape} of all weights, the vocabulary padded."""
    context = ParallelContext(tp=Axis.single(), sequence_parallel=False, device="meta")
    stage = GPTStage(model, split_layers(model.num_layers, 1)[0], context, num_stages=1, seed=0)
    infos = named_parameter_info(stage)
    return {logical_name(name, infos[name]): value.shape for name, value in stage.named_parameters()}


def _run_config(model: ModelConfig, out: Path, folder: Path) -> RunConfig:
    has_tokenizer = (folder / "tokenizer.json").is_file()
    tokenizer: dict[str, Any] = {"tokenizer_type": "hf", "tokenizer_model": str((out / "hf").resolve())} if has_tokenizer else {}
    return RunConfig(model=model, data=DataConfig(seq_length=min(model.max_position_embeddings or _LONGEST, _LONGEST), **tokenizer))


def _check_names(reader: HFReader, shapes: Mapping[str, torch.Size], family: str, model: ModelConfig) -> None:
    wanted = {source_of(name, family).name for name in shapes}
    used = {reader.spelled(name) for name in wanted}
    problems = [f"{name} is missing" for name in sorted(wanted) if not reader.has(name)]
    left = {name for name in reader.names - used if not is_leftover(name)}
    if not model.untie_embeddings_and_output_weights and "lm_head.weight" in left:
        left.remove("lm_head.weight")
        embedding = source_of("embedding.word.weight", family).name
        if reader.has(embedding) and not torch.equal(reader.read("lm_head.weight"), reader.read(embedding)):
            problems.append("lm_head.weight differs from the embedding, though tie_word_embeddings says that they are one tensor")
    problems += [f"{name} has no place in this model" for name in sorted(left)]
    if problems:
        hidden = len(problems) - _MOST_SHOWN
        listed = "\n  ".join(problems[:_MOST_SHOWN] + ([f"... {hidden} more"] if hidden > 0 else []))
        raise CheckpointError(f"the weights do not fit config.json in {len(problems)} places:\n  {listed}")


def _make(reader: HFReader, name: str, family: str, shapes: Mapping[str, torch.Size]) -> Tensor:
    source, shape = source_of(name, family), shapes[name]
    value = source.take(reader.read(source.name))
    is_vocabulary = name in ("embedding.word.weight", "head.output.weight")
    fits = value.shape == shape or (is_vocabulary and value.shape[1:] == shape[1:] and value.shape[0] <= shape[0])
    if not fits:
        raise CheckpointError(f"{source.name} has shape {list(value.shape)}, {list(shape)} is wanted for {name}")
    made = torch.zeros(shape)  # memory of its own: the planner gives it back once it is written
    made[: value.shape[0]] = value
    return made
