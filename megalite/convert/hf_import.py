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
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from megalite.config import DataConfig, ModelConfig, RunConfig
from megalite.convert.hf_config import model_from_hf, read_hf_config
from megalite.convert.hf_files import HFReader
from megalite.convert.hf_names import is_leftover, source_of
from megalite.convert.writing import check_free, logical_shapes, mismatches, whole_tensor, write_weights

__all__ = ["COMPANIONS", "check_names", "import_hf", "make_tensor"]

COMPANIONS = (
    *("config.json", "generation_config.json", "tokenizer.json", "tokenizer.model", "tokenizer_config.json", "special_tokens_map.json"),
    *("added_tokens.json", "vocab.json", "merges.txt", "chat_template.jinja"),
)
_LONGEST = 4096  # tokens of a training sequence, unless the model's positions end earlier


def import_hf(folder: Path, out: Path) -> Path:
    """Write a checkpoint of the model in `folder` below `out`, and return its path.

    Raises ConfigError for a model that is not known here or an `out` in use, CheckpointError for weights that do not fit.
    """
    raw = read_hf_config(folder)
    model = model_from_hf(raw)
    family = raw["model_type"]
    check_free(out)
    shapes = logical_shapes(model)
    with HFReader(folder) as reader:
        check_names(reader, shapes, family, model)
        config = _run_config(model, out, folder)
        path = write_weights(out, config, shapes, lambda name: make_tensor(reader, name, family, shapes), folder)
    (out / "hf").mkdir(exist_ok=True)
    for name in COMPANIONS:
        if (folder / name).is_file():
            shutil.copyfile(folder / name, out / "hf" / name)
    return path


def _run_config(model: ModelConfig, out: Path, folder: Path) -> RunConfig:
    has_tokenizer = (folder / "tokenizer.json").is_file()
    tokenizer: dict[str, Any] = {"tokenizer_type": "hf", "tokenizer_model": str((out / "hf").resolve())} if has_tokenizer else {}
    return RunConfig(model=model, data=DataConfig(seq_length=min(model.max_position_embeddings or _LONGEST, _LONGEST), **tokenizer))


def check_names(reader: HFReader, shapes: Mapping[str, torch.Size], family: str, model: ModelConfig) -> None:
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
        raise mismatches(problems, "config.json")


def make_tensor(reader: HFReader, name: str, family: str, shapes: Mapping[str, torch.Size]) -> Tensor:
    source = source_of(name, family)
    return whole_tensor(source.take(reader.read(source.name)), name, shapes[name], source.name)
