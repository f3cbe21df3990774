"""What the files of a checkpoint were when they were written, so that a damaged one is never trained on.

The checkpoint library notices a file that is cut short, not one with changed bytes: such a tensor loads without a word. So the
manifest holds the size and the CRC-32 of every file beside it. Sizes are compared wherever a checkpoint is looked for, which costs
nothing; contents are compared once before loading, each rank reading its share of the files.
"""

from __future__ import annotations

import zlib
from collections.abc import Mapping
from pathlib import Path

from megalite import comm
from megalite.errors import CheckpointError
from megalite.grid import Axis

__all__ = ["check_contents", "describe_files", "size_problems"]

_PIECE = 1 << 22  # bytes read at a time


def describe_files(directory: Path, world: Axis) -> dict[str, dict[str, int]]:
    """{file name: {"size": bytes, "crc32": ...}} of all files in `directory`. Collective. Raises CheckpointError on every rank."""
    names = comm.broadcast_object(sorted(path.name for path in directory.iterdir()) if world.is_first else None, world)
    facts: dict[str, dict[str, int]] = {}
    failures = []
    for part, failure in comm.all_gather_object(_describe_share(directory, names[world.rank :: world.size]), world):
        facts |= part
        failures += failure
    if failures:
        raise CheckpointError("what was just saved cannot be read back: " + "; ".join(failures))
    return facts


def _describe_share(directory: Path, names: list[str]) -> tuple[dict[str, dict[str, int]], list[str]]:
    facts, failures = {}, []
    for name in names:
        try:
            facts[name] = {"size": (directory / name).stat().st_size, "crc32": _crc32(directory / name)}
        except OSError as error:
            failures.append(str(error))
    return facts, failures


def size_problems(directory: Path, files: Mapping[str, Mapping[str, int]]) -> list[str]:
    """One sentence per file of the manifest that is missing or has another size."""
    found = []
    for name, facts in sorted(files.items()):
        path = directory / name
        if not path.is_file():
            found.append(f"{name} is missing")
        elif path.stat().st_size != facts["size"]:
            found.append(f"{name} has {path.stat().st_size:,} bytes, {facts['size']:,} were written")
    return found


def check_contents(directory: Path, files: Mapping[str, Mapping[str, int]], world: Axis) -> None:
    """Compare every file with the manifest. Collective over `world`. Raises CheckpointError on every rank, naming the files."""
    mine = sorted(files)[world.rank :: world.size]
    found = size_problems(directory, {name: files[name] for name in mine})
    if not found:
        found = [problem for name in mine for problem in _content_problems(directory / name, files[name]["crc32"])]
    found = [problem for part in comm.all_gather_object(found, world) for problem in part]
    if found:
        raise CheckpointError(f"{directory} is damaged: {'; '.join(found)}. Load an older checkpoint, or copy these files again")


def _content_problems(path: Path, crc32: int) -> list[str]:
    try:
        found = _crc32(path)
    except OSError as error:
        return [str(error)]
    return [] if found == crc32 else [f"the bytes of {path.name} are not the ones that were written"]


def _crc32(path: Path) -> int:
    value = 0
    with path.open("rb") as file:
        while piece := file.read(_PIECE):
            value = zlib.crc32(piece, value)
    return value
