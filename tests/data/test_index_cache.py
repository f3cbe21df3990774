"""Index arrays on disk: same arrays, rebuilt when the data or the entry is not what it was, and safe in a race."""

from __future__ import annotations

import logging
import multiprocessing
import os
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from megalite.data import index_cache
from megalite.data.gpt_dataset import GPTDataset
from megalite.data.gpt_index import GPTIndices, IndexSpec, build_gpt_indices
from megalite.data.index_cache import cached_indices
from megalite.data.indexed import IndexedDataset
from megalite.data.indexed_writer import IndexedDatasetWriter
from megalite.errors import DataError

SPEC = IndexSpec(seq_length=3, num_samples=40, sequence_range=(0, 9), seed=1)


@pytest.fixture
def prefix(tmp_path: Path) -> Path:
    return write(tmp_path / "data" / "corpus", 0)


@pytest.fixture(autouse=True)
def _visible_log(monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> Iterator[None]:
    monkeypatch.setattr(logging.getLogger("megalite"), "propagate", True)
    with caplog.at_level(logging.WARNING, logger="megalite"):
        yield


def write(prefix: Path, offset: int) -> Path:
    with IndexedDatasetWriter(prefix, "uint16") as writer:
        for length in range(1, 10):
            writer.add_document(range(offset, offset + length))
    return prefix


class Builder:
    """Counts how often the arrays were really built."""

    def __init__(self, prefix: Path, spec: IndexSpec = SPEC) -> None:
        self.prefix, self.spec, self.calls = prefix, spec, 0

    def __call__(self) -> GPTIndices:
        self.calls += 1
        return build_gpt_indices(IndexedDataset(self.prefix).sizes, self.spec)

    def cached(self, cache_dir: Path) -> GPTIndices:
        return cached_indices(cache_dir, str(self.prefix), self.spec, self)


def assert_same(one: GPTIndices, other: GPTIndices) -> None:
    for left, right in zip(one, other, strict=True):
        assert left.dtype == right.dtype
        np.testing.assert_array_equal(left, right)


def test_the_second_reader_does_not_build(prefix: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(index_cache, "_MAPPED_BYTES", 0)
    builder, cache_dir = Builder(prefix), tmp_path / "deep" / "cache"
    first, second = builder.cached(cache_dir), builder.cached(cache_dir)
    assert builder.calls == 1
    assert_same(first, second)
    assert_same(first, build_gpt_indices(IndexedDataset(prefix).sizes, SPEC))
    assert all(isinstance(values, np.memmap) for values in second)
    assert not [path for path in cache_dir.rglob("*") if ".tmp." in path.name]


def test_a_dataset_with_a_cache_reads_the_same_samples(prefix: Path, tmp_path: Path) -> None:
    options = {"seq_length": 3, "num_samples": 40, "sequence_range": (0, 9), "seed": 1, "split_name": "train"}
    plain = GPTDataset(IndexedDataset(prefix), cache_dir=None, **options)
    for _ in range(2):
        cached = GPTDataset(IndexedDataset(prefix), cache_dir=tmp_path / "cache", **options)
        assert len(cached) == len(plain)
        for i in range(len(plain)):
            np.testing.assert_array_equal(cached[i].tokens, plain[i].tokens)


@pytest.mark.parametrize(
    "change",
    [
        {"seq_length": 4},
        {"num_samples": 41},
        {"num_samples": None},
        {"sequence_range": (0, 8)},
        {"seed": 2},
        {"add_extra_token": False},
        {"drop_last_partial": False},
        {"separate_last_epoch": False},
    ],
    ids=lambda change: next(iter(change)),
)
def test_every_setting_has_its_own_entry(change: dict, prefix: Path, tmp_path: Path) -> None:
    Builder(prefix).cached(tmp_path / "cache")
    other = Builder(prefix, replace(SPEC, **change))
    other.cached(tmp_path / "cache")
    assert other.calls == 1
    assert len(list((tmp_path / "cache").rglob("*.json"))) == 2


@pytest.mark.parametrize("suffix", ["bin", "idx"])
def test_data_written_again_is_noticed(suffix: str, prefix: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """Requirement 24: same sizes, same settings, another time on one of the files."""
    builder = Builder(prefix)
    builder.cached(tmp_path / "cache")
    path = Path(f"{prefix}.{suffix}")
    status = path.stat()
    os.utime(path, ns=(status.st_atime_ns, status.st_mtime_ns + 1))
    assert not caplog.records
    builder.cached(tmp_path / "cache")
    assert builder.calls == 2
    assert [record.getMessage() for record in caplog.records] == [
        f"{prefix} was written again since its indices were cached: building them again"
    ]
    builder.cached(tmp_path / "cache")
    assert builder.calls == 2


def truncate(path: Path) -> None:
    path.write_bytes(path.read_bytes()[:-1])


def flip(path: Path) -> None:
    content = bytearray(path.read_bytes())
    content[-1] ^= 1
    path.write_bytes(content)


@pytest.mark.parametrize(
    ("pattern", "damage"),
    [
        ("*-document_index.npy", truncate),
        ("*-sample_index.npy", flip),
        ("*-shuffle_index.npy", Path.unlink),
        ("*-shuffle_index.npy", lambda path: path.write_bytes(b"")),
        ("*-sample_index.npy", lambda path: np.save(path, np.zeros((3, 2)))),
        ("*.json", truncate),
        ("*.json", lambda path: path.write_text("[]")),
        ("*.json", lambda path: path.write_text('{"arrays": {}}')),
    ],
)
def test_a_damaged_entry_is_built_again(
    pattern: str, damage: Callable[[Path], object], prefix: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    builder = Builder(prefix)
    expected = build_gpt_indices(IndexedDataset(prefix).sizes, SPEC)
    builder.cached(tmp_path / "cache")
    (path,) = (tmp_path / "cache").rglob(pattern)
    damage(path)
    assert_same(builder.cached(tmp_path / "cache"), expected)
    assert builder.calls == 2
    assert len(caplog.records) == 1
    assert "damaged" in caplog.text
    assert_same(builder.cached(tmp_path / "cache"), expected)
    assert builder.calls == 2


def race(prefix: Path, cache_dir: Path, barrier, results) -> None:
    builder = Builder(prefix)
    barrier.wait(timeout=60)
    for _ in range(5):
        indices = builder.cached(cache_dir)
    results.put([values.tobytes() for values in indices])


def test_processes_that_build_the_same_entry_at_once(prefix: Path, tmp_path: Path) -> None:
    """Requirements 21 and 22: none reads half an entry; with a folder of their own, all would build."""
    context = multiprocessing.get_context("spawn")
    barrier, results = context.Barrier(4), context.Queue()
    workers = [context.Process(target=race, args=(prefix, tmp_path / "cache", barrier, results)) for _ in range(4)]
    for worker in workers:
        worker.start()
    found = [results.get(timeout=90) for _ in workers]
    for worker in workers:
        worker.join(timeout=60)
        assert worker.exitcode == 0
    expected = [values.tobytes() for values in build_gpt_indices(IndexedDataset(prefix).sizes, SPEC)]
    assert found == [expected] * 4
    assert len(list((tmp_path / "cache").rglob("*.*"))) == 4


def test_a_folder_that_cannot_be_written_is_named(prefix: Path, tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(DataError, match=r"cannot write the index cache to .*file"):
        Builder(prefix).cached(tmp_path / "file")


def test_a_folder_of_its_own_is_built_by_whoever_finds_nothing_there(prefix: Path, tmp_path: Path) -> None:
    """Requirement 21: two nodes with local disks."""
    builders = [Builder(prefix), Builder(prefix)]
    for node, builder in enumerate(builders):
        for _ in range(2):
            assert_same(builder.cached(tmp_path / f"node{node}"), build_gpt_indices(IndexedDataset(prefix).sizes, SPEC))
    assert [builder.calls for builder in builders] == [1, 1]


def test_a_file_system_without_locks_builds_all_the_same(prefix: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_: object) -> None:
        raise OSError(95, "Operation not supported")

    monkeypatch.setattr(index_cache.fcntl, "flock", refuse)
    builder = Builder(prefix)
    assert_same(builder.cached(tmp_path / "cache"), builder.cached(tmp_path / "cache"))
    assert builder.calls == 1
