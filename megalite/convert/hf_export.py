"""From a checkpoint of any layout to a folder that plain `from_pretrained` loads.

Decisions
- Tensors are read and written one at a time. Rows that pad the vocabulary are cut; a tied head is not written.
- The configuration is what the checkpoint's settings say. Where the model was imported and its settings are still the same, the imported
  configuration is kept, with what transformers reads beside the computation.
- Adapters are merged into their base, of which the companions are taken.
- Optimizer state has no place in such a folder and is left out.
"""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any, Literal

import torch
from torch import Tensor

from megalite.checkpoint.reading import TensorReader
from megalite.config import ModelConfig, RunConfig
from megalite.convert.hf_config import family_of, model_from_hf, model_to_hf, read_hf_config
from megalite.convert.hf_files import write_shards
from megalite.convert.hf_import import COMPANIONS
from megalite.convert.hf_names import source_of
from megalite.convert.merged import MergedReader
from megalite.convert.source import DTYPES, open_source
from megalite.convert.writing import VOCABULARY, logical_shapes
from megalite.errors import ConfigError

__all__ = ["export_hf", "plan_tensors"]

_HF_DTYPES = {"fp32": "float32", "bf16": "bfloat16", "fp16": "float16"}


def export_hf(
    path: Path,
    out: Path,
    *,
    base: Path | None = None,
    dtype: Literal["fp32", "bf16", "fp16"] = "fp32",
    max_shard_bytes: int = 5 * 10**9,
) -> Path:
    """path: a checkpoint or a --save folder (its newest one); out: a new or empty folder, which is returned; base: as in `open_source`.

    Raises CheckpointError, or ConfigError for a model that no family of Hugging Face computes.
    """
    reader, settings = open_source(path, out, base)
    model = settings.model
    family = family_of(model)
    parts, shapes = plan_tensors(model, family)
    companions = _companions(reader, settings)
    out.mkdir(parents=True, exist_ok=True)
    write_shards(out, shapes, lambda name: _join(reader, parts[name], family, model), DTYPES[dtype], max_shard_bytes)
    config = _configuration(model, companions) | {"torch_dtype": _HF_DTYPES[dtype]}
    if "dtype" in config:
        config["dtype"] = _HF_DTYPES[dtype]
    (out / "config.json").write_text(json.dumps(config, indent=2) + "\n")
    for name in COMPANIONS:
        if name != "config.json" and (companions / name).is_file():
            shutil.copyfile(companions / name, out / name)
    return out


def _companions(reader: TensorReader | MergedReader, settings: RunConfig) -> Path:
    """The folder of what goes with the weights: beside an imported checkpoint, or where its fine-tuned successor has its tokenizer from."""
    beside = reader.companions if isinstance(reader, MergedReader) else reader.checkpoint.parent / "hf"
    tokenizer = settings.data.tokenizer_model
    return Path(tokenizer) if not beside.is_dir() and settings.data.tokenizer_type == "hf" and tokenizer is not None else beside


def plan_tensors(model: ModelConfig, family: str) -> tuple[dict[str, list[str]], dict[str, list[int]]]:
    """({file tensor: ours that make it}, {file tensor: shape}), in the order of writing."""
    """({their name: our names that make it}, {their name: its shape})."""
    parts: dict[str, list[str]] = {}
    shapes: dict[str, list[int]] = {}
    for name, shape in logical_shapes(model).items():
        source = source_of(name, family)
        parts.setdefault(source.name, []).append(name)
        size = list(shape)
        if name in VOCABULARY:
            size[0] = model.known_vocab_size
        size = size[::-1] if source.is_transposed else size
        if source.third is not None:
            size[-1] *= 3
        shapes[source.name] = size
    return parts, shapes


def _join(reader: TensorReader | MergedReader, names: list[str], family: str, model: ModelConfig) -> Tensor:
    ours = [reader.read(f"model.{name}") for name in names]
    if names[0] in VOCABULARY:
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
