"""Preprocessing: the recorded files of Megatron, invalid records, and the same bytes from any number of workers."""

from __future__ import annotations

import json
import logging
from itertools import pairwise
from pathlib import Path

import numpy as np
import pytest

from megalite.data.dataset_meta import meta_path, read_meta
from megalite.data.indexed import IndexedDataset
from megalite.data.indexed_writer import IndexedDatasetWriter, _remove_leftovers
from megalite.data.preprocess import PreprocessOptions, Summary, preprocess
from megalite.data.tokenizer import BytesTokenizer, TokenizerSpec, flatten
from megalite.errors import ConfigError, DataError

GOLDEN = Path(__file__).parents[1] / "golden" / "preprocess"
BYTES = TokenizerSpec("bytes")
HF = TokenizerSpec("hf", str(GOLDEN / "tok_hf_nobos"))
HF_BOS = TokenizerSpec("hf", str(GOLDEN / "tok_hf_bos"))
SENTENCEPIECE = TokenizerSpec("SentencePieceTokenizer", str(GOLDEN / "tok_sp" / "sp.model"))


def run(tmp_path: Path, lines: list[object] | bytes, tokenizer: TokenizerSpec = BYTES, **options) -> Summary:
    """Preprocess JSON lines (objects, or raw bytes) to the prefix tmp_path/out."""
    source = tmp_path / "in.jsonl"
    source.write_bytes(lines if isinstance(lines, bytes) else b"".join(json.dumps(x).encode() + b"\n" for x in lines))
    return preprocess(PreprocessOptions((str(source),), str(tmp_path / "out"), tokenizer, **options))


def documents(prefix: str | Path) -> list[list[list[int]]]:
    """Ids of each sequence of each document."""
    dataset = IndexedDataset(prefix)
    bounds = dataset.document_indices
    return [[dataset[i].tolist() for i in range(a, b)] for a, b in pairwise(bounds)]


def left_over(tmp_path: Path) -> list[str]:
    return sorted(path.name for path in tmp_path.iterdir() if path.name != "in.jsonl")


@pytest.mark.parametrize(
    ("golden", "tokenizer", "options"),
    [
        ("hf_nobos", HF, {"append_eod": True, "json_keys": ("text", "title")}),
        ("hf_nobos_noeod", HF, {}),
        ("hf_bos_nospecial", HF_BOS, {"append_eod": True}),
        ("sp", SENTENCEPIECE, {"append_eod": True}),
    ],
)
@pytest.mark.parametrize("chunk_bytes", [1, 150, 1 << 20])
def test_megatron_files_byte_for_byte(tmp_path, golden: str, tokenizer: TokenizerSpec, options, chunk_bytes) -> None:
    raw = (GOLDEN / "in.jsonl").read_bytes()
    summary = run(tmp_path, raw, tokenizer, chunk_bytes=chunk_bytes, **options)
    for key, prefix in zip(options.get("json_keys", ("text",)), summary.outputs, strict=True):
        assert prefix == str(tmp_path / f"out_{key}_document")
        for suffix in (".bin", ".idx"):
            expected = (GOLDEN / f"{golden}_{key}_document{suffix}").read_bytes()
            assert Path(prefix + suffix).read_bytes() == expected


def test_megatron_with_bos_differs_only_in_the_empty_document(tmp_path: Path) -> None:
    run(tmp_path, (GOLDEN / "in.jsonl").read_bytes(), HF_BOS, append_eod=True, prepend_bos=True)
    expected = documents(GOLDEN / "hf_bos_text_document")
    assert expected[1] == [[0, 1]]  # there BOS and EOD make a document of an empty text
    assert documents(tmp_path / "out_text_document") == [expected[0], [], *expected[2:]]


def test_empty_texts_and_lists(tmp_path: Path) -> None:
    """Requirement 1: an empty text is an empty document without EOD, counted; white space is text."""
    lines = [{"text": text} for text in ("", "a", " ", [], ["", ""], ["b", "", "cd"], "\n")]
    summary = run(tmp_path, lines, append_eod=True)
    assert documents(tmp_path / "out_text_document") == [
        [],
        [[97, 256]],
        [[32, 256]],
        [],
        [],
        [[98], [99, 100, 256]],
        [[10, 256]],
    ]
    counts = summary.counts
    assert (counts.documents, counts.empty, counts.sequences, counts.tokens, counts.skipped) == (7, 3, 5, 10, 0)
    meta = read_meta(tmp_path / "out_text_document")
    assert meta is not None
    assert (meta.tokenizer, meta.vocab_size, meta.eod_id, meta.bos_id) == ("bytes", 257, 256, None)
    assert (meta.documents, meta.empty_documents, meta.sequences, meta.tokens, meta.max_id) == (7, 3, 5, 10, 256)
    assert (meta.append_eod, meta.prepend_bos, meta.dtype) == (True, False, "uint16")


