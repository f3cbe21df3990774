"""Saves tensors that are made one after another while they are written, so that a tool needs memory for one of them.

The checkpoint library plans a save from shapes and dtypes, for which tensors on the meta device are enough, and asks its planner for the
data of one tensor at a time when it writes. It keeps what it was given until the file is complete, though, so a tensor that has been
written gives its memory back here; and on a machine with GPUs it asks ahead unless it is told not to.
"""

from __future__ import annotations

import ctypes
from collections.abc import Callable
from pathlib import Path

import torch
from torch import Tensor
from torch.distributed.checkpoint import DefaultSavePlanner, FileSystemWriter
from torch.distributed.checkpoint.planner import WriteItem

from megalite.checkpoint.hashes import hash_of

__all__ = ["LazyPlanner"]


class LazyPlanner(DefaultSavePlanner):
    """make(logical name) returns a whole new tensor in host memory. hashes: of what was written, by name. For a single process, and with
    `storage_writer` only."""

    def __init__(self, make: Callable[[str], Tensor]) -> None:
        super().__init__()
        self.hashes: dict[str, str] = {}
        self._make = make
        self._written: Tensor | None = None

    def storage_writer(self, folder: Path) -> FileSystemWriter:
        """Asks for a tensor only when the one before it is written."""
        return FileSystemWriter(folder, per_thread_copy_ahead=0)

    def resolve_data(self, write_item: WriteItem) -> Tensor:
        self.release()
        name = write_item.index.fqn
        tensor = self._make(name)
        planned = self.state_dict[name]
        assert (tensor.shape, tensor.dtype) == (planned.shape, planned.dtype), f"{name} is not what was planned"
        self.hashes[name] = hash_of(_same_memory(tensor))
        return self.keep(tensor)

    def keep(self, tensor: Tensor) -> Tensor:
        """`tensor`, whose memory the next `release` takes."""
        self._written = tensor
        return tensor

    def release(self) -> None:
        """Take the memory of the tensor that was written last."""
        if self._written is not None:
            self._written.untyped_storage().resize_(0)


def _same_memory(tensor: Tensor) -> Tensor:
    """`tensor` as another tensor. Hashing lends the memory to NumPy, and a tensor that did so itself cannot give it back."""
    flat = tensor.contiguous().view(-1)
    if flat.numel() == 0 or flat.data_ptr() != tensor.data_ptr():
        return tensor.clone()
    memory = (ctypes.c_byte * (flat.numel() * flat.element_size())).from_address(flat.data_ptr())
    return torch.frombuffer(memory, dtype=tensor.dtype).view(tensor.shape)
