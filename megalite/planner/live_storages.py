"""Counts the bytes of all tensors that are alive, so that a CPU run knows its peak as exactly as a GPU's allocator does.

Decisions
- Every operation's results are looked at as they appear (a dispatch mode), storages are counted once however many tensors share
  them, and forgotten when Python's last reference and autograd's are gone: a weak reference tells.
- A storage can change its size (data parallelism frees gathered weights that way), so sizes are read again at each count.
- What an operation allocates and frees inside itself is not seen.
- It slows a step down several times: it is put around one step only.
"""

from __future__ import annotations

import weakref
from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_iter

__all__ = ["LiveStorages", "storage_bytes"]


class LiveStorages(TorchDispatchMode):
    """`with LiveStorages(tensors) as live: ...` then `live.peak`, bytes.

    tensors: those that exist before; every other one that was made before is not counted.
    """

    def __init__(self, tensors: Iterable[Tensor] = ()) -> None:
        super().__init__()
        self._alive: dict[int, weakref.ref[torch.UntypedStorage]] = {}
        for tensor in tensors:
            self._add(tensor)
        self.peak = self.current()

    def __torch_dispatch__(self, func: Any, types: Any, args: tuple = (), kwargs: dict[str, Any] | None = None) -> Any:
        results = func(*args, **(kwargs or {}))
        added = [self._add(result) for result in tree_iter(results) if isinstance(result, Tensor)]
        if any(added):
            self.peak = max(self.peak, self.current())
        return results

    def current(self) -> int:
        """Bytes that are alive now."""
        storages = [reference() for reference in list(self._alive.values())]
        return sum(storage.nbytes() for storage in storages if storage is not None)

    def reset_peak(self) -> int:
        """Let `peak` begin again from what is alive now, and return that."""
        self.peak = self.current()
        return self.peak

    def _add(self, tensor: Tensor) -> bool:
        """Whether its storage was not known."""
        storage = _local(tensor).untyped_storage()
        key = id(storage)
        if key in self._alive:
            return False
        self._alive[key] = weakref.ref(storage, lambda _: self._alive.pop(key, None))
        return True


def storage_bytes(tensors: Iterable[Tensor]) -> int:
    """Bytes of the memory behind these tensors as this rank holds them; shared memory counts once."""
    storages = {storage._cdata: storage.nbytes() for storage in (_local(tensor).untyped_storage() for tensor in tensors)}
    return sum(storages.values())


def _local(tensor: Tensor) -> Tensor:
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor
