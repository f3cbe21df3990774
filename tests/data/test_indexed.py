"""Indexed files: byte equality with files that Megatron wrote, and refusal of everything that is damaged."""

from __future__ import annotations

import itertools
import json
import pickle
import shutil
import struct
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from megalite.data.indexed import DTYPE_CODES, IndexedDataset, best_dtype
from megalite.data.indexed_writer import IndexedDatasetWriter
from megalite.errors import DataError

GOLDEN = Path(__file__).parents[1] / "golden" / "indexed"
NAMES = sorted(path.stem for path in GOLDEN.glob("*.idx"))
WRITTEN = ["a_uint16", "b_uint16", "c_int32", "sentences_int32"]
MERGED = {
    "merged_a_b_uint16": ("a_uint16", "b_uint16"),
    "merged_sent_c_int32": ("sentences_int32", "c_int32"),
}
SIZES_OFFSET = 34


def facts(name: str) -> dict[str, Any]:
    return json.loads((GOLDEN / f"{name}.json").read_text())


def assert_same_files(prefix: Path, golden: str) -> None:
    for suffix in ("bin", "idx"):
        assert Path(f"{prefix}.{suffix}").read_bytes() == (GOLDEN / f"{golden}.{suffix}").read_bytes(), suffix


def write(prefix: Path, documents: Iterable[list[int]], dtype: str = "uint16") -> Path:
    with IndexedDatasetWriter(prefix, dtype) as writer:
        for document in documents:
            writer.add_document(document)
    return prefix


@pytest.mark.parametrize("name", NAMES)
def test_reads_what_megatron_wrote(name: str) -> None:
    expected, data = facts(name), IndexedDataset(GOLDEN / name)
    assert data.dtype == np.dtype(expected["dtype"])
    assert data.sizes.tolist() == expected["sequence_lengths"]
    assert data.pointers.tolist() == expected["sequence_pointers"]
    assert data.document_indices.tolist() == expected["document_indices"]
    assert (None if data.modes is None else data.modes.tolist()) == expected["sequence_modes"]
    assert len(data) == expected["header_sequence_count"]
    assert data.num_tokens == sum(expected["sequence_lengths"])
    sequences = expected.get("sequences_read_back") or expected["documents"]
    assert [ids.tolist() for ids in data] == sequences
    assert data.max_id() == max(max(ids) for ids in sequences)


@pytest.mark.parametrize("name", WRITTEN)
def test_writes_the_bytes_of_megatron(name: str, tmp_path: Path) -> None:
    expected = facts(name)
    with IndexedDatasetWriter(tmp_path / "new", expected["dtype"]) as writer:
        for document in expected["documents"]:
            for sequence in document if not document or isinstance(document[0], list) else [document]:
                writer.add_sequence(sequence)
            writer.end_document()
    assert_same_files(tmp_path / "new", name)


def test_an_empty_document_has_no_sequence(tmp_path: Path) -> None:
    with IndexedDatasetWriter(tmp_path / "new", np.uint16) as writer:
        writer.add_document([5, 6, 7, 50256])
        writer.add_document([])
        writer.add_sequence(np.array([8, 9]))
        writer.add_sequence(np.array([10, 11, 50256], dtype=np.int32))
        writer.end_document()
        assert (writer.num_documents, writer.num_sequences, writer.num_tokens) == (3, 3, 9)
    assert_same_files(tmp_path / "new", "adddoc_uint16")


@pytest.mark.parametrize("name", MERGED)
def test_merging_equals_writing_everything_at_once(name: str, tmp_path: Path) -> None:
    with IndexedDatasetWriter(tmp_path / "new", facts(name)["dtype"]) as writer:
        for part in MERGED[name]:
            writer.add_index(GOLDEN / part)
    assert_same_files(tmp_path / "new", name)


def test_merging_reads_sequences_where_the_pointers_say(tmp_path: Path) -> None:
    """A file with a gap and with sequences out of order is legal to read; the copy is packed."""
    prefix = write(tmp_path / "old", [[1, 2, 3], [4, 5]])
    index = bytearray(Path(f"{prefix}.idx").read_bytes())
    index[SIZES_OFFSET + 8 : SIZES_OFFSET + 24] = struct.pack("<qq", 6, 0)
    Path(f"{prefix}.idx").write_bytes(index)
    Path(f"{prefix}.bin").write_bytes(np.array([4, 5, 99, 1, 2, 3], dtype="<u2").tobytes())
    assert [ids.tolist() for ids in IndexedDataset(prefix)] == [[1, 2, 3], [4, 5]]
    with IndexedDatasetWriter(tmp_path / "new", "uint16") as writer:
        writer.add_index(prefix)
        writer.add_document([6])
    assert_equal_to(tmp_path / "new", [[1, 2, 3], [4, 5], [6]])
    assert Path(f"{tmp_path / 'new'}.bin").stat().st_size == 12


