"""Merging: byte-identical to preprocessing everything at once, in bounded memory, and refusal of unlike inputs."""

from __future__ import annotations

import json
import shutil
import tracemalloc
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from megalite.data.dataset_meta import meta_path, read_meta, write_meta
from megalite.data.indexed import IndexedDataset
from megalite.data.indexed_writer import IndexedDatasetWriter
from megalite.data.merge import find_prefixes, merge
from megalite.data.preprocess import PreprocessOptions, preprocess
from megalite.data.tokenizer import TokenizerSpec
from megalite.errors import ConfigError, DataError

GOLDEN = Path(__file__).parents[1] / "golden"
HF = TokenizerSpec("hf", str(GOLDEN / "preprocess" / "tok_hf_nobos"))
SUFFIXES = (".bin", ".idx", ".meta.json")


def dataset(folder: Path, name: str, texts: list[object], tokenizer: TokenizerSpec = HF, **options) -> str:
    source = folder / f"{name}.jsonl"
    source.write_text("".join(json.dumps({"text": text}) + "\n" for text in texts))
    return preprocess(PreprocessOptions((str(source),), str(folder / name), tokenizer, **options)).outputs[0]


@pytest.mark.parametrize("options", [{}, {"append_eod": True}])
def test_merging_equals_preprocessing_the_concatenation(tmp_path: Path, options: dict) -> None:
    """Requirement 17: all three files have the bytes of one run over all texts, empty documents and lists included."""
    parts = [["fox", "", "a  b"], [["x", "", "y"], []], ["日本\u2028"], ["z"] * 20]
    prefixes = [dataset(tmp_path, f"part{number}", texts, **options) for number, texts in enumerate(parts)]
    whole = dataset(tmp_path, "whole", [text for texts in parts for text in texts], **options)
    meta = merge(prefixes, str(tmp_path / "merged"))
    for suffix in SUFFIXES:
        assert Path(f"{tmp_path}/merged{suffix}").read_bytes() == Path(whole + suffix).read_bytes(), suffix
    assert meta is not None
    assert (meta.documents, meta.empty_documents) == (26, 2)


def test_megatron_folder_in_sorted_order(tmp_path: Path) -> None:
    """The golden result of Megatron's add_index; string order puts x_10 before x_2."""
    for name, golden in (("x_10", "a_uint16"), ("x_2", "b_uint16")):
        for suffix in (".bin", ".idx"):
            shutil.copyfile(GOLDEN / "indexed" / f"{golden}{suffix}", tmp_path / f"{name}{suffix}")
    prefixes = find_prefixes(tmp_path)
    assert [Path(prefix).name for prefix in prefixes] == ["x_10", "x_2"]
    assert merge(prefixes, str(tmp_path / "out" / "m")) is None
    for suffix in (".bin", ".idx"):
        assert (tmp_path / "out" / f"m{suffix}").read_bytes() == (GOLDEN / "indexed" / f"merged_a_b_uint16{suffix}").read_bytes()
    assert not meta_path(tmp_path / "out" / "m").exists()
    (tmp_path / "x_2.bin").unlink()
    with pytest.raises(DataError, match="x_2 has only one of its two files"):
        find_prefixes(tmp_path)
    with pytest.raises(DataError, match="holds no pair"):
        find_prefixes(GOLDEN / "hf")


def test_merging_streams(tmp_path: Path) -> None:
    """Requirement 9: the tokens of an input are never in memory."""
    prefixes = [str(tmp_path / name) for name in "ab"]
    for prefix in prefixes:
        with IndexedDatasetWriter(prefix, "uint16") as writer:
            writer.add_document(np.arange(6_000_000) % 60_000)
    tracemalloc.start()
    merge(prefixes, str(tmp_path / "m"))
    _, peak = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert peak < 10e6  # blocks of 4 MB; each input has 12 MB
    assert IndexedDataset(tmp_path / "m").num_tokens == 12_000_000


def test_unlike_inputs_are_refused_with_both_values(tmp_path: Path) -> None:
    a = dataset(tmp_path, "a", ["fox"], append_eod=True)
    characters = [chr(0x10000 + number) for number in range(66_000)]
    (tmp_path / "chars.json").write_text(json.dumps(characters))
    wide = dataset(tmp_path, "wide", [characters[0]], TokenizerSpec("chars", str(tmp_path / "chars.json")))
    with pytest.raises(DataError, match=r"a_text_document holds uint16 ids and .*wide_text_document holds int32 ids"):
        merge([a, wide], str(tmp_path / "m"))
    other = TokenizerSpec("hf", str(GOLDEN / "preprocess" / "tok_hf_bos"))
    b = dataset(tmp_path, "b", ["fox"], other, append_eod=True)
    with pytest.raises(DataError, match=r"hf:tok_hf_nobos\) and .*hf:tok_hf_bos\) do not belong together: tokenizer_sha256 is \w+ and \w+"):
        merge([a, b], str(tmp_path / "m"))
    c = dataset(tmp_path, "c", ["fox"])
    with pytest.raises(DataError, match="append_eod is True and False"):
        merge([a, c], str(tmp_path / "m"))
    meta = read_meta(b)
    assert meta is not None
    write_meta(b, replace(meta, tokenizer_sha256=None))  # as older versions wrote it
    with pytest.raises(DataError, match="tokenizer is hf:tok_hf_nobos and hf:tok_hf_bos"):
        merge([a, b], str(tmp_path / "m"))
    assert not list(tmp_path.glob("m*"))


def test_wrong_names_and_side_files(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    a, b = (dataset(tmp_path, name, ["fox"]) for name in "ab")
    for prefixes, output, message in (
        ([], "m", "nothing to merge"),
        ([a, a], "m", "is given twice"),
        ([a, b], a, "is one of the inputs"),
    ):
        with pytest.raises(ConfigError, match=message):
            merge(prefixes, str(tmp_path / output))
    meta_path(b).unlink()
    assert merge([a, b], str(tmp_path / "m")) is None
    assert "1 of 2 inputs have no .meta.json" in caplog.text
    meta = read_meta(a)
    assert meta is not None
    write_meta(b, replace(meta, tokens=99))
    with pytest.raises(DataError, match="one of them belongs to other data"):
        merge([a, b], str(tmp_path / "m2"))
    assert not list(tmp_path.glob("m2*"))
