"""From a checkpoint of any layout to a `torch_dist` checkpoint that Megatron loads at any layout of its own.

Decisions
- Layers are stacked (`decoder.layers.X` of shape [layers, ...]), Megatron's default, and written layer by layer as chunks of the whole,
  so that memory is that of a few tensors of one layer.
- It is a `release`: Megatron starts counting at step 0 from it and asks for neither optimizer nor random states.
- A tied head is not written: Megatron finds it under the embedding's name.
- Loaders ask for the state of 8-bit scaling factors (`_extra_state`) of every module that could have one; empty ones are written.
"""

from __future__ import annotations

import io
import json
import shutil
import warnings
from pathlib import Path
from typing import Literal

import torch
import torch.distributed.checkpoint as dcp
from torch import Tensor
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.metadata import ChunkStorageMetadata, MetadataIndex, TensorProperties
from torch.distributed.checkpoint.planner import SavePlan, TensorWriteData, WriteItem, WriteItemType

from megalite.checkpoint.lazy import LazyPlanner
from megalite.checkpoint.reading import TensorReader
from megalite.config import ModelConfig
from megalite.convert.megatron_config import arguments_of
from megalite.convert.megatron_names import Rows, join, part_of
from megalite.convert.merged import MergedReader
from megalite.convert.source import DTYPES, open_source
from megalite.convert.writing import logical_shapes
from megalite.errors import CheckpointError

__all__ = ["export_megatron"]

_LAYERS = "decoder.layers."
_STATEFUL = ("self_attention.linear_qkv", "self_attention.core_attention", "self_attention.linear_proj", "mlp.linear_fc1", "mlp.linear_fc2")


def export_megatron(path: Path, out: Path, *, base: Path | None = None, dtype: Literal["fp32", "bf16", "fp16"] = "fp32") -> Path:
    """path: a checkpoint or a --save folder (its newest one), of adapters with their base (`open_source`); out: a new or empty folder.
    Returns the folder of the checkpoint in it.

    Raises CheckpointError, or ConfigError for a model that Megatron's arguments cannot express.
    """
    reader, config = open_source(path, out, base)
    arguments = arguments_of(config.model, config.data.seq_length)
    target = out / "release"
    target.mkdir(parents=True)
    planner = _StackPlanner(reader, config.model, DTYPES[dtype])
    try:
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", message="torch.distributed is disabled", category=UserWarning)  # one process is meant
            dcp.save({}, checkpoint_id=str(target), storage_writer=planner.storage_writer(target), planner=planner, no_dist=True)
        torch.save({"args": arguments, "checkpoint_version": 3.0, "iteration": 0, "content_metadata": {}}, target / "common.pt")
        facts = {"sharded_backend": "torch_dist", "sharded_backend_version": 1, "common_backend": "torch", "common_backend_version": 1}
        (target / "metadata.json").write_text(json.dumps(facts))
        (out / "latest_checkpointed_iteration.txt").write_text("release")
    except (CheckpointException, OSError) as error:
        shutil.rmtree(target, ignore_errors=True)
        reasons = [cause for cause, _ in error.failures.values()] if isinstance(error, CheckpointException) else [error]
        raise CheckpointError(f"writing {target} failed: {'; '.join(map(str, reasons))}") from error
    return target


class _StackPlanner(LazyPlanner):
    """Plans chunks of Megatron's tensors and makes each when it is written."""

    def __init__(self, reader: TensorReader | MergedReader, model: ModelConfig, dtype: torch.dtype) -> None:
        super().__init__(self._join)
        self._reader, self._dtype, self._rows = reader, dtype, Rows.of(model)
        self._parts: dict[str, dict[str | None, str]] = {}
        self._sizes: dict[str, torch.Size] = {}
        for name, shape in logical_shapes(model).items():
            part = part_of(name, is_gated=model.activation == "swiglu")
            key = part.spellings[0]
            self._parts.setdefault(key, {})[part.rows] = name
            height = self._sizes[key][0] if key in self._sizes else 0
            self._sizes[key] = torch.Size([height + shape[0], *shape[1:]])
        self._num_layers, self._has_head_norms = model.num_layers, model.qk_layernorm

    def create_local_plan(self) -> SavePlan:
        tensors = [self._item(key, size) for key, size in self._sizes.items()]
        states = [WriteItem(index=MetadataIndex(name), type=WriteItemType.BYTE_IO) for name in self._extra_states()]
        self.plan = SavePlan(states + tensors, planner_data={})
        return self.plan

    def resolve_data(self, write_item: WriteItem) -> Tensor | io.BytesIO:
        self.release()
        if write_item.type is WriteItemType.BYTE_IO:
            nothing = io.BytesIO()
            torch.save([None], nothing)
            return nothing
        index = write_item.index
        layer = index.offset[0] if index.offset is not None and index.fqn.startswith(_LAYERS) else None
        key = index.fqn if layer is None else index.fqn.replace(_LAYERS, f"{_LAYERS}{layer}.", 1)
        value = self._join(key)
        return self.keep(value if layer is None else value[None])

    def _extra_states(self) -> list[str]:
        modules = [*_STATEFUL, *(f"self_attention.{part}_layernorm" for part in "qk" if self._has_head_norms)]
        layers = [f"{_LAYERS}{module}._extra_state/shard_{i}_{self._num_layers}" for module in modules for i in range(self._num_layers)]
        return [*layers, "decoder.final_layernorm._extra_state/shard_0_1"]

    def _item(self, key: str, size: torch.Size) -> WriteItem:
        name, offsets, whole = key, torch.Size([0] * len(size)), size
        if key.startswith(_LAYERS):
            layer, _, rest = key.removeprefix(_LAYERS).partition(".")
            name, offsets, whole = _LAYERS + rest, torch.Size([int(layer), *offsets]), torch.Size([self._num_layers, *size])
            size = torch.Size([1, *size])
        properties = TensorProperties(dtype=self._dtype)
        data = TensorWriteData(chunk=ChunkStorageMetadata(offsets=offsets, sizes=size), properties=properties, size=whole)
        return WriteItem(index=MetadataIndex(name, offsets), type=WriteItemType.SHARD, tensor_data=data)

    def _join(self, key: str) -> Tensor:
        parts = {rows: self._reader.read(f"model.{name}") for rows, name in self._parts[key].items()}
        return join(parts, self._rows).to(self._dtype)
