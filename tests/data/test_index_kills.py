"""A builder killed at any moment leaves a complete entry of the index cache or none (requirement 22).

`python -m tests.data.test_index_kills 200` tries so many moments; the test tries a few.
"""

from __future__ import annotations

import signal
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import numpy as np

from megalite.data.gpt_index import GPTIndices, IndexSpec, build_gpt_indices
from megalite.data.index_cache import cached_indices
from megalite.data.indexed import IndexedDataset
from megalite.data.indexed_writer import IndexedDatasetWriter

NUM_DOCUMENTS = 20_000
SPEC = IndexSpec(seq_length=2, num_samples=NUM_DOCUMENTS * 3, sequence_range=(0, NUM_DOCUMENTS), seed=1)


def write(folder: Path) -> Path:
    with IndexedDatasetWriter(folder / "corpus", "uint16") as writer:
        for _ in range(NUM_DOCUMENTS):
            writer.add_document((1, 2, 3))
    return folder / "corpus"


def build(prefix: Path, cache: Path) -> GPTIndices:
    sizes = IndexedDataset(prefix).sizes
    return cached_indices(cache, str(prefix), SPEC, lambda: build_gpt_indices(sizes, SPEC))


def kill_after(seconds: float, prefix: Path, cache: Path) -> bool:
    """Build in a process of its own and kill it so long after it has begun; whether it was still alive."""
    command = [sys.executable, "-m", "tests.data.test_index_kills", "--build", str(prefix), str(cache)]
    with subprocess.Popen(command, cwd=Path(__file__).parents[2], stdout=subprocess.PIPE) as child:
        assert child.stdout is not None
        child.stdout.readline()
        time.sleep(seconds)
        child.kill()
    return child.returncode == -signal.SIGKILL


def try_moments(num_moments: int, folder: Path) -> tuple[int, int]:
    """Kill at moments spread over a build, each in a fresh folder; returns (killed while building, entries left)."""
    prefix = write(folder)
    started = time.perf_counter()
    expected = build(prefix, folder / "whole")
    duration, num_killed, num_complete = time.perf_counter() - started, 0, 0
    names = sorted(path.name for path in (folder / "whole").rglob("*.*"))
    for moment in range(num_moments):
        cache = folder / f"cache{moment}"
        num_killed += kill_after(1.2 * duration * (moment + 0.5) / num_moments, prefix, cache)
        num_complete += any(cache.rglob("*.json"))
        if any(cache.rglob("*.json")):
            assert sorted(path.name for path in cache.rglob("*.*") if ".tmp." not in path.name) == names
        for found, wanted in zip(build(prefix, cache), expected, strict=True):
            np.testing.assert_array_equal(found, wanted)
        assert sorted(path.name for path in cache.rglob("*.*")) == names, "the next builder removes what the killed one left"
    return num_killed, num_complete


def test_a_killed_builder_leaves_an_entry_or_none(tmp_path: Path) -> None:
    num_killed, _ = try_moments(8, tmp_path)
    assert num_killed >= 2


if __name__ == "__main__" and "--build" in sys.argv:
    print("building", flush=True)
    build(Path(sys.argv[2]), Path(sys.argv[3]))
elif __name__ == "__main__":
    with tempfile.TemporaryDirectory() as folder:
        moments = int(sys.argv[1]) if len(sys.argv) > 1 else 200
        killed, complete = try_moments(moments, Path(folder))
        print(f"{moments} moments: {killed} killed while building, {complete} complete entries, the others rebuilt")
