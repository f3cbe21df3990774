"""Pickles of other projects, read without running their code.

A checkpoint of Megatron is a pickle: its settings hold enumerations and classes of that project, which need not be installed here, and a
pickle can call anything that it names. So only names that hold data are looked up; every other name becomes an `Inert`, which keeps what
it was given and does nothing.
"""

from __future__ import annotations

import pickle
from pathlib import Path
from types import SimpleNamespace
from typing import IO, Any

import torch

from megalite.errors import CheckpointError

__all__ = ["Inert", "load_pickle", "load_torch"]

_HARMLESS = {
    "argparse": {"Namespace"},
    "collections": {"OrderedDict", "defaultdict"},
    "builtins": {"set", "frozenset", "slice", "bytearray", "complex", "range"},
    "_codecs": {"encode"},
    "_io": {"BytesIO"},
    "torch": {"Size", "device", "Tensor", *(name for name in dir(torch) if isinstance(getattr(torch, name), torch.dtype))},
    "torch._utils": {"_rebuild_tensor", "_rebuild_tensor_v2", "_rebuild_parameter"},
    "torch.nn.parameter": {"Parameter"},
    "torch.serialization": {"_get_layout"},
    "torch.distributed.checkpoint.filesystem": {"_StorageInfo"},
    "torch.distributed.checkpoint.metadata": {
        *("Metadata", "TensorStorageMetadata", "BytesStorageMetadata", "ChunkStorageMetadata", "TensorProperties"),
        *("MetadataIndex", "StorageMeta", "_MEM_FORMAT_ENCODING"),
    },
}


class Inert:
    """Stands for an object of a class that is not looked up."""

    def __new__(cls, *args: Any, **_: Any) -> Inert:
        self = super().__new__(cls)
        self.args = args
        return self

    def __init__(self, *_: Any, **__: Any) -> None:
        pass

    args: tuple[Any, ...]

    def __call__(self, *args: Any) -> Inert:
        return Inert(self, *args)

    def __setstate__(self, state: Any) -> None:
        self.state = state

    def __setitem__(self, *_: Any) -> None:
        pass

    def append(self, _: Any) -> None:
        pass

    def extend(self, _: Any) -> None:
        pass

    def __hash__(self) -> int:
        return id(self)

    def __repr__(self) -> str:
        return f"{type(self).__name__}{self.args}"


class _Unpickler(pickle.Unpickler):
    def find_class(self, module: str, name: str) -> Any:
        if name in _HARMLESS.get(module, ()):
            return super().find_class(module, name)
        return type(f"{module}.{name}", (Inert,), {})


def load_pickle(file: IO[bytes]) -> Any:
    """Raises whatever damaged bytes raise."""
    return _Unpickler(file).load()


def load_torch(source: Path | IO[bytes]) -> Any:
    """What torch.save wrote, with tensors that lie in the file until they are used. Raises CheckpointError."""
    readers = SimpleNamespace(__name__="readers", Unpickler=_Unpickler, load=lambda file, **_: load_pickle(file))
    reasons: Exception | None = None
    for mapped in (True, False) if isinstance(source, Path) else (False,):  # files of old versions of torch cannot be mapped
        try:
            return torch.load(source, map_location="cpu", mmap=mapped, weights_only=False, pickle_module=readers)
        except Exception as error:  # damaged bytes raise anything
            reasons = error
    raise CheckpointError(f"{source} cannot be read: {type(reasons).__name__}: {reasons}") from reasons
