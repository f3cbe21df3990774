"""Index arrays on disk, so that a restart reads in a second what took minutes to build.

An entry is some `.npy` files and one `.json` that describes them. Its folder is named by a digest of the settings, its
files by a digest of these and of the name, size and modification time of the data files they were built from: data
written again in place gets another name, and old entries are never taken for new ones.

Any number of processes may want the same entry at once. Where the file system has locks, one builds and the others wait
for it; where it has none, all build, and write the same bytes. Each writes temporary files and renames them, the `.json`
last, so that whoever is killed leaves no entry rather than half of one; the temporary files it leaves are removed by the
next builder of the entry. So the cache may be shared by all nodes, or be a local one of each node: who does not find an
entry builds it.

A reader believes an entry only after comparing types, shapes and checksums, and otherwise builds it again. That is also
why nothing waits for the disk: what a power failure takes away is noticed and built again, and a blend of a thousand
datasets would wait four thousand times.

Old entries are not deleted: another run may have them mapped. The folder may be deleted whenever nothing runs.
"""

from __future__ import annotations

import fcntl
import hashlib
import json
import logging
import os
import uuid
import zlib
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict
from pathlib import Path
from typing import Any

import numpy as np

from megalite.data.gpt_index import GPTIndices, IndexSpec
from megalite.data.indexed import bin_path, index_path
from megalite.errors import DataError

__all__ = ["cached_arrays", "cached_indices"]

_FORMAT = 2  # raise it when the same settings would give other arrays
_CHECKSUM_BYTES = 1 << 24
_MAPPED_BYTES = 1 << 20  # smaller arrays are read: a mapping costs an open file, and a blend may have thousands of datasets

log = logging.getLogger("megalite")


def cached_indices(cache_dir: Path, path_prefix: str, spec: IndexSpec, build: Callable[[], GPTIndices]) -> GPTIndices:
    """The arrays of `build()`, read from `cache_dir`; built and stored first where they are not there yet.

    Raises DataError when the dataset's files or the cache folder cannot be used.
    """
    settings = {"spec": asdict(spec), "path": str(Path(path_prefix).resolve())}
    files = [index_path(path_prefix), bin_path(path_prefix)]
    return GPTIndices(*cached_arrays(cache_dir, path_prefix, settings, files, GPTIndices._fields, build))


def cached_arrays(
    cache_dir: Path,
    subject: str,
    settings: dict[str, Any],
    files: Sequence[Path],
    names: Sequence[str],
    build: Callable[[], Sequence[np.ndarray]],
) -> list[np.ndarray]:
    """The arrays `names` that `build()` makes from `settings` and the contents of `files`, kept in `cache_dir`.

    `subject` names what they are of. Large ones are mapped, small ones read. Raises DataError when a file or the
    cache folder cannot be used.
    """
    facts = {"format": _FORMAT, **settings}
    family = f"{Path(subject).name}-{_digest(facts)}"
    facts["files"] = [_file_facts(path) for path in files]
    stem = cache_dir / family / _digest(facts)
    try:
        found = _find(stem, names)
        if found is not None:
            return found
        stem.parent.mkdir(parents=True, exist_ok=True)
        with _only_builder(stem.parent) as is_only:
            found = _find(stem, names)  # another process may have built it while this one waited
            if found is not None:
                return found
            if is_only:
                for leftover in stem.parent.glob("*.tmp.*"):
                    leftover.unlink(missing_ok=True)
            _announce(stem, cache_dir, subject)
            _store(stem, dict(zip(names, build(), strict=True)), facts)
            return _load(stem, _read_description(stem) or {}, names)
    except OSError as error:
        raise DataError(
            f"cannot write the index cache to {cache_dir}: {error}; choose another folder, or none to build in memory"
        ) from error


def _find(stem: Path, names: Sequence[str]) -> list[np.ndarray] | None:
    """The entry's arrays; None when there is no entry, or a damaged one."""
    description = _read_description(stem)
    if description is None:
        return None
    try:
        return _load(stem, description, names)
    except Exception:  # whatever damage does to a reader, the remedy is to build the arrays again
        log.debug("cannot read the cached indices %s", stem, exc_info=True)
        return None


def _announce(stem: Path, cache_dir: Path, subject: str) -> None:
    """One line that says why the arrays are built."""
    if _read_description(stem) is not None:
        log.warning("the cached indices %s are damaged: building them again", stem)
    elif any(stem.parent.glob("*.json")):
        log.warning("%s was written again since its indices were cached: building them again", subject)
    else:
        log.info("building the indices of %s into %s", subject, cache_dir)


@contextmanager
def _only_builder(place: Path) -> Iterator[bool]:
    """Wait until no other process builds into the folder `place`; False where the file system has no locks.

    The system releases the lock of a process that is killed.
    """
    folder = os.open(place, os.O_RDONLY)
    try:
        try:
            fcntl.flock(folder, fcntl.LOCK_EX)
            is_only = True
        except OSError:
            is_only = False
        yield is_only
    finally:
        os.close(folder)


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


def _load(stem: Path, description: dict[str, Any], names: Sequence[str]) -> list[np.ndarray]:
    """Raises ValueError, or what numpy and Python raise, when the files are not what the description says."""
    arrays = []
    for name in names:
        path, expected = _array_path(stem, name), description["arrays"][name]
        mapped = path.stat().st_size >= _MAPPED_BYTES
        values = np.load(path, mmap_mode="r" if mapped else None, allow_pickle=False)
        found = _array_facts(values)
        if found != expected:
            raise ValueError(f"{path.name} holds {found}, not {expected}")
        arrays.append(values)
    return arrays


def _store(stem: Path, arrays: dict[str, np.ndarray], facts: dict[str, Any]) -> None:
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
        os.replace(temporary, path)
    except BaseException:
        temporary.unlink(missing_ok=True)
        raise
