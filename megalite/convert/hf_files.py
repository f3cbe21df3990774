"""Weights in a Hugging Face folder: read one at a time, written one at a time.

The format of safetensors: 8 bytes little-endian length of a JSON header, the header {name: {dtype, shape, data_offsets}}, then the data
without gaps. Writing is done here because the library's writer wants all tensors of a file in memory; reading is the library's.
Old folders hold pickles (pytorch_model.bin), which are read through torch's safe unpickler, memory-mapped.
"""

from __future__ import annotations

import json
import struct
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from megalite.errors import CheckpointError

__all__ = ["HFReader", "write_shards"]

_DTYPES = {torch.float32: "F32", torch.float16: "F16", torch.bfloat16: "BF16"}
_PREFIX = "transformer."  # of GPT-2's tensors, which its own repositories leave out


class HFReader:
    """The tensors of a folder by name. A context manager. Raises CheckpointError where there are none, or one cannot be read."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._get: dict[str, Callable[[], Tensor]] = {}
        try:
            for file, names in _files_of(folder).items():
                self._open(folder / file, names)
        except (OSError, ValueError, SafetensorError, RuntimeError) as error:
            raise CheckpointError(f"the weights in {folder} cannot be read: {error}") from error

    @property
    def names(self) -> set[str]:
        return set(self._get)

    def has(self, name: str) -> bool:
        return self._known(name) in self._get

    def read(self, name: str) -> Tensor:
        try:
            return self._get[self._known(name)]()
        except (OSError, SafetensorError, RuntimeError) as error:
            raise CheckpointError(f"{name} in {self._folder} cannot be read: {error}") from error

    def spelled(self, name: str) -> str:
        """As the folder has it."""
        return self._known(name)

    def __enter__(self) -> HFReader:
        return self

    def __exit__(self, *_: object) -> None:
        self._get.clear()

    def _known(self, name: str) -> str:
        short = name.removeprefix(_PREFIX)
        return short if name not in self._get and short in self._get else name

    def _open(self, path: Path, names: Sequence[str] | None) -> None:
        if path.suffix == ".bin":
            stored = torch.load(path, map_location="cpu", mmap=True, weights_only=True)
            self._get |= {name: (lambda value=value: value) for name, value in stored.items()}
            return
        with safe_open(path, framework="pt") as file:
            present = set(file.keys())
        missing = sorted(set(names or ()) - present)
        if missing:
            raise ValueError(f"{path.name} lacks {', '.join(missing[:5])}, which the index says it has")
        self._get |= {name: (lambda name=name: _tensor(path, name)) for name in names or present}


def _tensor(path: Path, name: str) -> Tensor:
    """Opens the file for it alone: an open one keeps in memory whatever was read from it."""
    with safe_open(path, framework="pt") as file:
        return file.get_tensor(name)


def _files_of(folder: Path) -> dict[str, list[str] | None]:
    """{file name: its tensors as the index says, None without an index}."""
    for stem in ("model.safetensors", "pytorch_model.bin"):
        index = folder / f"{stem}.index.json"
        if index.exists():
            files: dict[str, list[str] | None] = {}
            for name, file in json.loads(index.read_text())["weight_map"].items():
                files.setdefault(file, []).append(name)  # type: ignore[union-attr]
            return files
        if (folder / stem).exists():
            return {stem: None}
    raise ValueError("there is neither model.safetensors nor pytorch_model.bin, nor an index of such files")


def write_shards(
    folder: Path, facts: Mapping[str, Sequence[int]], make: Callable[[str], Tensor], dtype: torch.dtype, most_bytes: int
) -> list[str]:
    """Write tensors with these shapes to files of at most `most_bytes` (one tensor at least), and an index where there are several.

    make(name): the tensor, wanted in the order of `facts`. Returns the names of the files.
    """
    shards: list[dict[str, Sequence[int]]] = [{}]
    for name, shape in facts.items():
        if shards[-1] and _bytes({**shards[-1], name: shape}, dtype) > most_bytes:
            shards.append({})
        shards[-1][name] = shape
    count = len(shards)
    names = ["model.safetensors"] if count == 1 else [f"model-{i:05d}-of-{count:05d}.safetensors" for i in range(1, count + 1)]
    for file, shard in zip(names, shards, strict=True):
        _write(folder / file, shard, make, dtype)
    if count > 1:
        weight_map = {name: file for file, shard in zip(names, shards, strict=True) for name in shard}
        index = {"metadata": {"total_size": _bytes(facts, dtype)}, "weight_map": weight_map}
        (folder / "model.safetensors.index.json").write_text(json.dumps(index, indent=2) + "\n")
    return names


def _bytes(facts: Mapping[str, Sequence[int]], dtype: torch.dtype) -> int:
    return sum(torch.Size(shape).numel() for shape in facts.values()) * dtype.itemsize


def _write(path: Path, facts: Mapping[str, Sequence[int]], make: Callable[[str], Tensor], dtype: torch.dtype) -> None:
    header: dict[str, Any] = {"__metadata__": {"format": "pt"}}
    offset = 0
    for name, shape in facts.items():
        size = torch.Size(shape).numel() * dtype.itemsize
        header[name] = {"dtype": _DTYPES[dtype], "shape": list(shape), "data_offsets": [offset, offset + size]}
        offset += size
    text = json.dumps(header, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)
    with path.open("wb") as file:
        file.write(struct.pack("<Q", len(text)) + text)
        for name, shape in facts.items():
            value = make(name).to(dtype).contiguous()
            assert list(value.shape) == list(shape), f"{name} is {list(value.shape)}, {list(shape)} was announced"
            file.write(value.view(-1).view(torch.uint8).numpy().data)
