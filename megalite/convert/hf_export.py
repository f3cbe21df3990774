"""From a checkpoint of any layout to a folder that plain `from_pretrained` loads.

Decisions
- Tensors are read and written one at a time. Rows that pad the vocabulary are cut; a tied head is not written.
- The configuration is what the checkpoint's settings say. Where the model was imported and its settings are still the same, the imported
  configuration is kept, with what transformers reads beside the computation.
- Optimizer state has no place in such a folder and is left out.
"""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any, Literal

import torch
from torch import Tensor

from megalite.checkpoint import newest_checkpoint
from megalite.checkpoint.files import check_contents
from megalite.checkpoint.reading import TensorReader
from megalite.config import ModelConfig, RunConfig
from megalite.convert.hf_config import family_of, model_from_hf, model_to_hf, read_hf_config
from megalite.convert.hf_files import write_shards
from megalite.convert.hf_import import COMPANIONS, logical_shapes
from megalite.convert.hf_names import source_of
from megalite.errors import CheckpointError, ConfigError
from megalite.grid import Axis

__all__ = ["export_hf"]

_DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}
_HF_DTYPES = {"fp32": "float32", "bf16": "bfloat16", "fp16": "float16"}


def export_hf(path: Path, out: Path, *, dtype: Literal["fp32", "bf16", "fp16"] = "fp32", max_shard_bytes: int = 5 * 10**9) -> Path:
    """path: a checkpoint or a --save folder (its newest one); out: a new or empty folder, which is returned.

    Raises CheckpointError, or ConfigError for a model that no family of Hugging Face computes.
    """
    if out.exists() and (not out.is_dir() or any(out.iterdir())):
        raise ConfigError(f"{out} exists and is not an empty folder; give --output another path")
    checkpoint = newest_checkpoint(path)
    reader = TensorReader(checkpoint)
    check_contents(checkpoint, reader.manifest.files, Axis.single("world"))
    try:
        model = RunConfig.from_dict(reader.manifest.config).model
    except ConfigError as error:
        raise CheckpointError(f"the manifest of {checkpoint} holds settings this megalite cannot read: {error}") from error
    family = family_of(model)
    parts, shapes = _plan(model, family)
    missing = sorted(name for names in parts.values() for name in names if f"model.{name}" not in reader.stored)
    if missing:
        raise CheckpointError(f"{checkpoint} lacks {', '.join(missing[:5])}")
    companions = checkpoint.parent / "hf"
    out.mkdir(parents=True, exist_ok=True)
    write_shards(out, shapes, lambda name: _join(reader, parts[name], family, model), _DTYPES[dtype], max_shard_bytes)
    config = _configuration(model, companions) | {"torch_dtype": _HF_DTYPES[dtype]}
    if "dtype" in config:
        config["dtype"] = _HF_DTYPES[dtype]
    (out / "config.json").write_text(json.dumps(config, indent=2) + "\n")
    for name in COMPANIONS:
        if name != "config.json" and (companions / name).is_file():
            shutil.copyfile(companions / name, out / name)
    return out


def _plan(model: ModelConfig, family: str) -> tuple[dict[str, list[str]], dict[str, list[int]]]:
    """({their name: our names that make it}, {their name: its shape})."""
    parts: dict[str, list[str]] = {}
    shapes: dict[str, list[int]] = {}
    for name, shape in logical_shapes(model).items():
        source = source_of(name, family)
        parts.setdefault(source.name, []).append(name)
        size = list(shape)
        if name in ("embedding.word.weight", "head.output.weight"):
            size[0] = model.known_vocab_size
        size = size[::-1] if source.is_transposed else size
        if source.third is not None:
            size[-1] *= 3
        shapes[source.name] = size
    return parts, shapes


def _join(reader: TensorReader, names: list[str], family: str, model: ModelConfig) -> Tensor:
    ours = [reader.read(f"model.{name}") for name in names]
    if names[0] in ("embedding.word.weight", "head.output.weight"):
        return ours[0][: model.known_vocab_size]
    whole = torch.cat(ours) if len(ours) > 1 else ours[0]
    return whole.t() if source_of(names[0], family).is_transposed else whole


def _configuration(model: ModelConfig, companions: Path) -> dict[str, Any]:
    if (companions / "config.json").is_file():
        imported = read_hf_config(companions)
        try:
            if model_to_hf(model_from_hf(imported)) == model_to_hf(model):
                return imported
        except ConfigError:
            pass  # of another version, or changed by hand: what the checkpoint says counts
    return model_to_hf(model)