def assert_equal_to(prefix: Path, documents: list[list[int]]) -> None:
    assert [ids.tolist() for ids in IndexedDataset(prefix)] == documents


def test_merging_refuses_what_it_would_damage(tmp_path: Path) -> None:
    write(tmp_path / "old", [[1, 2]])
    with (
        pytest.raises(DataError, match=r"uint16 ids to .* with int32 ids"),
        IndexedDatasetWriter(tmp_path / "a", "int32") as writer,
    ):
        writer.add_index(tmp_path / "old")
    with pytest.raises(DataError, match="modes"), IndexedDatasetWriter(tmp_path / "a", "int32") as writer:
        writer.add_index(GOLDEN / "multimodal_int32")
    writer = IndexedDatasetWriter(tmp_path / "a", "u2")
    writer.add_sequence([3])
    with pytest.raises(DataError, match=r"1 sequences.*end_document"):
        writer.add_index(tmp_path / "old")
    writer.abort()
    assert sorted(path.name for path in tmp_path.iterdir()) == ["old.bin", "old.idx"]


@settings(max_examples=40, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(
    documents=st.lists(st.lists(st.integers(0, 127), max_size=5), min_size=1, max_size=8).filter(any),
    dtype=st.sampled_from([dtype.name for dtype in DTYPE_CODES.values()]),
)
def test_round_trip_in_every_dtype(tmp_path: Path, documents: list[list[int]], dtype: str) -> None:
    data = IndexedDataset(write(tmp_path / "new", documents, dtype))
    assert data.dtype == np.dtype(dtype)
    assert [ids.tolist() for ids in data] == [document for document in documents if document]
    bounds = data.document_indices.tolist()
    read = [[token for i in range(*pair) for token in data[i].tolist()] for pair in itertools.pairwise(bounds)]
    assert read == documents


def test_parts_of_a_sequence() -> None:
    data = IndexedDataset(GOLDEN / "b_uint16")
    assert data[1].tolist() == [26705, 28689, 30273, 34952, 33210, 0]
    assert data.get(1, 2).tolist() == [30273, 34952, 33210, 0]
    assert data.get(1, 2, 3).tolist() == [30273, 34952, 33210]
    assert data.get(1, 6).tolist() == []
    assert not data[1].flags.writeable
    assert pickle.loads(pickle.dumps(data))[0].tolist() == data[0].tolist()
    for offset, length in ((2, 5), (-1, 2), (7, None), (3, -1)):
        with pytest.raises(DataError, match="sequence 1 has 6 tokens"):
            data.get(1, offset, length)
    for i in (-1, 2):
        with pytest.raises(IndexError, match="2 sequences"):
            data[i]


def edit(position: int, layout: str, value: int) -> Callable[[bytearray], None]:
    return lambda content: struct.pack_into(layout, content, position, value)


def shorten(content: bytearray) -> None:
    del content[-1]


@pytest.mark.parametrize(
    ("suffix", "damage", "message"),
    [
        ("idx", edit(0, "B", 7), "not an indexed dataset"),
        ("idx", bytearray.clear, "not an indexed dataset"),
        ("idx", lambda content: content.__delitem__(slice(20, None)), "cut off: 20 bytes, the header alone has 34"),
        ("idx", edit(9, "<Q", 2), "format version 2"),
        ("idx", edit(17, "B", 0), "dtype code 0"),
        ("idx", edit(17, "B", 9), "dtype code 9"),
        ("idx", edit(18, "<Q", 3), "has 82 bytes, but 3 sequences and 3 document boundaries need 94"),
        ("idx", edit(18, "<Q", 2**63), "has 82 bytes, but"),
        ("idx", shorten, "has 81 bytes"),
        ("idx", edit(SIZES_OFFSET, "<i", -1), "sequence 0 has -1 tokens"),
        ("idx", edit(SIZES_OFFSET + 4, "<i", 7), "sequence 1 has 7 tokens .* at byte 8, but .* has 20 bytes"),
        ("idx", edit(SIZES_OFFSET + 8, "<q", -2), "sequence 0 has 4 tokens .* at byte -2"),
        ("idx", edit(SIZES_OFFSET + 16, "<q", 2**63 - 1), "sequence 1 has 6 tokens"),
        ("idx", edit(SIZES_OFFSET + 24, "<q", 1), "documents from 1 to 2; 2 sequences need 0 to 2"),
        ("idx", edit(SIZES_OFFSET + 32, "<q", 5), "document 1 starts at sequence 5 and ends before it, at 2"),
        ("idx", edit(SIZES_OFFSET + 40, "<q", 1), "documents from 0 to 1"),
        ("bin", shorten, "at byte 8, but .* has 19 bytes"),
        ("bin", bytearray.clear, "has 0 bytes"),
    ],
)
def test_damage_is_found_when_opening(suffix: str, damage: Callable[[bytearray], None], message: str, tmp_path: Path) -> None:
    for name in ("b_uint16.bin", "b_uint16.idx"):
        shutil.copyfile(GOLDEN / name, tmp_path / name)
    path = tmp_path / f"b_uint16.{suffix}"
    content = bytearray(path.read_bytes())
    damage(content)
    path.write_bytes(content)
    with pytest.raises(DataError, match=message) as caught:
        IndexedDataset(tmp_path / "b_uint16")
    assert str(tmp_path / "b_uint16") in str(caught.value)


@pytest.mark.parametrize("missing", ["bin", "idx"])
def test_a_missing_file_is_named(missing: str, tmp_path: Path) -> None:
    prefix = write(tmp_path / "old", [[1]])
    Path(f"{prefix}.{missing}").unlink()
    with pytest.raises(DataError, match=rf"old\.{missing}: no such file"):
        IndexedDataset(prefix)


@pytest.mark.parametrize(
    ("dtype", "ids", "message"),
    [
        ("uint16", [1, 65536], "from 1 to 65536 do not fit uint16"),
        ("uint16", [3, -1], "from -1 to 3 do not fit uint16"),
        ("uint8", np.array([256]), "do not fit uint8"),
        ("int32", [2**31], "do not fit int32"),
        ("int32", [2**70], "whole numbers|not a list of numbers"),
        ("int32", [1.0, 2.0], "whole numbers, not float64"),
        ("int32", ["7"], "whole numbers"),
        ("int32", [[1, 2], [3, 4]], "whole numbers"),
        ("int32", [True], "whole numbers, not bool"),
    ],
)
def test_an_id_that_does_not_fit_is_refused(dtype: str, ids: Any, message: str, tmp_path: Path) -> None:
    """Requirement 11: no id wraps, negative ones included."""
    with pytest.raises(DataError, match=message):
        write(tmp_path / "new", [[1, 2], ids], dtype)
    assert list(tmp_path.iterdir()) == []


def test_the_limits_of_the_dtype_fit(tmp_path: Path) -> None:
    assert_equal_to(write(tmp_path / "new", [[0, 65535]], "uint16"), [[0, 65535]])
    assert_equal_to(write(tmp_path / "new", [[-(2**31), 2**31 - 1]], "int32"), [[-(2**31), 2**31 - 1]])


@pytest.mark.parametrize("documents", [[], [[]], [[], []]])
def test_nothing_is_not_a_dataset(documents: list[list[int]], tmp_path: Path) -> None:
    with pytest.raises(DataError, match=f"{len(documents)} documents and no token"):
        write(tmp_path / "new", documents)
    assert list(tmp_path.iterdir()) == []


def test_an_open_document_is_refused(tmp_path: Path) -> None:
    with pytest.raises(DataError, match="end_document"), IndexedDatasetWriter(tmp_path / "new", "uint16") as writer:
        writer.add_sequence([1])
    assert list(tmp_path.iterdir()) == []


def test_an_exception_keeps_the_old_dataset(tmp_path: Path) -> None:
    prefix = write(tmp_path / "old", [[1, 2]])

    def documents() -> Iterator[list[int]]:
        yield [9]
        raise RuntimeError("worker died")

    with pytest.raises(RuntimeError, match="worker died"):
        write(prefix, documents())
    assert_equal_to(prefix, [[1, 2]])
    assert sorted(path.name for path in tmp_path.iterdir()) == ["old.bin", "old.idx"]
    assert_equal_to(write(prefix, [[3]]), [[3]])


def test_nothing_has_its_final_name_before_the_end(tmp_path: Path) -> None:
    with IndexedDatasetWriter(tmp_path / "deep" / "new", "uint16") as writer:
        writer.add_document([1])
        assert all(".tmp." in path.name for path in (tmp_path / "deep").iterdir())
    assert sorted(path.name for path in (tmp_path / "deep").iterdir()) == ["new.bin", "new.idx"]


def test_dtype_by_largest_id() -> None:
    assert [best_dtype(n).name for n in (0, 65499, 65500, 65535)] == ["uint16"] * 4
    assert [best_dtype(n).name for n in (65536, 2**31 - 1)] == ["int32"] * 2
    for n in (-1, 2**31):
        with pytest.raises(DataError, match=str(n)):
            best_dtype(n)


def test_an_unknown_dtype_is_refused(tmp_path: Path) -> None:
    with pytest.raises(DataError, match="float16"):
        IndexedDatasetWriter(tmp_path / "new", "float16")
