"""Making a tokenizer from text: a lossless SentencePiece model, or a list of characters.

Decisions. The SentencePiece settings are the ones under which `decode(encode(text)) == text`: no normalization, no
white space removed or added, every character reachable through byte pieces, newline and tab pieces of their own. (One
character is beyond reach: SentencePiece writes a space as U+2581, so a U+2581 in a text comes back as a space.) The
result is tried on difficult texts before it is kept.
"""

from __future__ import annotations

import io
import os
import sys
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path

import orjson

from megalite.data.documents import find_sources, read_chunks
from megalite.data.encoding import parse_record
from megalite.data.tokenizer import build_tokenizer, find_losses
from megalite.errors import ConfigError, DataError

__all__ = ["MODEL_TYPES", "read_texts", "train_characters", "train_sentencepiece"]

MODEL_TYPES = ("bpe", "unigram", "chars")
_CHUNK_BYTES = 1 << 20
_MAX_SENTENCE_CHARACTERS = 1000  # the trainer leaves out sentences beyond 4192 bytes, without an error


def read_texts(inputs: Sequence[str], key: str = "text") -> Iterator[str]:
    """All texts of the inputs that preprocessing reads too (of one key, for JSON lines).

    Raises DataError naming an invalid record.
    """
    stdin = getattr(sys.stdin, "buffer", None)
    for chunk in read_chunks(find_sources(inputs), None, _CHUNK_BYTES, stdin):
        for index, raw in enumerate(chunk.records):
            if chunk.is_json_lines and not raw.strip(b" \t\r"):
                continue
            try:
                yield from parse_record(raw, chunk.is_json_lines, [key])[0]
            except DataError as error:
                raise DataError(f"{chunk.where(index)}: {error}") from None


def train_characters(texts: Iterable[str], path: Path) -> int:
    """Write the sorted list of all characters of the texts; returns the vocabulary size (one more, for EOD)."""
    characters = sorted(set().union(*map(set, texts)))
    if not characters:
        raise DataError("the texts have no characters to make a tokenizer from")
    _replace(path, orjson.dumps(characters) + b"\n")
    return len(characters) + 1


def train_sentencepiece(texts: Iterable[str], path: Path, vocab_size: int, model_type: str = "bpe") -> int:
    """Write a lossless SentencePiece model of exactly `vocab_size` pieces; returns that size.

    Raises ConfigError for a size that the texts cannot fill or that is too small for the bytes, DataError for a model
    that loses text.
    """
    import sentencepiece

    model = io.BytesIO()
    try:
        sentencepiece.SentencePieceTrainer.train(
            sentence_iterator=_sentences(texts),
            model_writer=model,
            model_type=model_type,
            vocab_size=vocab_size,
            character_coverage=0.9995,  # the rest is spelled in bytes
            normalization_rule_name="identity",
            remove_extra_whitespaces=False,
            add_dummy_prefix=False,
            allow_whitespace_only_pieces=True,
            byte_fallback=True,
            user_defined_symbols=["\n", "\t"],
            split_digits=True,
            num_threads=1,
            minloglevel=2,
        )
    except (RuntimeError, OSError) as error:
        raise ConfigError(f"no {model_type} model of {vocab_size} pieces can be made from these texts: {_first_reason(error)}") from None
    _replace(path, model.getvalue())
    tokenizer = build_tokenizer("sentencepiece", path)
    losses = find_losses(tokenizer)
    if losses:
        path.unlink()
        raise DataError(f"the trained model changes {', '.join(losses)}; it was not kept")
    return tokenizer.vocab_size


def _sentences(texts: Iterable[str]) -> Iterator[str]:
    """Lines with their spaces, cut where the trainer would drop them; newlines have a piece already."""
    for text in texts:
        for line in text.split("\n"):
            for start in range(0, len(line), _MAX_SENTENCE_CHARACTERS):
                yield line[start : start + _MAX_SENTENCE_CHARACTERS]


def _first_reason(error: Exception) -> str:
    """The library's message without its source location: `INTERNAL: file.cc(99) [condition] reason`."""
    message = str(error).strip().splitlines()[0] if str(error).strip() else type(error).__name__
    return message.split("] ", 1)[-1]


def _replace(path: Path, content: bytes) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    temporary = path.with_name(f"{path.name}.tmp.{os.getpid()}")
    try:
        temporary.write_bytes(content)
        os.replace(temporary, path)
    finally:
        temporary.unlink(missing_ok=True)
