"""Readers: where records end, what compressed and damaged files give, and how chunks are cut."""

from __future__ import annotations

import gzip
import io
import tracemalloc
from pathlib import Path

import pytest
import zstandard
from hypothesis import given
from hypothesis import strategies as st

from megalite.data.documents import Chunk, _split, find_sources, parse_separator, read_chunks, total_bytes
from megalite.errors import ConfigError, DataError

BOM = b"\xef\xbb\xbf"


def read(*inputs: str | Path, separator: bytes | None = None, chunk_bytes: int = 10, stdin: bytes = b"") -> list[Chunk]:
    sources = find_sources([str(name) for name in inputs])
    return list(read_chunks(sources, separator, chunk_bytes, io.BytesIO(stdin)))


def records(*inputs: str | Path, **options) -> list[bytes]:
    return [record for chunk in read(*inputs, **options) for record in chunk.records]


@given(st.lists(st.binary(max_size=6)), st.sampled_from([b"\n", b"ab", b"aab"]))
def test_split_equals_split_of_the_whole(blocks: list[bytes], separator: bytes) -> None:
    expected = b"".join(blocks).split(separator)
    if not expected[-1]:
        expected.pop()
    assert list(_split(blocks, separator)) == expected
    whole = b"".join(blocks)
    assert list(_split(blocks, None)) == ([whole] if whole else [])


def test_records_end_at_newline_only(tmp_path: Path) -> None:
    """Requirement 6."""
    path = tmp_path / "a.jsonl"
    lines = ["one\u2028two\x85three\x0b", "", "four\r", "five"]
    path.write_bytes(BOM + "\n".join(lines).encode())
    assert records(path) == [line.encode() for line in lines]
    path.write_bytes(b"x\n\n")
    assert records(path) == [b"x", b""]
    path.write_bytes(BOM)
    assert records(path) == []


def test_chunks_keep_order_and_line_numbers(tmp_path: Path) -> None:
    path = tmp_path / "a.json"
    path.write_bytes(b"".join(b"%d\n" % number for number in range(1, 500)))
    chunks = read(path, chunk_bytes=7)
    assert len(chunks) > 100
    assert [chunk.where(i) for chunk in chunks for i in range(len(chunk.records))] == [f"{path}:{number}" for number in range(1, 500)]
    assert all(chunk.records[0] == b"%d" % chunk.first for chunk in chunks)


def test_text_files_are_one_document_or_cut_at_separators(tmp_path: Path) -> None:
    path = tmp_path / "a.txt"
    path.write_bytes(BOM + b"one\r\n\n\n\ntwo\n\nthree\n")
    assert records(path) == [b"one\r\n\n\n\ntwo\n\nthree\n"]
    assert records(path, separator=b"\n\n") == [b"one\r", b"", b"two", b"three\n"]
    assert [chunk.where(0) for chunk in read(path, separator=b"\n\n", chunk_bytes=1)][-1] == f"{path}: document 4"
    path.write_bytes(b"")
    assert records(path) == []


@pytest.mark.parametrize("inner", [".jsonl", ".json", ".txt"])
def test_compressed_files(tmp_path: Path, inner: str) -> None:
    """Requirement 8: .gz and .zst, of several members too."""
    content = b"".join(b"%d\n" % number for number in range(200_000))
    whole = tmp_path / f"plain{inner}"
    whole.write_bytes(content)
    half = len(content) // 2
    packed = tmp_path / f"two_members{inner}.gz"
    packed.write_bytes(gzip.compress(content[:half]) + gzip.compress(content[half:]))
    frames = tmp_path / f"two_frames{inner}.zst"
    frames.write_bytes(zstandard.compress(content[:half]) + zstandard.compress(content[half:]))
    expected = records(whole)
    assert records(packed) == expected
    assert records(frames) == expected


def test_compression_is_seen_in_the_content(tmp_path: Path) -> None:
    """Requirement 8: a compressed file without its suffix, and compressed standard input, are read all the same."""
    for packed in (gzip.compress(b"one\ntwo\n"), zstandard.compress(b"one\ntwo\n")):
        (tmp_path / "a.jsonl").write_bytes(packed)
        assert records(tmp_path / "a.jsonl") == records("-", stdin=packed) == [b"one", b"two"]


def test_padding_behind_a_gzip_member_is_no_damage(tmp_path: Path) -> None:
    (tmp_path / "a.jsonl.gz").write_bytes(gzip.compress(b"one\n") + b"\0" * 512)
    assert records(tmp_path / "a.jsonl.gz") == [b"one"]


