"""Where a run writes: tried before anything is built, and never over another run's checkpoints."""

from __future__ import annotations

import os
import tempfile
from collections.abc import Callable
from pathlib import Path

from megalite.checkpoint import complete_checkpoints, read_manifest
from megalite.config import OutputConfig
from megalite.errors import CheckpointError, ConfigError

__all__ = ["check_outputs", "check_save_folder", "drop_torn_line"]


def check_outputs(output: OutputConfig) -> None:
    """Make the folders of `output` and try to write there. For the rank that writes. Raises ConfigError with everything that failed."""
    found = []
    for name, try_it in _trials(output):
        try:
            try_it()
        except OSError as error:
            found.append(f"{name} {getattr(output, name)} cannot be written: {error.strerror or error}; choose another path")
    if found:
        raise ConfigError(found)


def _trials(output: OutputConfig) -> list[tuple[str, Callable[[], None]]]:
    folders = [(name, path) for name in ("save", "tensorboard_dir", "probe_dir") if (path := getattr(output, name)) is not None]
    files = [(name, path) for name in ("metrics_file", "trace_pipeline") if (path := getattr(output, name)) is not None]
    trials: list[tuple[str, Callable[[], None]]] = [(name, lambda path=path: _try_folder(Path(path))) for name, path in folders]
    return trials + [(name, lambda path=path: _try_file(Path(path))) for name, path in files]


def _try_folder(folder: Path) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryFile(dir=folder):
        pass


def _try_file(file: Path) -> None:
    file.parent.mkdir(parents=True, exist_ok=True)
    is_new = not file.exists()
    with file.open("a"):
        pass
    if is_new:
        os.unlink(file)


def drop_torn_line(file: Path) -> None:
    """Cut off what a killed run left of its last line, so that a file of lines can be continued. Whole lines stay."""
    if not file.exists():
        return
    with file.open("r+b") as lines:
        content = lines.read()
        whole = content.rfind(b"\n") + 1
        if content[whole:].startswith(b"{"):  # anything else is not ours to delete
            lines.truncate(whole)


def check_save_folder(folder: Path, step: int) -> None:
    """Refuse a folder that holds checkpoints of later steps than `step`, where this run starts: it would write between or over them.

    Raises CheckpointError.
    """
    later = [checkpoint for checkpoint in complete_checkpoints(folder) if read_manifest(checkpoint).step > step]
    if later:
        raise CheckpointError(
            f"--save {folder} holds checkpoints up to {later[0].name} of an earlier run, and this run starts at step {step}: continue that "
            f"run with --load {folder}, give --save another folder, or move the later checkpoints away"
        )
