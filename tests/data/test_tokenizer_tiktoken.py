"""tiktoken files in both forms: the library's ids, control tokens, and refusal of what would give wrong ids."""

from __future__ import annotations

import base64
import json
from pathlib import Path

import pytest

from megalite.data.preprocess import PreprocessOptions, preprocess
from megalite.data.tokenizer import TokenizerSpec, build_tokenizer, find_losses
from megalite.data.tokenizer_tiktoken import PATTERNS
from megalite.errors import ConfigError, DataError

tiktoken = pytest.importorskip("tiktoken")
MERGED = [b"th", b"the", b" the", b"in", b"ing", b" f", b"ox", b" fox", b"  ", b"\n\n", b"\xc3\xa9", b"12", b"123", b"'s"]
PIECES = [*(bytes([byte]) for byte in range(256)), *MERGED]
RANKS = {piece: rank for rank, piece in enumerate(PIECES)}
HARD = [
    "",
    "the fox's thing",
    "  the\n\n\tthing 1234",
    "é e\u0301 日本 🙂\u2028\x00",
    "THE <|end|></s><SPECIAL_9> x",
    "a" * 5000,
    " " * 500,
]


def plain_file(folder: Path, name: str = "my.tiktoken", pieces: list[bytes] = PIECES, **settings: object) -> Path:
    path = folder / name
    path.write_bytes(b"".join(b"%s %d\n" % (base64.b64encode(piece), rank) for rank, piece in enumerate(pieces)))
    if settings:
        (folder / f"{name}.json").write_text(json.dumps(settings))
    return path


def json_file(folder: Path, pieces: list[bytes] = PIECES) -> Path:
    entries = [{"rank": n, "token_bytes": base64.b64encode(p).decode(), "token_str": None} for n, p in enumerate(pieces)]
    (folder / "vocab.json").write_text(json.dumps(entries))
    return folder / "vocab.json"


@pytest.mark.parametrize("pattern", sorted(PATTERNS))
def test_plain_form_has_the_ids_of_the_library(tmp_path: Path, pattern: str) -> None:
    specials = {"<|end|>": 300}
    path = plain_file(tmp_path, pattern=pattern, special_tokens=specials, eod_token="<|end|>")
    tokenizer = build_tokenizer("tiktoken", path)
    library = tiktoken.Encoding("x", pat_str=PATTERNS[pattern], mergeable_ranks=RANKS, special_tokens=specials)
    assert tokenizer.encode_batch(HARD) == [library.encode_ordinary(text) for text in HARD]
    assert [tokenizer.decode(tokenizer.encode(text)) for text in HARD] == HARD
    assert (tokenizer.vocab_size, tokenizer.eod_id, tokenizer.bos_id, tokenizer.special_strings) == (301, 300, None, ("<|end|>",))
    assert 300 not in tokenizer.encode("a<|end|>b")
    assert build_tokenizer("tiktoken", path, special_tokens_in_text="allow").encode("a<|end|>b") == [97, 300, 98]
    flat = tokenizer.encode_flat(HARD)
    assert flat.ids.tolist() == [token for text in HARD for token in tokenizer.encode(text)]
    assert find_losses(tokenizer) == []


def test_published_patterns_are_those_of_the_library() -> None:
    """The library writes some of them in another way; they cut the same texts in the same places."""
    from tiktoken_ext import openai_public

    names = {"r50k_base": openai_public.r50k_pat_str}
    for name, pattern in names.items():
        ours, theirs = (
            tiktoken.Encoding("x", pat_str=text, mergeable_ranks=RANKS, special_tokens={}) for text in (PATTERNS[name], pattern)
        )
        assert [ours.encode_ordinary(text) for text in HARD] == [theirs.encode_ordinary(text) for text in HARD]


