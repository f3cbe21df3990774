"""The manifest: what a checkpoint holds, as JSON beside the tensors.

It is written last inside the checkpoint's directory, so a directory without a readable manifest is not a checkpoint.
"""

from __future__ import annotations

import json
import os
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from megalite.errors import CheckpointError

__all__ = ["FORMAT_VERSION", "MANIFEST_NAME", "Manifest", "read_manifest", "write_atomically"]

FORMAT_VERSION = 1
MANIFEST_NAME = "manifest.json"


@dataclass(frozen=True, kw_only=True)
class Manifest:
    """step: steps made; consumed_samples: position in the data; numerics: {"skipped_steps", "skipped_samples", and what the guard keeps
    (loss scale, last losses and norms)}; config: the run's resolved configuration;
    tensors: {logical name: {"shape": [...], "dtype": "float32", "hash": ...}} (hash: of the content, `hashes.py`; older
    checkpoints have none); made_of: the checkpoints that a tool made this one of; layout: how the writer was laid out (information only);
    versions: of torch and megalite; files: {file name: {"size": bytes, "crc32": ...}} of the files beside the manifest (`files.py`)."""

    step: int
    consumed_samples: int
    config: dict[str, Any]
    tensors: dict[str, dict[str, Any]]
    layout: dict[str, int] = field(default_factory=dict)
    versions: dict[str, str] = field(default_factory=dict)
    files: dict[str, dict[str, int]] = field(default_factory=dict)
    numerics: dict[str, Any] = field(default_factory=dict)
    made_of: list[str] = field(default_factory=list)
    format_version: int = FORMAT_VERSION

    def to_json(self) -> str:
        return json.dumps(asdict(self), indent=1, sort_keys=True) + "\n"


def read_manifest(checkpoint: Path) -> Manifest:
    """Raises CheckpointError when the manifest is missing, unreadable or of an unknown format."""
    path = checkpoint / MANIFEST_NAME
    try:
        values = json.loads(path.read_text())
    except FileNotFoundError:
        raise CheckpointError(f"{checkpoint} is not a complete checkpoint: it has no {MANIFEST_NAME}") from None
    except (OSError, ValueError) as error:
        raise CheckpointError(f"{path} cannot be read: {error}") from error
    version = values.get("format_version") if isinstance(values, dict) else None
    if version != FORMAT_VERSION:
        raise CheckpointError(f"{path} has format version {version}; this megalite reads version {FORMAT_VERSION}")
    try:
        manifest = Manifest(**values)
    except TypeError as error:
        raise CheckpointError(f"{path} is damaged: {error}") from error
    problems = _problems(manifest)
    if problems:
        raise CheckpointError(f"{path} is damaged: {'; '.join(problems)}")
    return manifest


def _problems(manifest: Manifest) -> list[str]:
    """What has not the type or the range that this format says."""
    found = []
    for name in ("step", "consumed_samples"):
        value = getattr(manifest, name)
        if type(value) is not int or value < 0:
            found.append(f"{name} is {value!r}, a whole number of 0 or more is wanted")
    if type(manifest.config) is not dict:
        found.append("config is not a table of settings")
    if type(manifest.numerics) is not dict:
        found.append("numerics is not a table")
    for name, keys in (("tensors", {"shape", "dtype"}), ("files", {"size", "crc32"})):
        table = getattr(manifest, name)
        if type(table) is not dict:
            found.append(f"{name} is not a table")
        else:
            found += [
                f"{name}: {key} has not the entries {' and '.join(sorted(keys))}"
                for key, facts in table.items()
                if type(facts) is not dict or not keys <= facts.keys()
            ]
    return found


def write_atomically(path: Path, text: str) -> None:
    """Make `path` hold `text`, or leave it as it was: temporary file, fsync, rename, fsync of the directory."""
    temporary = path.with_name(f".{path.name}.{os.getpid()}.tmp")
    with temporary.open("w") as file:
        file.write(text)
        file.flush()
        os.fsync(file.fileno())
    os.replace(temporary, path)
    sync_directory(path.parent)


def sync_directory(directory: Path) -> None:
    """Make renames inside `directory` durable."""
    handle = os.open(directory, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)
