"""Figures, histogram and verification of datasets; each kind of damage is found and named."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from megalite.data.dataset_meta import read_meta, write_meta
from megalite.data.indexed import IndexedDataset
from megalite.data.indexed_writer import IndexedDatasetWriter
from megalite.data.inspection import document_ids, document_lengths, facts, histogram, histogram_lines, verify
from megalite.data.preprocess import PreprocessOptions, preprocess
from megalite.data.tokenizer import TokenizerSpec
from megalite.data.tokenizer_record import recorded_spec, spec_from_record, tokenizer_sha256
from megalite.errors import DataError

GOLDEN = Path(__file__).parents[1] / "golden"


@pytest.fixture
def prefix(tmp_path: Path) -> str:
    (tmp_path / "in.jsonl").write_text('{"text": "abc"}\n{"text": ""}\n{"text": ["de", "f"]}\n')
    return preprocess(
        PreprocessOptions((str(tmp_path / "in.jsonl"),), str(tmp_path / "o"), TokenizerSpec("bytes"), append_eod=True)
    ).outputs[0]


def test_figures(prefix: str) -> None:
    dataset = IndexedDataset(prefix)
    known = facts(dataset)
    assert (known.documents, known.empty_documents, known.sequences, known.tokens, known.bin_bytes) == (3, 1, 3, 8, 16)
    assert document_lengths(dataset).tolist() == [4, 0, 4]
    assert (known.percentiles["p0"], known.percentiles["p50"], known.percentiles["p100"], known.dtype) == (0, 4, 4, "uint16")
    assert [ids.tolist() for ids in document_ids(dataset, 2)] == [[100, 101], [102, 256]]
    assert document_ids(dataset, 1) == []
    for number in (-1, 3):
        with pytest.raises(IndexError, match="documents 0 to 2"):
            document_ids(dataset, number)


@pytest.mark.parametrize("lengths", [[], [0], [7], [0, 0, 3], [1, 2, 3, 1000], [0, 5, 10**6], list(range(200)), [500, 5000, 5001]])
def test_every_document_is_in_one_bin(lengths: list[int]) -> None:
    counts, edges = histogram(np.array(lengths, dtype=np.int64))
    assert counts.sum() == len(lengths)
    assert np.all(np.diff(edges) > 0)
    assert len(histogram_lines(np.array(lengths, dtype=np.int64))) == len(counts) <= 22


@pytest.mark.parametrize("name", ["a_uint16", "c_int32", "sentences_int32", "multimodal_int32", "merged_sent_c_int32"])
def test_megatron_files_are_sound(name: str) -> None:
    assert verify(IndexedDataset(GOLDEN / "indexed" / name), None).problems == []


def test_damage_is_named(prefix: str) -> None:
    def problems() -> str:
        return "; ".join(verify(IndexedDataset(prefix), read_meta(prefix)).problems)

    assert problems() == ""
    path = Path(f"{prefix}.bin")
    content = path.read_bytes()
    path.write_bytes(content[:4] + b"\x00\x02" + content[6:])  # id 512
    assert "id 512, but the vocabulary of bytes ends at 256" in problems()
    path.write_bytes(content[:4] + b"\x00\x00" + content[6:])
    assert problems().startswith("bin_sha256 is")
    path.write_bytes(content + b"\x01\x00\x02")
    assert "the .bin has 19 bytes and the sequences of the index need 16" in problems()
    path.write_bytes(content)
    index = Path(f"{prefix}.idx")
    original = index.read_bytes()
    index.write_bytes(original[:46] + original[54:62] + original[46:54] + original[62:])  # the first two pointers change places
    assert "do not follow one another" in problems()
    index.write_bytes(original)
    meta = read_meta(prefix)
    assert meta is not None
    write_meta(prefix, replace(meta, documents=4, max_id=255))
    assert "documents is 3, but the side file says 4" in problems()
    assert "max_id is 256, but the side file says 255" in problems()


def test_negative_ids_are_found(tmp_path: Path) -> None:
    with IndexedDatasetWriter(tmp_path / "x", "int32") as writer:
        writer.add_document([3, -4])
    result = verify(IndexedDataset(tmp_path / "x"), None)
    assert result.problems == ["there is a negative id: -4"]
    assert (result.min_id, result.max_id) == (-4, 3)


def test_the_tokenizer_is_recorded(tmp_path: Path) -> None:
    spec = TokenizerSpec("hf", str(GOLDEN / "preprocess" / "tok_hf_nobos"), "count")
    assert spec_from_record(recorded_spec(spec)) == spec
    same_ids = replace(spec, special_tokens_in_text="plain", backend="reference")
    assert tokenizer_sha256(spec) == tokenizer_sha256(same_ids)
    others = [replace(spec, special_tokens_in_text="allow"), replace(spec, eod_token="x"), TokenizerSpec("bytes")]
    others.append(replace(spec, tokenizer_model=str(GOLDEN / "preprocess" / "tok_hf_bos")))
    assert len({tokenizer_sha256(other) for other in [spec, *others]}) == 5
    with pytest.raises(DataError, match="record of its tokenizer is damaged"):
        spec_from_record({"nothing": 1})
