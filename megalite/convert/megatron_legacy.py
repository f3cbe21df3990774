"""Tensors of a Megatron `torch` checkpoint: one file per rank (`mp_rank_TT[_PPP]/model_optim_rng.pt`), put together on reading.

Decisions
- Two generations of names are read: Megatron-core's, and those from before it (`language_model.encoder...`), which become core's.
- Layers are numbered inside a stage there; stages follow each other by virtual stage, then by pipeline rank.
- Before checkpoint version 2.0 rows of the joint q, k, v matrix lay in other orders; they are put right per rank.
- A rank's gated matrix is its part of the gate above its part of the other, so halves are put together apart.
- Tensors stay in the mapped files until they are asked for.

Letters: N query heads, D head size; `_local` is one tp rank's share.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from megalite.convert.pickles import load_torch
from megalite.errors import CheckpointError
from megalite.log import get_logger

__all__ = ["LegacyTensors"]

_RANK = re.compile(r"mp_rank_(\d{2})(?:_(\d{3}))?(_\d{3})?$")
_LAYER = re.compile(r"decoder\.layers\.(\d+)\.")
_SPLIT_ROWS = (
    *("word_embeddings.weight", "output_layer.weight"),
    *("linear_qkv.weight", "linear_qkv.bias", "linear_fc1.weight", "linear_fc1.bias"),
)
_SPLIT_COLUMNS = ("linear_proj.weight", "linear_fc2.weight")
_OLDER = (  # names from before Megatron-core
    (r"^(language_model\.)?(encoder|transformer)\.", "decoder."),
    (r"^language_model\.", ""),
    (r"^transformer\.layers\.", "decoder.layers."),
    (r"\.(self_attention|attention)\.query_key_value\.", ".self_attention.linear_qkv."),
    (r"\.(self_attention|attention)\.dense\.", ".self_attention.linear_proj."),
    (r"\.input_norm\.", ".input_layernorm."),
    (r"\.post_attention_(layer)?norm\.", ".pre_mlp_layernorm."),
    (r"\.dense_h_to_4h\.", ".linear_fc1."),
    (r"\.dense_4h_to_h\.", ".linear_fc2."),
    (r"\.final_(layer)?norm\.", ".final_layernorm."),
)
_COPY = "word_embeddings_for_head.weight"  # of the embedding, on the last stage; Megatron-core calls it output_layer


class LegacyTensors:
    """`names` as Megatron-core has them, with global layer numbers. Raises CheckpointError for missing or damaged files."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        ranks = _ranks(folder)
        self.tp = 1 + max(tp for tp, _ in ranks)
        pp = 1 + max(stage for _, stage in ranks)
        missing = [(tp, stage) for tp in range(self.tp) for stage in range(pp) if (tp, stage) not in ranks]
        if missing:
            raise CheckpointError(f"{folder} lacks the files of (tp, pp) ranks {missing}")
        files = {rank: _read_file(path) for rank, path in ranks.items()}
        first = files[0, 0]
        self._common = {key: value for key, value in first.items() if not key.startswith("model")}
        self._version = float(first.get("checkpoint_version", 0))
        self._parts = [_numbered([files[tp, stage] for stage in range(pp)]) for tp in range(self.tp)]
        if any(part.keys() != self._parts[0].keys() for part in self._parts):
            raise CheckpointError(f"{folder}: the ranks of tensor parallelism do not hold the same tensors")
        self.has_optimizer_state = "optimizer" in first
        self.heads, self.is_gated = 0, False  # to be set before reading

    @property
    def names(self) -> set[str]:
        return set(self._parts[0])

    def common(self) -> dict[str, Any]:
        """Settings, step and so on."""
        return self._common

    def read(self, name: str) -> Tensor:
        parts = [part[name] for part in self._parts]
        if name.endswith(("linear_qkv.weight", "linear_qkv.bias")) and self._version < 2:
            parts = [reordered_qkv(part, self.heads // self.tp, self._version) for part in parts]
        if self.tp == 1:
            return parts[0]
        if name.endswith(_SPLIT_COLUMNS):
            return torch.cat(parts, dim=1)
        if ".linear_fc1." in name and self.is_gated:
            return torch.cat([part.chunk(2)[half] for half in (0, 1) for part in parts])
        if name.endswith(_SPLIT_ROWS):
            return torch.cat(parts)
        if any(not torch.equal(part, parts[0]) for part in parts[1:]):
            get_logger().warning(f"{name} differs between the tensor-parallel ranks of {self.folder}; the first rank's is taken")
        return parts[0]


def reordered_qkv(value: Tensor, heads_local: int, version: float) -> Tensor:
    """Rows of version 0 ([3, N_local, D]) or 1.0 ([N_local, D, 3]) in the order [N_local, 3, D]."""
    if version == 0:
        return value.unflatten(0, (3, heads_local, -1)).transpose(0, 1).flatten(0, 2)
    if version == 1:
        return value.unflatten(0, (heads_local, -1, 3)).transpose(1, 2).flatten(0, 2)
    raise CheckpointError(f"checkpoint_version {version} is unknown")


def _ranks(folder: Path) -> dict[tuple[int, int], Path]:
    found = {}
    for entry in folder.glob("mp_rank_*"):
        match = _RANK.match(entry.name)
        if match is None or match[3]:
            raise CheckpointError(f"{entry.name} in {folder} is of a model with experts, which cannot be converted yet")
        found[int(match[1]), int(match[2] or 0)] = entry / "model_optim_rng.pt"
    if not found:
        raise CheckpointError(f"{folder} holds no mp_rank_* folders")
    return found


def _read_file(path: Path) -> dict[str, Any]:
    if not path.exists():
        raise CheckpointError(f"{path} is missing")
    found = load_torch(path)
    if not isinstance(found, dict) or not any(key.startswith("model") for key in found):
        raise CheckpointError(f"{path} is no checkpoint of Megatron: it has no model")
    return found


def _numbered(stages: list[dict[str, Any]]) -> dict[str, Tensor]:
    """One tp rank's tensors of all stages under core names with global layer numbers."""
    chunks = sorted((key for key in stages[0] if re.fullmatch(r"model\d*", key)), key=lambda key: int(key[5:] or 0))
    found: dict[str, Tensor] = {}
    begin = 0
    for chunk in chunks:
        for stage in stages:
            tensors = {_modern(name): value for name, value in _flat(stage[chunk], "").items()}
            found |= {_global(name, begin): value for name, value in tensors.items()}
            begin += len({match[1] for name in tensors if (match := _LAYER.match(name))})
    return found


def _global(name: str, begin: int) -> str:
    if name.endswith(_COPY):
        return "output_layer.weight"
    return _LAYER.sub(lambda match: f"decoder.layers.{begin + int(match[1])}.", name)


def _flat(values: Mapping[str, Any], prefix: str) -> dict[str, Tensor]:
    found: dict[str, Tensor] = {}
    for key, value in values.items():
        if isinstance(value, Mapping):
            found |= _flat(value, f"{prefix}{key}.")
        elif isinstance(value, Tensor) and "_extra_state" not in key:
            found[prefix + key] = value
    return found


def _modern(name: str) -> str:
    name = name.removeprefix("module.")
    for pattern, now in _OLDER:
        name = re.sub(pattern, now, name)
    return name