def test_megatron_json_form(tmp_path: Path) -> None:
    """Control tokens take the first ids, ranks follow; EOD is </s> and BOS <s>, as in Megatron."""
    tokenizer = build_tokenizer("TikTokenizer", json_file(tmp_path))
    library = tiktoken.Encoding("x", pat_str=PATTERNS["v2"], mergeable_ranks=RANKS, special_tokens={})
    assert tokenizer.encode_batch(HARD) == [[token + 1000 for token in library.encode_ordinary(text)] for text in HARD]
    assert (tokenizer.vocab_size, tokenizer.eod_id, tokenizer.bos_id) == (1000 + len(PIECES), 2, 1)
    assert tokenizer.special_strings[:8] == ("<unk>", "<s>", "</s>", "<mask>", "<pad>", "<cls>", "<sep>", "<SPECIAL_7>")
    assert tokenizer.decode([2, *tokenizer.encode("the é"), 1]) == "the é"
    cut = build_tokenizer("tiktoken", tmp_path / "vocab.json", tiktoken_num_special_tokens=10, vocab_size=10 + 258, tiktoken_pattern="v1")
    assert cut.vocab_size == 268
    assert cut.encode("the") == [10 + 257]  # the last piece that is left
    assert cut.encode("thing") == [10 + 256, *(10 + byte for byte in b"ing")]


def test_preprocessing_with_tiktoken(tmp_path: Path) -> None:
    (tmp_path / "a.jsonl").write_text('{"text": "the fox</s>"}\n')
    spec = TokenizerSpec("tiktoken", str(json_file(tmp_path)), "count")
    summary = preprocess(PreprocessOptions((str(tmp_path / "a.jsonl"),), str(tmp_path / "o"), spec, append_eod=True, prepend_bos=True))
    assert (summary.counts.special_strings, summary.eod_id, summary.bos_id, summary.backend) == (1, 2, 1, "tiktoken")


def test_nothing_is_guessed(tmp_path: Path) -> None:
    path = plain_file(tmp_path)
    with pytest.raises(DataError, match="does not say how text is split"):
        build_tokenizer("tiktoken", path)
    assert build_tokenizer("tiktoken", path, tiktoken_pattern="v2").eod_id is None
    known = plain_file(tmp_path, "cl100k_base.tiktoken")
    assert build_tokenizer("tiktoken", known).eod_id == 100_257
    with pytest.raises(ConfigError, match="cl100k_base by its file or name, but v1 was asked for"):
        build_tokenizer("tiktoken", known, tiktoken_pattern="v1")


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (b"YQ== 0\nYg== x\n", "line 2 is not 'base64 rank'"),
        (b"YQ== 0\n!!! 1\n", "line 2 is not"),
        (b"YQ== 0\nYQ== 1\n", "2 entries, but 1 different pieces"),
        (b"YQ== 0\n", "byte 0x00 has no rank"),
        (b"", "byte 0x00 has no rank"),
        (b'[{"rank": 0}]', "is no list of objects with rank"),
        (b'{"rank": 0}', "is no list of objects with rank"),
        (b"[", "is no list of objects with rank"),
        (b'[{"rank": 1, "token_bytes": "YQ==", "token_str": "a"}]', "entry 0 has rank 1"),
    ],
)
def test_damaged_files(tmp_path: Path, content: bytes, message: str) -> None:
    (tmp_path / "x.tiktoken").write_bytes(content)
    with pytest.raises(DataError, match=message):
        build_tokenizer("tiktoken", tmp_path / "x.tiktoken", tiktoken_pattern="v2")


def test_wrong_settings(tmp_path: Path) -> None:
    file = json_file(tmp_path)
    for options, message in (
        ({"vocab_size": 2000}, "with 1000 control tokens it can be 1256 to 1270"),
        ({"tiktoken_num_special_tokens": 3}, "there are at least 7"),
        ({"tiktoken_pattern": "v9"}, "'v9' is not one of"),
    ):
        with pytest.raises(ConfigError, match=message):
            build_tokenizer("tiktoken", file, **options)
    with pytest.raises(ConfigError, match="is for tiktoken files"):
        build_tokenizer("bytes", vocab_size=3)
    with pytest.raises(DataError, match="no control token '<x>'"):
        build_tokenizer("tiktoken", file, eod_token="<x>")
    clash = plain_file(tmp_path, "clash", pattern="v1", special_tokens={"<a>": 5})
    with pytest.raises(DataError, match="id 5 is the rank of an ordinary piece too"):
        build_tokenizer("tiktoken", clash)
