"""Index arrays on disk, so that a restart reads in a second what took minutes to build.

An entry is three `.npy` files and one `.json` that describes them. The name is a digest of the settings, and of the
name, size and modification time of the dataset's two files: data written again in place gets another name, and old
entries are never taken for new ones. Any number of processes may build the same entry at once. Each writes temporary
files and renames them, the `.json` last; all of them write the same bytes, so whose file survives does not matter. A
reader believes an entry only after comparing types, shapes and checksums, and otherwise builds it again.

Old entries are not deleted: another run may have them mapped. The folder may be deleted whenever nothing runs.
"""

from __future__ import annotations

import hashlib
import json
import logging
import os
import uuid
import zlib
from collections.abc import Callable
from dataclasses import asdict
from pathlib import Path
from typing import Any

import numpy as np

from megalite.data.gpt_index import GPTIndices, IndexSpec
from megalite.data.indexed import bin_path, index_path
from megalite.errors import DataError

__all__ = ["cached_indices"]

_FORMAT = 1  # raise it when the same settings would give other arrays
_CHECKSUM_BYTES = 1 << 24

log = logging.getLogger("megalite")


def cached_indices(cache_dir: Path, path_prefix: str, spec: IndexSpec, build: Callable[[], GPTIndices]) -> GPTIndices:
    """The arrays of `build()`, memory-mapped from `cache_dir`; built and stored first where they are not there yet.

    Raises DataError when the dataset's files or the cache folder cannot be used.
    """
    facts = {"format": _FORMAT, "spec": asdict(spec), "path": str(Path(path_prefix).resolve())}
    settings = _digest(facts)
    facts["files"] = [_file_facts(index_path(path_prefix)), _file_facts(bin_path(path_prefix))]
    stem = cache_dir / f"{Path(path_prefix).name}-{settings}-{_digest(facts)}"
    description = _read_description(stem)
    if description is not None:
        try:
            return _load(stem, description)
        except Exception as error:  # whatever damage does to a reader, the remedy is to build the arrays again
            log.warning("the cached indices %s are damaged (%s): building them again", stem, error)
    elif any(cache_dir.glob(f"{stem.name.rsplit('-', 1)[0]}-*.json")):
        log.warning("%s was written again since its indices were cached: building them again", path_prefix)
    else:
        log.info("building the indices of %s into %s", path_prefix, cache_dir)
    indices = build()
    try:
        cache_dir.mkdir(parents=True, exist_ok=True)
        _store(stem, indices, facts)
        return _load(stem, _read_description(stem) or {})
    except OSError as error:
        raise DataError(
            f"cannot write the index cache to {cache_dir}: {error}; choose another folder, or none to build in memory"
        ) from error


def _digest(facts: dict[str, Any]) -> str:
    return hashlib.sha256(json.dumps(facts, sort_keys=True).encode()).hexdigest()[:16]


def _file_facts(path: Path) -> dict[str, Any]:
    try:
        status = path.stat()
    except OSError as error:
        raise DataError(f"cannot cache indices of {path}: {error}") from error
    return {"name": path.name, "size": status.st_size, "mtime_ns": status.st_mtime_ns}


def _array_path(stem: Path, name: str) -> Path:
    return stem.with_name(f"{stem.name}-{name}.npy")


def _description_path(stem: Path) -> Path:
    return stem.with_name(f"{stem.name}.json")


def _read_description(stem: Path) -> dict[str, Any] | None:
    """The entry's description, {} when it cannot be read, None when there is no entry."""
    try:
        description = json.loads(_description_path(stem).read_bytes())
    except FileNotFoundError:
        return None
    except (OSError, ValueError):
        return {}
    return description if isinstance(description, dict) else {}


def _array_facts(values: np.ndarray) -> dict[str, Any]:
    checksum = 0
    rows_per_block = max(1, _CHECKSUM_BYTES // max(1, values[:1].nbytes))
    for start in range(0, len(values), rows_per_block):
        checksum = zlib.crc32(values[start : start + rows_per_block].data, checksum)
    return {"shape": list(values.shape), "dtype": values.dtype.str, "crc32": checksum}


def _load(stem: Path, description: dict[str, Any]) -> GPTIndices:
    """Raises ValueError, or what numpy and Python raise, when the files are not what the description says."""
    arrays = {}
    for name in GPTIndices._fields:
        path = _array_path(stem, name)
        values = np.load(path, mmap_mode="r", allow_pickle=False)
        expected, found = description["arrays"][name], _array_facts(values)
        if found != expected:
            raise ValueError(f"{path.name} holds {found}, not {expected}")
        arrays[name] = values
    return GPTIndices(**arrays)


def _store(stem: Path, indices: GPTIndices, facts: dict[str, Any]) -> None:
    arrays = indices._asdict()
    for name, values in arrays.items():
        _write_atomically(_array_path(stem, name), lambda file, values=values: np.save(file, values))
    description = facts | {"arrays": {name: _array_facts(values) for name, values in arrays.items()}}
    text = json.dumps(description, indent=1).encode()
    _write_atomically(_description_path(stem), lambda file: file.write(text))


def _write_atomically(path: Path, write: Callable[[Any], object]) -> None:
    # Not only the process id: on a folder shared between nodes two processes can have the same one.
    temporary = path.with_name(f"{path.name}.tmp.{os.getpid()}.{uuid.uuid4().hex[:8]}")
    try:
        with temporary.open("wb") as file:
            write(file)
            file.flush()
            os.fsync(file.fileno())
        os.replace(temporary, path)
    finally:
        temporary.unlink(missing_ok=True)