def test_bos_and_eod_are_there_once_for_a_list_of_texts(tmp_path: Path) -> None:
    """Requirements 13 and 14: once each, as ids beside those of the texts alone."""
    run(tmp_path, [{"text": ["fox", "dog"]}], HF_BOS, append_eod=True, prepend_bos=True)
    [[first, second]] = documents(tmp_path / "out_text_document")
    plain = HF_BOS.build().encode_batch(["fox", "dog"])
    assert (first, second) == ([0, *plain[0]], [*plain[1], 1])


def test_lines_are_kept_as_they_are(tmp_path: Path) -> None:
    """Requirements 6 and 7: separators of other kinds are text, a byte order mark is none."""
    text = "a\u2028b\x85c\ufeff\x00 \t\r\n  d\n\n"
    raw = json.dumps({"text": text}, ensure_ascii=False).encode()
    run(tmp_path, b"\xef\xbb\xbf" + raw + b"\r\n\n  \r\n" + raw)
    assert documents(tmp_path / "out_text_document") == [[list(text.encode())]] * 2


INVALID = {
    b'{"text": "a"': r"invalid JSON: .*each line must hold one whole JSON object",
    b"[": "invalid JSON",
    b'{"text": "a"} {"text": "b"}': "invalid JSON: unexpected content after document",
    b'{"text": "\\ud800"}': "invalid JSON: no low surrogate",
    b'{"text": "\xff"}': "not valid UTF-8",
    b'{"title": "a", "x": 1}': "the key 'text' is missing; keys present: 'title', 'x'",
    b"{}": "the key 'text' is missing; keys present: none",
    b'{"text": null}': "the value of 'text' is null, not a text",
    b'{"text": 5}': "the value of 'text' is a number",
    b'{"text": true}': "the value of 'text' is true or false",
    b'{"text": ["a", 1]}': "the value of 'text' is a list with a number",
    b'{"text": {"a": 1}}': "the value of 'text' is an object",
    b'"text"': "the record is a text, not an object with the key 'text'",
    b'["text"]': "the record is a list",
}


@pytest.mark.parametrize(("raw", "workers"), [*((raw, 1) for raw in INVALID), (b"{}", 2), (b"[", 2)])
def test_invalid_record_is_named_and_nothing_is_left(tmp_path: Path, raw: bytes, workers: int) -> None:
    """Requirements 4, 5 and 7: file, line and reason, from any worker."""
    good = b'{"text": "good"}\n'
    with pytest.raises(DataError, match=rf"in\.jsonl:4: .*{INVALID[raw]}"):
        run(tmp_path, good + b"\n" + good + raw + b"\n" + good, workers=workers, chunk_bytes=20)
    assert left_over(tmp_path) == []


def test_invalid_records_are_skipped_and_counted(tmp_path: Path) -> None:
    """Requirement 4: skipping is asked for, and ends with a count."""
    raw = b"".join(b'{"text": "ok"}\n' + bad + b"\n" for bad in INVALID)
    summary = run(tmp_path, raw, skip_invalid=True, append_eod=True)
    assert documents(tmp_path / "out_text_document") == [[[111, 107, 256]]] * len(INVALID)
    assert summary.counts.skipped == len(INVALID)
    assert summary.counts.problem is not None
    assert "in.jsonl:2: invalid JSON" in summary.counts.problem


def test_a_record_is_dropped_from_all_keys(tmp_path: Path) -> None:
    lines = [{"a": "x", "b": "1"}, {"a": "y"}, {"a": "z", "b": "3"}]
    run(tmp_path, lines, json_keys=("a", "b"), skip_invalid=True)
    assert documents(tmp_path / "out_a_document") == [[[ord("x")]], [[ord("z")]]]
    assert documents(tmp_path / "out_b_document") == [[[ord("1")]], [[ord("3")]]]


