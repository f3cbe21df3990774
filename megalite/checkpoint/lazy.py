"""Saves tensors that are made one after another while they are written, so that a tool needs memory for one of them.

The checkpoint library plans a save from shapes and dtypes, for which tensors on the meta device are enough, and asks its planner for the
data of one tensor at a time when it writes.
"""

from __future__ import annotations

from collections.abc import Callable

from torch import Tensor
from torch.distributed.checkpoint import DefaultSavePlanner
from torch.distributed.checkpoint.planner import WriteItem

from megalite.checkpoint.hashes import hash_of

__all__ = ["LazyPlanner"]


class LazyPlanner(DefaultSavePlanner):
    """make(logical name) returns the whole tensor in host memory. hashes: of what was written, by name. For a single process."""

    def __init__(self, make: Callable[[str], Tensor]) -> None:
        super().__init__()
        self.hashes: dict[str, str] = {}
        self._make = make

    def resolve_data(self, write_item: WriteItem) -> Tensor:
        name = write_item.index.fqn
        tensor = self._make(name)
        planned = self.state_dict[name]
        assert (tensor.shape, tensor.dtype) == (planned.shape, planned.dtype), f"{name} is not what was planned"
        self.hashes[name] = hash_of(tensor)
        return tensor