@pytest.mark.parametrize("suffix", ["", ".gz", ".zst"])
def test_memory_does_not_grow_with_the_file(tmp_path: Path, suffix: str) -> None:
    """Requirement 9: reading 60 MB holds a chunk and a few blocks, compressed or not."""
    content = (b"a line of text " * 100 + b"\n") * 40_000
    pack = {"": bytes, ".gz": lambda data: gzip.compress(data, 1), ".zst": zstandard.compress}[suffix]
    path = tmp_path / f"a.jsonl{suffix}"
    path.write_bytes(pack(content))
    tracemalloc.start()
    count = sum(len(chunk.records) for chunk in read_chunks(find_sources([str(path)]), None, 100_000, None))
    _, peak = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert count == 40_000
    assert peak < (30e6 if suffix == ".zst" else 4e6)  # a kilobyte of zstd data can hold 26 MB, of repetitions such as these


def test_progress_counts_the_bytes_of_the_files(tmp_path: Path) -> None:
    sizes = []
    for name, pack in (("a.jsonl", bytes), ("b.jsonl.gz", gzip.compress)):
        (tmp_path / name).write_bytes(pack(b"".join(b"%d\n" % number for number in range(200_000))))
        sizes.append((tmp_path / name).stat().st_size)
    sources = find_sources([str(tmp_path / "a.jsonl"), str(tmp_path / "b.jsonl.gz")])
    chunks = list(read_chunks(sources, None, 10_000, None))
    assert sum(chunk.consumed for chunk in chunks) == total_bytes(sources) == sum(sizes)
    assert sum(chunk.consumed > 0 for chunk in chunks) > 5  # while it reads, not at the end
    assert total_bytes(find_sources(["-"])) is None


def test_damaged_compressed_files(tmp_path: Path) -> None:
    content = b"some text to compress\n" * 5000
    for suffix, packed in ((".gz", gzip.compress(content)), (".zst", zstandard.compress(content))):
        path = tmp_path / f"a.jsonl{suffix}"
        for damaged in (packed[:-4], packed[: len(packed) // 2], b"plain text", packed + b"trailing junk", b""):
            path.write_bytes(damaged)
            with pytest.raises(DataError, match=rf"a\.jsonl\{suffix}: damaged"):
                records(path)


def test_globs_are_sorted_and_inputs_keep_their_order(tmp_path: Path) -> None:
    for name in ("b.jsonl", "a.jsonl", "c.txt", "deep/d.jsonl", "odd[1].jsonl"):
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_bytes(name.encode())
    assert records(tmp_path / "c.txt", tmp_path / "[ab].jsonl") == [b"c.txt", b"a.jsonl", b"b.jsonl"]
    assert b"deep/d.jsonl" in records(tmp_path / "**" / "*.jsonl")
    assert records(tmp_path / "odd[1].jsonl") == [b"odd[1].jsonl"]  # a file of that name is no glob
    with pytest.raises(DataError, match="no file matches"):
        records(tmp_path / "x*.jsonl")


def test_standard_input() -> None:
    assert records("-", stdin=BOM + b"one\ntwo") == [b"one", b"two"]
    with pytest.raises(ConfigError, match="given twice"):
        find_sources(["-", "-"])
    with pytest.raises(DataError, match="no standard input"):
        list(read_chunks(find_sources(["-"]), None, 10, None))


@pytest.mark.parametrize("name", ["a.csv", "a", "a.gz", "a.jsonl.bz2", "a.JSONL", "a.zst"])
def test_unknown_suffix(tmp_path: Path, name: str) -> None:
    """Requirement 8: an unknown suffix is an error, not zero documents."""
    (tmp_path / name).write_bytes(b"x")
    with pytest.raises(DataError, match=r"must end in .jsonl, .json, .txt"):
        find_sources([str(tmp_path / name)])


def test_missing_files_and_folders(tmp_path: Path) -> None:
    with pytest.raises(DataError, match=r"no\.jsonl does not exist"):
        find_sources([str(tmp_path / "no.jsonl")])
    with pytest.raises(DataError, match="is a folder"):
        find_sources([str(tmp_path)])
    with pytest.raises(ConfigError, match="no input"):
        find_sources([])


def test_separator_escapes() -> None:
    assert parse_separator(r"\n\f\t\r\\é") == "\n\f\t\r\\é".encode()
    assert parse_separator(r"\\n") == b"\\n"
    for wrong in (r"a\q", "a\\"):
        with pytest.raises(ConfigError, match="is no escape"):
            parse_separator(wrong)
    with pytest.raises(ConfigError, match="is empty"):
        parse_separator("")