def test_text_that_the_vocabulary_cannot_express_is_named(tmp_path: Path) -> None:
    (tmp_path / "chars.json").write_text('["a", "b"]')
    spec = TokenizerSpec("chars", str(tmp_path / "chars.json"))
    lines = [{"text": text} for text in ("ab", "ba", "abc", "b")]
    with pytest.raises(DataError, match=r"in\.jsonl:3: character 'c' \(U\+0063\) at position 2"):
        run(tmp_path, lines, spec)
    summary = run(tmp_path, lines, spec, skip_invalid=True, append_eod=True)
    assert documents(tmp_path / "out_text_document") == [[[0, 1, 2]], [[1, 0, 2]], [[1, 2]]]
    assert summary.counts.skipped == 1


def test_text_files(tmp_path: Path) -> None:
    path = tmp_path / "a.txt"
    path.write_bytes("é\n\nb\n\n\n\nc\n".encode())
    options = PreprocessOptions((str(path),), str(tmp_path / "out"), BYTES, document_separator=r"\n\n")
    assert preprocess(options).counts.empty == 1
    assert documents(tmp_path / "out_text_document") == [[list("é".encode())], [[98]], [], [list(b"c\n")]]
    path.write_bytes(b"fine\n\nline\nbad \xff")
    with pytest.raises(DataError, match=r"a\.txt: document 2: not UTF-8: byte 0xff in line 2 of it"):
        preprocess(options)
    with pytest.raises(ConfigError, match="text files have no keys, but 2 keys"):
        preprocess(PreprocessOptions((str(path),), str(tmp_path / "out"), BYTES, json_keys=("a", "b")))


def test_workers_do_not_change_the_output(tmp_path: Path) -> None:
    generator = np.random.default_rng(5)
    words = ["fox", "the", "a  b", "日本", "\n", "<|endoftext|>", ""]
    lines = [{"text": " ".join(generator.choice(words, size=generator.integers(0, 40)))} for _ in range(300)]
    content = {}
    for workers in (1, 2, 3):
        summary = run(tmp_path, lines, HF, append_eod=True, workers=workers, chunk_bytes=300)
        assert summary.counts.documents == 300
        content[workers] = [Path(summary.outputs[0] + suffix).read_bytes() for suffix in (".bin", ".idx", ".meta.json")]
    assert content[1] == content[2] == content[3]


@pytest.mark.parametrize(("mode", "zeros", "count"), [("plain", 0, 0), ("count", 0, 3), ("allow", 3, 3)])
def test_special_spellings(tmp_path: Path, mode: str, zeros: int, count: int) -> None:
    """Requirement 15: plain text by default, counted on demand, control tokens only when allowed."""
    spec = TokenizerSpec("hf", str(GOLDEN / "tok_hf_nobos"), mode)
    summary = run(tmp_path, [{"text": "a<|endoftext|>b<|endoftext|>"}, {"text": "<|endoftext|>"}], spec)
    ids = [token for document in documents(summary.outputs[0]) for sequence in document for token in sequence]
    assert ids.count(0) == zeros
    assert summary.counts.special_strings == count


def test_dtype_follows_the_largest_id(tmp_path: Path) -> None:
    """Requirement 11: uint16 up to id 65535, int32 above."""
    for last, dtype in ((65_535, "uint16"), (65_536, "int32")):
        characters = [chr(code) for code in range(0x20, 0x20 + last + 0x800) if not 0xD800 <= code < 0xE000][:last]
        (tmp_path / "chars.json").write_text(json.dumps(characters))  # EOD is the id after the last character
        summary = run(tmp_path, [{"text": " "}], TokenizerSpec("chars", str(tmp_path / "chars.json")), append_eod=True)
        assert (summary.dtype, summary.eod_id) == (dtype, last)
        assert documents(summary.outputs[0]) == [[[0, last]]]


@pytest.mark.parametrize("lines", [[], [{"text": ""}], [{"text": 1}]])
def test_no_token_is_a_failure(tmp_path: Path, lines: list[object]) -> None:
    """Requirement 3: nothing written is never a success."""
    with pytest.raises(DataError, match="no token was written for key 'text'"):
        run(tmp_path, lines, append_eod=True, skip_invalid=True)
    assert left_over(tmp_path) == []


def test_failure_keeps_the_older_output(tmp_path: Path) -> None:
    run(tmp_path, [{"text": "old"}])
    before = {path: path.read_bytes() for path in tmp_path.glob("out*")}
    with pytest.raises(DataError):
        run(tmp_path, [{"text": "new"}, {}])
    assert {path: path.read_bytes() for path in tmp_path.glob("out*")} == before
    assert len(before) == 3


