"""Tensors of a Megatron `torch_dist` checkpoint, one layer of one tensor at a time.

The directory is one of `torch.distributed.checkpoint` (DCP) with `metadata.json` beside. Three forms of the layers are read: stacked
(`decoder.layers.X` of shape [layers, ...], the default), one tensor per layer (`decoder.layers.N.X`), and one per layer with gate and up
apart (`weight_w`, `weight_v`). Nothing of Megatron has to be installed, and no code of the files is run.
"""

from __future__ import annotations

import io
import json
import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.distributed.checkpoint import FileSystemReader
from torch.distributed.checkpoint.metadata import BytesStorageMetadata, ChunkStorageMetadata, Metadata, MetadataIndex, TensorStorageMetadata
from torch.distributed.checkpoint.planner import LoadItemType, LoadPlan, LoadPlanner, ReadItem
from torch.distributed.checkpoint.planner_helpers import create_read_items_for_chunk_list

from megalite.convert.pickles import load_pickle, load_torch
from megalite.errors import CheckpointError

__all__ = ["DistTensors"]

_NO_WEIGHTS = re.compile(r"(_extra_state|^optimizer|^chained_|^rng_state|^rerun_state|^opt_param_scheduler|^common_state)")
_STACKED = re.compile(r"decoder\.layers\.(?!\d)")
_COMMON = "common_state/shard_0_1"


class DistTensors:
    """`names`: of whole tensors, every layer by itself. Raises CheckpointError for another format or damaged files."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        _check_format(folder)
        try:
            with (folder / ".metadata").open("rb") as file:
                self._metadata: Metadata = load_pickle(file)
            stored = self._metadata.state_dict_metadata.items()
        except Exception as error:  # damaged bytes raise anything
            raise CheckpointError(f"{folder / '.metadata'} cannot be read: {type(error).__name__}: {error}") from error
        self._facts = {key: facts for key, facts in stored if isinstance(facts, TensorStorageMetadata) and not _NO_WEIGHTS.search(key)}
        self._places = _places({key: facts.size for key, facts in self._facts.items()})
        self.has_optimizer_state = any(key.startswith(("optimizer", "chained_")) for key in self._metadata.state_dict_metadata)

    @property
    def names(self) -> set[str]:
        return set(self._places)

    def read(self, name: str) -> Tensor:
        pieces = [self._read(key, layer) for key, layer in self._places[name]]
        return pieces[0] if len(pieces) == 1 else torch.cat(pieces)

    def common(self) -> dict[str, Any]:
        """What is no tensor: settings, step, and so on; from common.pt, or from among the tensors where newer versions put it."""
        path = self.folder / "common.pt"
        if path.exists():
            found = load_torch(path)
        elif isinstance(self._metadata.state_dict_metadata.get(_COMMON), BytesStorageMetadata):
            found = self._read_bytes(_COMMON)
        else:
            raise CheckpointError(f"{self.folder} has neither common.pt nor {_COMMON}: its settings are missing")
        if not isinstance(found, dict):
            raise CheckpointError(f"the settings in {self.folder} are no table")
        return found

    def _read(self, key: str, layer: int | None) -> Tensor:
        facts = self._facts[key]
        begin = [0 if layer is None else layer, *[0] * (len(facts.size) - 1)]
        sizes = list(facts.size) if layer is None else [1, *facts.size[1:]]
        wanted = ChunkStorageMetadata(offsets=torch.Size(begin), sizes=torch.Size(sizes))
        items = create_read_items_for_chunk_list(key, facts, [wanted])
        made = torch.empty(sizes, dtype=facts.properties.dtype)
        planner = _Planner(made)
        self._run(planner, items, key)
        if planner.numbers != made.numel():
            raise CheckpointError(f"{self.folder}: {planner.numbers} of {made.numel()} numbers of {key} are stored")
        return made if layer is None else made[0]

    def _read_bytes(self, key: str) -> Any:
        index = MetadataIndex(key)
        nothing = torch.Size([])
        item = ReadItem(LoadItemType.BYTE_IO, index, nothing, index, nothing, torch.Size([0]))
        planner = _Planner(torch.empty(0))
        self._run(planner, [item], key)
        found = load_torch(io.BytesIO(planner.content))
        if isinstance(found, list) and len(found) == 1:  # Megatron puts every object into a list of its own
            found = found[0]
        return load_torch(found) if isinstance(found, io.BytesIO) else found

    def _run(self, planner: LoadPlanner, items: Sequence[ReadItem], key: str) -> None:
        reader = FileSystemReader(self.folder)
        try:
            reader.set_up_storage_reader(self._metadata, is_coordinator=True)
            reader.read_data(LoadPlan(list(items)), planner).wait()
        except Exception as error:  # damaged bytes raise anything
            raise CheckpointError(f"{key} in {self.folder} cannot be read: {type(error).__name__}: {error}") from error


class _Planner(LoadPlanner):
    """Fills one tensor, or takes one string of bytes."""

    def __init__(self, made: Tensor) -> None:
        self.made, self.numbers, self.content = made, 0, b""

    def set_up_planner(self, *_: Any, **__: Any) -> None:
        pass

    def create_local_plan(self) -> LoadPlan:
        raise NotImplementedError

    def create_global_plan(self, global_plan: list[LoadPlan]) -> list[LoadPlan]:
        return global_plan

    def finish_plan(self, central_plan: LoadPlan) -> LoadPlan:
        return central_plan

    def load_bytes(self, read_item: ReadItem, value: io.BytesIO) -> None:
        self.content = value.getvalue()

    def resolve_tensor(self, read_item: ReadItem) -> Tensor:
        part = self.made
        for dim, (begin, length) in enumerate(zip(read_item.dest_offsets, read_item.lengths, strict=True)):
            part = part.narrow(dim, begin, length)
        return part

    def commit_tensor(self, read_item: ReadItem, tensor: Tensor) -> None:
        self.numbers += tensor.numel()


def _check_format(folder: Path) -> None:
    path = folder / "metadata.json"
    try:
        backend = json.loads(path.read_text()).get("sharded_backend")
    except (OSError, ValueError, AttributeError) as error:
        raise CheckpointError(f"{path} cannot be read: {error}") from error
    if backend != "torch_dist":
        raise CheckpointError(f"{folder} is a checkpoint of format {backend!r}; torch_dist and the older mp_rank files can be read")


def _places(sizes: dict[str, torch.Size]) -> dict[str, list[tuple[str, int | None]]]:
    """{name of a whole tensor: (key, layer in it) of its pieces, to be put one above the other}."""
    found: dict[str, list[tuple[str, int | None]]] = {}
    for key in sorted(sizes, reverse=True):  # weight_w (gate) before weight_v (up)
        name = re.sub(r"\.(weight|bias)_[wv]$", r".\1", key)
        if _STACKED.match(name):
            for layer in range(sizes[key][0]):
                found.setdefault(_STACKED.sub(f"decoder.layers.{layer}.", name), []).append((key, layer))
        else:
            found.setdefault(name, []).append((key, None))
    return found
