"""From a Megatron checkpoint (torch_dist, or a file per rank) to a checkpoint that any layout loads.

Decisions
- What the model is comes from the arguments in the checkpoint, or from a configuration that the caller gives; shapes must fit it.
- Every tensor must be used and every one of ours found. The one exception is the copy of a tied embedding that the last stage keeps,
  which must be equal to it.
- Weights become fp32 from what the checkpoint's model has (often bf16). Optimizer state is not converted.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from megalite.config import DataConfig, ModelConfig, RunConfig
from megalite.convert.hf_config import model_from_hf
from megalite.convert.megatron_config import model_from_arguments
from megalite.convert.megatron_dist import DistTensors
from megalite.convert.megatron_legacy import LegacyTensors
from megalite.convert.megatron_names import Rows, part_of
from megalite.convert.writing import VOCABULARY, check_free, logical_shapes, mismatches, whole_tensor, write_weights
from megalite.errors import CheckpointError, ConfigError
from megalite.log import get_logger

__all__ = ["import_megatron", "model_from_file"]

_COPY, _EMBEDDING = "output_layer.weight", "embedding.word_embeddings.weight"
_LENGTH = 1024  # tokens of a training sequence where neither arguments nor model know one


def import_megatron(folder: Path, out: Path, *, model: ModelConfig | None = None, vocab_size: int | None = None) -> Path:
    """Write a checkpoint of the model in `folder` below `out`, and return its path.

    folder: one that Megatron saved to (the step that its tracker file names is taken), or one of its checkpoints.
    model: what it is; None: the arguments in the checkpoint say so, and `vocab_size` is the tokenizer's.
    Raises ConfigError for a model that is not known here or an `out` in use, CheckpointError for weights that do not fit.
    """
    check_free(out)
    checkpoint = _find(folder)
    tensors = DistTensors(checkpoint) if (checkpoint / "metadata.json").exists() else LegacyTensors(checkpoint)
    arguments = _arguments(tensors.common())
    if model is None:
        model = model_from_arguments(arguments, vocab_size)
    elif vocab_size is not None:
        model = replace(model, vocab_size=vocab_size)
    if isinstance(tensors, LegacyTensors):
        tensors.heads, tensors.is_gated = model.num_attention_heads, model.activation == "swiglu"
    weights = _Weights(tensors, model, arguments)
    weights.check()
    if tensors.has_optimizer_state:
        get_logger().warning(f"{checkpoint} holds optimizer state, which is not converted: a run starts with a fresh optimizer")
    length = arguments.get("seq_length") or model.max_position_embeddings or _LENGTH
    return write_weights(out, RunConfig(model=model, data=DataConfig(seq_length=length)), weights.shapes, weights.make, checkpoint)


class _Weights:
    """Our tensors from Megatron's."""

    def __init__(self, tensors: DistTensors | LegacyTensors, model: ModelConfig, arguments: Mapping[str, Any]) -> None:
        self.tensors, self.shapes = tensors, logical_shapes(model)
        self.is_tied = not model.untie_embeddings_and_output_weights
        self.parts = {name: part_of(name, is_gated=model.activation == "swiglu") for name in self.shapes}
        self.rows = Rows.of(model, turns_in_pairs=bool(arguments.get("rotary_interleaved")))
        self.vocab_size = model.known_vocab_size
        centered = arguments.get("apply_layernorm_1p") or arguments.get("layernorm_zero_centered_gamma")
        self.added = 1.0 if centered else 0.0  # norms there multiply with 1 + weight then

    def check(self) -> None:
        """Raises CheckpointError with all that is missing, left over or not the embedding's copy."""
        have = self.tensors.names
        found = {name: self._spelling(name) for name in self.parts}
        problems = [f"{self.parts[name].spellings[0]} is missing" for name, spelling in found.items() if spelling is None]
        left = have - set(found.values())
        if self.is_tied and _COPY in left:
            left.remove(_COPY)
            if not torch.equal(self.tensors.read(_COPY), self.tensors.read(_EMBEDDING)):
                problems.append(f"{_COPY} differs from the embedding, though they are tied")
        problems += [f"{name} has no place in this model" for name in sorted(left)]
        if problems:
            raise mismatches(sorted(set(problems)), "the model's settings")

    def make(self, name: str) -> Tensor:
        part, source = self.parts[name], self._spelling(name)
        assert source is not None, "checked before"
        theirs = self.tensors.read(source)
        if part.rows is not None:
            self._check_rows(theirs, source, name)
        value = self.rows.take(theirs, part.rows)
        if name in VOCABULARY:
            if value.shape[0] < self.vocab_size:
                raise CheckpointError(f"{source} has {value.shape[0]} rows, fewer than the vocabulary of {self.vocab_size}")
            value = value[: self.vocab_size]
        return whole_tensor(value.float() + self.added if part.is_norm_weight else value, name, self.shapes[name], source)

    def _check_rows(self, theirs: Tensor, source: str, name: str) -> None:
        if self.parts[name].rows in ("gate", "up"):
            wanted = 2 * self.shapes[name][0]
        else:
            wanted = (self.rows.heads + 2 * self.rows.kv_heads) * self.rows.head_dim
        if theirs.shape[0] != wanted:
            raise CheckpointError(f"{source} has {theirs.shape[0]} rows, {wanted} are wanted")

    def _spelling(self, name: str) -> str | None:
        return next((spelling for spelling in self.parts[name].spellings if spelling in self.tensors.names), None)


def _find(folder: Path) -> Path:
    """The checkpoint that `folder` means."""
    if (folder / "metadata.json").exists() or any(folder.glob("mp_rank_*")):
        return folder
    tracker = folder / "latest_checkpointed_iteration.txt"
    try:
        step = tracker.read_text().strip()
    except OSError as error:
        raise CheckpointError(f"{folder} is neither a checkpoint of Megatron nor a folder of them ({error})") from error
    found = folder / (f"iter_{int(step):07d}" if step.isdecimal() else step)
    if not found.is_dir():
        raise CheckpointError(f"{tracker} names {step!r}, but there is no {found.name}")
    return found


def _arguments(common: Mapping[str, Any]) -> dict[str, Any]:
    found = common.get("args")
    return dict(vars(found)) if isinstance(found, argparse.Namespace) else dict(found) if isinstance(found, Mapping) else {}


def model_from_file(path: Path) -> ModelConfig:
    """Of a config.json of Hugging Face, a config.toml of megalite, or a folder with one of them. Raises ConfigError."""
    if path.is_dir():
        path = next((path / name for name in ("config.json", "config.toml") if (path / name).is_file()), path)
    try:
        text = path.read_text()
        return model_from_hf(json.loads(text)) if path.suffix == ".json" else RunConfig.from_toml(text).model
    except (OSError, ValueError) as error:
        if isinstance(error, ConfigError):
            raise
        raise ConfigError(f"--model-config {path} cannot be read: {error}") from error