def test_sizes_and_tokens_agree(tmp_path: Path) -> None:
    """Requirement 2: the sizes in the index include EOD and BOS, and sum to the ids in the .bin."""
    summary = run(tmp_path, [{"text": text} for text in ("fox", "", "dog", ["a", "b"])], HF_BOS, append_eod=True, prepend_bos=True)
    dataset = IndexedDataset(summary.outputs[0])
    size = Path(f"{summary.outputs[0]}.bin").stat().st_size
    assert dataset.sizes.sum() * dataset.dtype.itemsize == size == summary.counts.tokens * 2
    writer = IndexedDatasetWriter(tmp_path / "x", "uint16")
    writer.add_document([1, 2])
    writer._sizes[0] = 1  # as if EOD had come after the length was taken
    with pytest.raises(AssertionError, match="does not cover the tokens"):
        writer.finalize()
    assert not list(tmp_path.glob("x*"))


def test_an_id_outside_the_vocabulary_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Requirement 11: a tokenizer that gives ids beyond its size is found out before an id could wrap."""
    monkeypatch.setattr(BytesTokenizer, "encode_flat", lambda *_: flatten([[97, 65_536 + 97]]))
    with pytest.raises(DataError, match="bytes gave the id 65633, but has only 257 ids"):
        run(tmp_path, [{"text": "a"}])


def test_the_first_problem_is_named_whatever_kind_it_is(tmp_path: Path) -> None:
    (tmp_path / "chars.json").write_text('["a"]')
    spec = TokenizerSpec("chars", str(tmp_path / "chars.json"))
    with pytest.raises(DataError, match=r"in\.jsonl:2: character 'b'"):
        run(tmp_path, b'{"text": "a"}\n{"text": "b"}\n{"text": \n', spec)
    summary = run(tmp_path, b'{"text": "a"}\n{"text": "b"}\n{"text": \n', spec, skip_invalid=True)
    assert summary.counts.problem is not None
    assert "in.jsonl:2: character 'b'" in summary.counts.problem


def test_no_rubbish_of_a_killed_run_stays(tmp_path: Path) -> None:
    for name in (
        "out_text_document.bin.tmp.1",
        "out_text_document.idx.tmp.1",
        "out_text_document.idx.tmp.2",
        "out_text_document.meta.json.tmp.3",
    ):
        (tmp_path / name).write_bytes(b"x")
    (tmp_path / "out_text_document2.bin.tmp.1").write_bytes(b"x")  # of another dataset
    run(tmp_path, [{"text": "a"}])
    assert [path.name for path in tmp_path.glob("*.tmp.*")] == ["out_text_document2.bin.tmp.1"]
    alive = IndexedDatasetWriter(tmp_path / "out_text_document", "uint16")
    _remove_leftovers(tmp_path / "out_text_document")
    assert len(list(tmp_path.glob("*.tmp.*"))) == 2  # that of a living writer stays
    alive.abort()
    assert documents(tmp_path / "out_text_document") == [[[97]]]


def test_wrong_settings(tmp_path: Path) -> None:
    with pytest.raises(ConfigError) as caught:
        run(tmp_path, [], workers=0, chunk_bytes=0, json_keys=("a/b", "a/b"))
    assert len(caught.value.violations) == 4
    with pytest.raises(ConfigError, match="bytes has no beginning-of-sequence token"):
        run(tmp_path, [], prepend_bos=True)


def test_lossy_tokenizer_is_reported_once(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """Requirement 16: the text is not changed by us; a model that changes it is named, once."""
    with caplog.at_level(logging.WARNING, logger="megalite"):
        run(tmp_path, [{"text": "a"}] * 50, SENTENCEPIECE, chunk_bytes=1)
        run(tmp_path, [{"text": "a"}], BYTES)
    assert len(caplog.records) == 1
    assert "repeated spaces" in caplog.text


def test_damaged_side_file(tmp_path: Path) -> None:
    prefix = tmp_path / "x"
    assert read_meta(prefix) is None
    for content in ("{", '{"format": 7}', '{"format": 1}', "[]"):
        meta_path(prefix).write_text(content)
        with pytest.raises(DataError, match=r"x\.meta\.json"):
            read_meta(prefix)
