"""Reads single logical tensors of a checkpoint in one process, whatever layout wrote it; without a process group.

What a tool looks at may be larger than its memory, so nothing but the asked-for tensor is read, and `.metadata` only once.
"""

from __future__ import annotations

import warnings
from functools import cached_property
from pathlib import Path
from typing import Any

import torch
import torch.distributed.checkpoint as dcp
from torch import Tensor
from torch.distributed.checkpoint import FileSystemReader
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.metadata import Metadata, TensorStorageMetadata

from megalite.checkpoint.manifest import Manifest, read_manifest
from megalite.errors import CheckpointError

__all__ = ["TensorReader"]


class TensorReader:
    """The tensors of one checkpoint. Raises CheckpointError where its manifest or `.metadata` cannot be read."""

    def __init__(self, checkpoint: Path) -> None:
        self.checkpoint = checkpoint
        self.manifest: Manifest = read_manifest(checkpoint)
        self._storage = _Storage(str(checkpoint))
        try:
            self._metadata = self._storage.stored_metadata
        except Exception as error:  # unpickling a damaged file raises anything
            raise CheckpointError(f"{checkpoint / '.metadata'} cannot be read ({type(error).__name__}: {error})") from error

    @property
    def stored(self) -> dict[str, dict[str, Any]]:
        """{logical name: {"shape", "dtype"}} as the checkpoint library has them, apart from the manifest."""
        return {
            name: {"shape": list(facts.size), "dtype": str(facts.properties.dtype).removeprefix("torch.")}
            for name, facts in self._metadata.state_dict_metadata.items()
            if isinstance(facts, TensorStorageMetadata)
        }

    def read(self, name: str) -> Tensor:
        """One whole tensor in host memory. Raises CheckpointError."""
        facts = self.stored_facts(name)
        tensor = torch.empty(facts.size, dtype=facts.properties.dtype)
        try:
            with warnings.catch_warnings():
                # one process is what is meant here, so being told so is noise
                warnings.filterwarnings("ignore", message="torch.distributed is disabled", category=UserWarning)
                dcp.load({name: tensor}, storage_reader=self._storage, no_dist=True)
        except (CheckpointException, Exception) as error:  # damaged bytes raise anything; the former is no Exception
            raise CheckpointError(f"{name} of {self.checkpoint} cannot be read: {_cause(error)}") from error
        return tensor

    def stored_facts(self, name: str) -> TensorStorageMetadata:
        facts = self._metadata.state_dict_metadata.get(name)
        if not isinstance(facts, TensorStorageMetadata):
            raise CheckpointError(f"{self.checkpoint} has no tensor {name}")
        return facts


class _Storage(FileSystemReader):
    """Reads `.metadata` once for all tensors."""

    @cached_property
    def stored_metadata(self) -> Metadata:
        return super().read_metadata()

    def read_metadata(self, *_: Any, **__: Any) -> Metadata:
        return self.stored_metadata


def _cause(error: BaseException) -> str:
    causes = [cause for cause, _ in error.failures.values()] if isinstance(error, CheckpointException) else [error]
    return "; ".join(f"{type(cause).__name__}: {cause}" for cause in causes)
