"""Saves checkpoints beside training, which waits for a copy of its state in host memory only.

Decisions
- The copy is made into buffers that are kept from save to save: fresh memory would cost as much as the copying.
- A thread of every rank writes; its collectives have a process group of their own, so that they never mix with training's.
- One save is under way at a time: the next one, and the end of the run, wait for it. What went wrong in it is said then, on all ranks
  alike. Until a checkpoint is complete under its name the one before it is the newest.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Mapping
from dataclasses import replace
from pathlib import Path

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor

from megalite.checkpoint.manifest import Manifest
from megalite.checkpoint.store import save_checkpoint
from megalite.errors import CheckpointError
from megalite.grid import Axis

__all__ = ["BackgroundSaver"]


class BackgroundSaver:
    """world: an axis of all ranks with a process group that nothing else uses. hash_tensors: as `save_checkpoint` takes it."""

    def __init__(self, world: Axis, hash_tensors: bool = True) -> None:
        self._world, self._hash_tensors = world, hash_tensors
        self._copies: dict[str, Tensor] = {}
        self._thread: threading.Thread | None = None
        self._error: BaseException | None = None

    def start(self, directory: Path, tensors: Mapping[str, Tensor], manifest: Manifest, done: Callable[[Path], None]) -> None:
        """Copy, and begin to write. Collective. done(path): called in the thread of every rank once the checkpoint is complete.

        `wait` comes first.
        """
        assert self._thread is None, "one save is under way at a time"
        self._copy(tensors)
        arguments = (directory, dict(self._copies), manifest, done)
        self._thread = threading.Thread(target=self._write, args=arguments, name="checkpoint", daemon=True)
        self._thread.start()

    def wait(self) -> None:
        """Until no save is under way. Raises CheckpointError where it failed."""
        if self._thread is None:
            return
        self._thread.join()
        self._thread = None
        error, self._error = self._error, None
        if isinstance(error, CheckpointError):
            raise error
        if error is not None:
            raise CheckpointError(f"saving in the background failed: {error}") from error

    def _write(self, directory: Path, tensors: dict[str, Tensor], manifest: Manifest, done: Callable[[Path], None]) -> None:
        try:
            done(save_checkpoint(directory, tensors, manifest, self._world, hash_tensors=self._hash_tensors))
        except BaseException as error:  # DCP's exceptions do not derive from Exception; all of them are raised in `wait`
            self._error = error

    @torch.no_grad()
    def _copy(self, tensors: Mapping[str, Tensor]) -> None:
        if self._copies.keys() != tensors.keys():
            self._copies = {}
        on_device = []
        for name, tensor in tensors.items():
            if name not in self._copies:
                self._copies[name] = _on_host(tensor)
                continue
            local = _local(tensor)
            _local(self._copies[name]).copy_(local, non_blocking=local.is_cuda)
            on_device.append(local.is_cuda)
        if any(on_device):
            torch.cuda.synchronize()


def _on_host(tensor: Tensor) -> Tensor:
    """A copy in host memory, placed like `tensor`."""
    tensor = tensor.detach()
    if not isinstance(tensor, DTensor):
        return _pinned_copy(tensor)
    return DTensor(_pinned_copy(tensor.to_local()), replace(tensor._spec), requires_grad=False)


def _pinned_copy(local: Tensor) -> Tensor:
    copy = torch.empty(local.shape, dtype=local.dtype, pin_memory=local.is_cuda)
    return copy.copy_(local)


def _local(tensor: Tensor) -> Tensor:
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor
