"""The faster ways of `encode_flat` give the ids of the reference libraries, on texts that are meant to break them."""

from __future__ import annotations

import json
import random
from collections.abc import Callable, Iterable
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import Regex, decoders, models, normalizers, pre_tokenizers, trainers
from tokenizers import Tokenizer as Backend

from megalite.data import fast_backend as fast
from megalite.data import sentencepiece_words as words
from megalite.data.tokenizer import Tokenizer, build_tokenizer
from megalite.data.tokenizer_training import train_sentencepiece
from tests.fuzz_preprocess import PIECES

ROOT = Path(__file__).parents[2]
GOLDEN = ROOT / "tests" / "golden" / "preprocess"
SHAKESPEARE = (ROOT / "examples" / "data" / "shakespeare.txt").read_text()
LLAMA3 = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
UNICODE = st.text(st.characters(exclude_categories=["Cs"]), max_size=60)


def hard_texts(count: int, seed: int = 3) -> list[str]:
    rng = random.Random(seed)
    planes = ((0x20, 0x7F), (0x00, 0x800), (0x800, 0xD800), (0xE000, 0x110000))
    texts = ["", " ", "\n", *fast.HARD_TEXTS, SHAKESPEARE[:20_000], (ROOT / "megalite" / "data" / "encoding.py").read_text()]
    for _ in range(count):
        kind = rng.random()
        if kind < 0.6:
            texts.append("".join(rng.choice(PIECES) for _ in range(rng.randint(0, 60))))
        elif kind < 0.85:
            texts.append("".join(chr(rng.randrange(*rng.choice(planes))) for _ in range(rng.randint(1, 50))))
        else:
            texts.append(rng.choice(PIECES) * rng.randint(1, 400))
    return texts


def assert_same_ids(tokenizer: Tokenizer, texts: list[str], batch: int = 50) -> None:
    for start in range(0, len(texts), batch):
        part = texts[start : start + batch]
        expected = tokenizer.encode_batch(part)
        ids, lengths = tokenizer.encode_flat(part)
        ends = lengths.cumsum().tolist()
        for text, right, end, length in zip(part, expected, ends, lengths.tolist(), strict=True):
            assert ids[end - length : end].tolist() == right, ascii(text[:100])


def train_bpe(path: Path, prepare: Callable[[Backend], None], texts: Iterable[str]) -> Path:
    backend = Backend(models.BPE(byte_fallback=prepare is llama2))
    prepare(backend)
    alphabet = [] if prepare is llama2 else pre_tokenizers.ByteLevel.alphabet()
    specials = ["<unk>", "<s>", "</s>", *(f"<0x{byte:02X}>" for byte in range(256))] if prepare is llama2 else ["<|endoftext|>"]
    backend.train_from_iterator(
        texts, trainers.BpeTrainer(vocab_size=900, special_tokens=specials, initial_alphabet=alphabet, show_progress=False)
    )
    backend.add_tokens(["<extra>"])
    content = json.loads(backend.to_str())  # in real files the byte pieces are ordinary ones
    content["added_tokens"] = [token for token in content["added_tokens"] if not token["content"].startswith("<0x")]
    path.write_text(json.dumps(content))
    return path


def gpt2(backend: Backend) -> None:
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = decoders.ByteLevel()


def llama3(backend: Backend) -> None:
    split = pre_tokenizers.Split(Regex(LLAMA3), "isolated")
    backend.pre_tokenizer = pre_tokenizers.Sequence([split, pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)])
    backend.decoder = decoders.ByteLevel()


def qwen(backend: Backend) -> None:
    llama3(backend)
    backend.normalizer = normalizers.NFC()


def llama2(backend: Backend) -> None:
    backend.normalizer = normalizers.Sequence([normalizers.Prepend("\u2581"), normalizers.Replace(" ", "\u2581")])


@pytest.mark.parametrize("mode", ["plain", "allow"])
@pytest.mark.parametrize("prepare", [gpt2, llama3, qwen, llama2], ids=lambda prepare: prepare.__name__)
def test_fastokens_gives_the_ids_of_tokenizers(tmp_path: Path, prepare: Callable[[Backend], None], mode: str) -> None:
    pytest.importorskip("fastokens")
    lines = [*SHAKESPEARE[:60_000].splitlines(keepends=True), *PIECES, "日本語 é ß я " * 20]
    path = train_bpe(tmp_path / "tokenizer.json", prepare, lines)
    tokenizer = build_tokenizer("hf", path, special_tokens_in_text=mode, eod_token="</s>" if prepare is llama2 else "<|endoftext|>")
    assert tokenizer.backend == "fastokens"
    assert_same_ids(tokenizer, [text + special for text in hard_texts(150) for special in ("", "<|endoftext|>a<extra>")])


def test_an_engine_that_differs_is_not_used(monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> None:
    fastokens = pytest.importorskip("fastokens")

    class Wrong:
        def __init__(self, engine) -> None:
            self._engine = engine

        @classmethod
        def from_json_str(cls, content: str):
            return cls(real.from_json_str(content))

        def encode_batch_flat(self, texts, *options):
            return self._engine.encode_batch_flat([text.replace("e\u0301", "é") for text in texts], *options)

    real = fastokens.Tokenizer
    monkeypatch.setattr(fastokens, "Tokenizer", Wrong)
    assert build_tokenizer("hf", GOLDEN / "tok_hf_nobos").backend == "reference"
    assert "other ids" in caplog.text
    monkeypatch.setattr(fastokens, "Tokenizer", real)
    assert build_tokenizer("hf", GOLDEN / "tok_hf_nobos").backend == "fastokens"
    assert build_tokenizer("hf", GOLDEN / "tok_hf_nobos", backend="reference").backend == "reference"


@pytest.fixture(scope="module")
def spm(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A lossless SentencePiece model with pieces of letters, digits, signs and spaces."""
    path = tmp_path_factory.mktemp("spm") / "bpe.model"
    code = (ROOT / "megalite" / "data" / "encoding.py").read_text()
    train_sentencepiece([SHAKESPEARE[:60_000], code, "日本語 é ß я 1234 ()()" * 30], path, 900, "bpe")
    return path


@pytest.mark.parametrize("kind", [words.NativeWords, words.PythonWords])
def test_sentencepiece_by_words_gives_the_ids_of_the_library(spm: Path, kind: type, monkeypatch: pytest.MonkeyPatch) -> None:
    if kind is words.NativeWords:
        pytest.importorskip("megalite._word_cache")
    monkeypatch.setattr(words, "find_spec", lambda _: kind is words.NativeWords or None)
    monkeypatch.setattr(words, "_MAX_WORDS", 300)  # so that the memory is emptied on the way
    monkeypatch.setattr(words, "_MAX_BYTES", 40_000)
    tokenizer = build_tokenizer("sentencepiece", spm)
    assert tokenizer.backend == kind.name
    assert_same_ids(tokenizer, hard_texts(250))

    @given(st.lists(UNICODE, max_size=4))
    @settings(deadline=None, max_examples=50)
    def every_text(texts: list[str]) -> None:
        assert_same_ids(tokenizer, texts)

    every_text()


def test_classes_are_apart_only_where_no_piece_mixes_them() -> None:
    assert words._is_apart(["the", "12", "()", "日本", "."]) == (True, True)
    assert words._is_apart(["a1", "()"]) == (False, True)
    assert words._is_apart(["12", "n't"]) == (True, False)
    assert words._is_apart(["1.", "a"]) == (False, False)
    pattern = words._segment_pattern((True, True))
    text = " the fox's  12,5\n\n x_1 \u201cé\u201d  "
    assert pattern.findall(text) == [" the", " fox", "'", "s", "  12", ",", "5", "\n\n", " x", "_", "1", " \u201c", "é", "\u201d", "  "]
    assert "".join(pattern.findall(text)) == text
    assert words._segment_pattern((True, False)).findall("n't 1") == ["n't", " 1"]


@pytest.mark.parametrize("name", ["unigram", "golden"])
def test_models_that_could_differ_are_left_to_the_library(tmp_path: Path, name: str) -> None:
    path = GOLDEN / "tok_sp" / "sp.model"
    if name == "unigram":
        path = tmp_path / "u.model"
        train_sentencepiece([SHAKESPEARE[:30_000]], path, 400, "unigram")
    tokenizer = build_tokenizer("sentencepiece", path)
    assert tokenizer.backend == "reference"
    assert_same_ids(tokenizer, hard_texts(20))


def test_the_reference_can_be_chosen(spm: Path) -> None:
    assert build_tokenizer("sentencepiece", spm, backend="reference").backend == "reference"
