"""Tokenizers: exact round trips, special tokens as text, and which token ends a document."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import Tokenizer as Backend
from tokenizers import models, pre_tokenizers

from megalite.data.tokenizer import BytesTokenizer, TokenizerSpec, build_tokenizer, find_losses
from megalite.data.tokenizer_training import read_texts, train_characters, train_sentencepiece
from megalite.errors import ConfigError, DataError

GOLDEN = Path(__file__).parents[1] / "golden" / "preprocess"
HF = GOLDEN / "tok_hf_nobos"
HF_BOS = GOLDEN / "tok_hf_bos"
SHAKESPEARE = Path(__file__).parents[2] / "examples" / "data" / "shakespeare.txt"
UNICODE = st.text(st.characters(exclude_categories=["Cs"]), max_size=40)


def hf_folder(tmp_path: Path, source: Path = HF, **files: object) -> Path:
    """A copy of a golden tokenizer.json with other JSON files beside it."""
    folder = tmp_path / "tokenizer"
    folder.mkdir()
    shutil.copy(source / "tokenizer.json", folder)
    for name, content in files.items():
        (folder / f"{name}.json").write_text(json.dumps(content))
    return folder


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """SentencePiece models trained on a part of the example corpus."""
    folder = tmp_path_factory.mktemp("trained")
    (folder / "part.txt").write_bytes(SHAKESPEARE.read_bytes()[:60_000])
    paths = {}
    for model_type in ("bpe", "unigram"):
        paths[model_type] = folder / f"{model_type}.model"
        size = train_sentencepiece(read_texts([str(folder / "part.txt")]), paths[model_type], 401, model_type)
        assert size == 401
    return paths


@given(UNICODE)
@settings(deadline=None)
def test_bytes_give_back_every_text(text: str) -> None:
    tokenizer = BytesTokenizer()
    ids = tokenizer.encode(text)
    assert ids == list(text.encode("utf-8"))
    assert tokenizer.decode([*ids, 256]) == text


def test_bytes_sizes_and_ids() -> None:
    tokenizer = build_tokenizer("bytes")
    assert (tokenizer.vocab_size, tokenizer.eod_id, tokenizer.bos_id) == (257, 256, None)
    assert tokenizer.decode([0xC3]) == "�"  # a cut character
    with pytest.raises(DataError, match="257 is outside"):
        tokenizer.decode([257])
    with pytest.raises(DataError, match=r"U\+D800 at position 2"):
        tokenizer.encode("ab\ud800")


def test_chars_from_a_text(tmp_path: Path) -> None:
    path = tmp_path / "chars.json"
    assert train_characters(["hello\n", "wörld"], path) == 10
    tokenizer = build_tokenizer("chars", path)
    assert json.loads(path.read_text()) == sorted("helo\nwörd")
    assert (tokenizer.vocab_size, tokenizer.eod_id) == (10, 9)
    assert tokenizer.decode([*tokenizer.encode("öde\n"), 9]) == "öde\n"
    assert tokenizer.encode_batch(["he", ""]) == [[3, 2], []]
    with pytest.raises(DataError, match=r"'z' \(U\+007A\) at position 3 .* 9 characters"):
        tokenizer.encode("helz")


@pytest.mark.parametrize("content", ['["a", "a"]', '["ab"]', "[]", '{"a": 1}', "[1]", "[", '["a"'])
def test_damaged_character_lists(tmp_path: Path, content: str) -> None:
    path = tmp_path / "chars.json"
    path.write_text(content)
    with pytest.raises(DataError, match=r"chars\.json"):
        build_tokenizer("chars", path)


@pytest.mark.parametrize("model_type", ["bpe", "unigram"])
def test_trained_sentencepiece_is_lossless(trained: dict[str, Path], model_type: str) -> None:
    """Requirement 16: newlines, tabs and repeated spaces come back."""
    tokenizer = build_tokenizer("sentencepiece", trained[model_type])
    assert find_losses(tokenizer) == []
    text = SHAKESPEARE.read_text()[-20_000:]
    ids = tokenizer.encode(text)
    assert tokenizer.decode(ids) == text
    assert len(ids) < 0.75 * len(text)  # it has learned pieces longer than a byte

    @given(UNICODE.map(lambda text: text.replace("\u2581", "_")))
    @settings(deadline=None, max_examples=60)
    def every_text_comes_back(text: str) -> None:
        assert tokenizer.decode(tokenizer.encode(text)) == text

    every_text_comes_back()


def test_sentencepiece_control_tokens(trained: dict[str, Path]) -> None:
    tokenizer = build_tokenizer("GPTSentencePieceTokenizer", trained["bpe"])
    assert (tokenizer.vocab_size, tokenizer.bos_id, tokenizer.eod_id) == (401, 1, 2)
    assert tokenizer.special_strings == ("<s>", "</s>")
    ids = tokenizer.encode("a</s>b")
    assert not {1, 2} & set(ids)
    assert tokenizer.decode([1, *ids, 2]) == "a</s>b"
    assert build_tokenizer("sentencepiece", trained["bpe"], eod_token="\n").eod_id == tokenizer.encode("\n")[0]
    with pytest.raises(DataError, match="no piece '<nothing>'"):
        build_tokenizer("sentencepiece", trained["bpe"], eod_token="<nothing>")
    for token in (-1, 401):
        with pytest.raises(DataError, match=f"{token} is outside"):
            tokenizer.decode([token])


def test_lossy_model_is_found_out() -> None:
    losses = find_losses(build_tokenizer("sentencepiece", GOLDEN / "tok_sp" / "sp.model"))
    assert {"newlines", "tabs", "repeated spaces"} <= set(losses)
    assert find_losses(BytesTokenizer()) == []


def test_sentencepiece_size_that_cannot_be(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="100 pieces"):
        train_sentencepiece(["some text"], tmp_path / "x.model", 100)
    with pytest.raises(ConfigError, match="no bpe model of 400 pieces can be made"):
        train_sentencepiece([], tmp_path / "x.model", 400)
    assert list(tmp_path.iterdir()) == []


def test_hf_ids_and_sizes() -> None:
    tokenizer = build_tokenizer("HuggingFaceTokenizer", HF)
    expected = json.loads((GOLDEN / "outputs.json").read_text())["outputs"]["hf_nobos_noeod_text_document"]["sequences"]
    texts = [text for line in (GOLDEN / "in.jsonl").read_text().splitlines() if (text := json.loads(line)["text"])]
    assert tokenizer.encode_batch(texts) == expected
    assert [tokenizer.encode(text) for text in texts] == expected
    assert [tokenizer.decode(ids) for ids in expected] == texts
    assert (tokenizer.vocab_size, tokenizer.eod_id, tokenizer.bos_id) == (300, 0, None)


def test_hf_never_adds_special_tokens() -> None:
    """Requirement 13."""
    tokenizer = build_tokenizer("hf", HF_BOS / "tokenizer.json")  # its template puts BOS in front
    assert (tokenizer.bos_id, tokenizer.eod_id) == (0, 1)
    assert not {0, 1} & set(tokenizer.encode("fox"))
    assert tokenizer.encode("") == []


@pytest.mark.parametrize("mode", ["plain", "count"])
def test_special_spelling_is_plain_text(mode: str) -> None:
    """Requirement 15."""
    tokenizer = build_tokenizer("hf", HF, special_tokens_in_text=mode)
    text = "a page about <|endoftext|> tokens"
    for ids in (tokenizer.encode(text), tokenizer.encode_batch([text])[0]):
        assert 0 not in ids
        assert tokenizer.decode(ids) == text
    assert tokenizer.special_strings == ("<|endoftext|>",)


def test_special_spelling_as_control_token_when_allowed() -> None:
    tokenizer = build_tokenizer("hf", HF, special_tokens_in_text="allow")
    ids = tokenizer.encode("fox<|endoftext|>dog")
    assert ids == [*tokenizer.encode("fox"), 0, *tokenizer.encode("dog")]


def test_model_that_cannot_read_the_spelling_as_text(tmp_path: Path) -> None:
    backend = Backend(models.WordLevel({"[EOS]": 0, "a": 1, "[UNK]": 2}, unk_token="[UNK]"))
    backend.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    backend.add_special_tokens(["[EOS]"])
    backend.save(str(tmp_path / "tokenizer.json"))
    tokenizer = build_tokenizer("hf", tmp_path)
    assert (tokenizer.encode("a b"), tokenizer.eod_id) == ([1, 2], 0)
    with pytest.raises(DataError, match=r"'\[EOS\]' at position 2"):
        tokenizer.encode("a [EOS] a")
    assert build_tokenizer("hf", tmp_path, special_tokens_in_text="allow").encode("a [EOS] a") == [1, 0, 1]


def test_hf_settings_of_the_file_do_not_cut_text(tmp_path: Path) -> None:
    folder = hf_folder(tmp_path)
    backend = Backend.from_file(str(folder / "tokenizer.json"))
    backend.enable_truncation(3)
    backend.enable_padding(length=50)
    backend.save(str(folder / "tokenizer.json"))
    text = "The quick brown fox"
    assert build_tokenizer("hf", folder).encode_batch([text, "a"]) == build_tokenizer("hf", HF).encode_batch([text, "a"])


def test_hf_size_counts_added_tokens(tmp_path: Path) -> None:
    """Requirement 12: the size is the largest id + 1."""
    folder = hf_folder(tmp_path)
    backend = Backend.from_file(str(folder / "tokenizer.json"))
    backend.add_tokens(["<extra one>", "<extra two>"])
    backend.save(str(folder / "tokenizer.json"))
    tokenizer = build_tokenizer("hf", folder)
    assert tokenizer.vocab_size == 302
    assert tokenizer.encode("<extra two>") == [301]  # ordinary, not special


@pytest.mark.parametrize(
    ("files", "eod"),
    [
        ({}, 0),  # the well-known name
        ({"tokenizer_config": {"eos_token": {"content": "fox"}}}, "fox"),
        ({"special_tokens_map": {"eos_token": "fox"}, "config": {"eos_token_id": 7}}, "fox"),
        ({"tokenizer_config": {"eos_token": None}, "config": {"eos_token_id": [7]}}, 7),
    ],
)
def test_where_eod_comes_from(tmp_path: Path, files: dict[str, object], eod: int | str) -> None:
    folder = hf_folder(tmp_path, **files)
    backend = Backend.from_file(str(folder / "tokenizer.json"))
    backend.add_tokens(["fox"])
    backend.save(str(folder / "tokenizer.json"))
    assert build_tokenizer("hf", folder).eod_id == (backend.token_to_id(eod) if isinstance(eod, str) else eod)
    assert build_tokenizer("hf", folder, eod_token="fox").eod_id == backend.token_to_id("fox")


@pytest.mark.parametrize(
    ("files", "message"),
    [
        ({"tokenizer_config": {"eos_token": "a"}, "special_tokens_map": {"eos_token": "b"}}, "both 'a'"),
        ({"config": {"eos_token_id": [3, 4]}}, "several eos tokens: 3"),
        ({"config": {"eos_token_id": 3000}}, "3000 is not in the vocabulary"),
        ({"config": {"eos_token_id": "x"}}, "not a token id"),
        ({"tokenizer_config": {"eos_token": "<nothing>"}}, r"'<nothing>' \(tokenizer_config.json\) is not in"),
        ({"tokenizer_config": {"eos_token": 5}}, "neither a string nor an object"),
    ],
)
def test_ambiguous_or_wrong_eod(tmp_path: Path, files: dict[str, object], message: str) -> None:
    with pytest.raises(DataError, match=message):
        build_tokenizer("hf", hf_folder(tmp_path, **files))


def test_two_well_known_names_are_ambiguous(tmp_path: Path) -> None:
    folder = hf_folder(tmp_path)
    backend = Backend.from_file(str(folder / "tokenizer.json"))
    backend.add_special_tokens(["</s>"])
    backend.save(str(folder / "tokenizer.json"))
    with pytest.raises(DataError, match=r"several eos tokens: 0 \('<\|endoftext\|>'\), 300 \('</s>'\)"):
        build_tokenizer("hf", folder)
    assert build_tokenizer("hf", folder, eod_token="</s>").eod_id == 300


def test_vocab_and_merges_equal_the_same_tokenizer_json(tmp_path: Path) -> None:
    model = json.loads((HF / "tokenizer.json").read_text())["model"]
    (tmp_path / "vocab.json").write_text(json.dumps(model["vocab"]))
    pairs = [pair if isinstance(pair, str) else " ".join(pair) for pair in model["merges"]]
    (tmp_path / "merges.txt").write_text("#version: 0.2\n" + "\n".join(pairs) + "\n")
    files, whole = build_tokenizer("GPT2BPETokenizer", tmp_path), build_tokenizer("hf", HF)
    text = "The quick brown fox\n\n <|endoftext|> naïve"
    assert files.encode(text) == whole.encode(text)
    assert files.decode(files.encode(text)) == text
    assert (files.vocab_size, files.eod_id, files.special_strings) == (300, 0, ("<|endoftext|>",))


def test_wrong_settings_are_listed_together() -> None:
    with pytest.raises(ConfigError, match="is unknown") as caught:
        build_tokenizer("wordpiece", "x", special_tokens_in_text="maybe")
    assert len(caught.value.violations) == 2
    for arguments in (("bytes", "x"), ("chars", None), ("hf", None)):
        with pytest.raises(ConfigError):
            build_tokenizer(*arguments)
    with pytest.raises(ConfigError, match="'allow' needs an hf or tiktoken tokenizer"):
        build_tokenizer("bytes", special_tokens_in_text="allow")
    with pytest.raises(ConfigError, match="has its own EOD id"):
        build_tokenizer("bytes", eod_token="x")


def test_files_that_are_no_tokenizers(tmp_path: Path) -> None:
    junk = tmp_path / "junk.json"
    junk.write_text("no tokenizer")
    for kind in ("chars", "sentencepiece", "hf"):
        with pytest.raises(DataError, match=r"junk\.json is no"):
            build_tokenizer(kind, junk)
        with pytest.raises(DataError, match="does not exist"):
            build_tokenizer(kind, tmp_path / "missing")
    with pytest.raises(DataError, match=r"neither tokenizer\.json nor"):
        build_tokenizer("hf", tmp_path)


def test_spec_builds_the_same_tokenizer() -> None:
    spec = TokenizerSpec("hf", str(HF), "allow")
    assert spec.build().encode("fox<|endoftext|>")[-1] == 0
