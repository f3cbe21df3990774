"""SentencePiece by words: the ids of the library, computed once for each different word.

The library merges over a whole text, although no merge can cross most places in it. A text is cut where no piece of the
vocabulary reaches across, each different segment is encoded once, and the ids are remembered.

Why the ids are the same. BPE merges two neighbours only into a piece of the vocabulary. Where no piece holds the two
characters beside a cut next to each other, no merge, in whatever order, joins the two sides, so each side merges as it would
alone. Characters have five classes: space, newline, ASCII digits, signs (most that are no letters), and the rest. Cuts are
around newlines, before a run of spaces, and between those of the last three classes that no piece mixes. All of this is
read from the vocabulary, and only for BPE models that change nothing before they merge and that spell unknown characters in
bytes (otherwise runs of unknown ones become one id, across cuts). Unigram models add scores along the text, where
rounding depends on what came before; they are left to the library. So are texts with U+2581, which it takes for a space.

The cutting and remembering is done by the C++ extension where it was built (csrc/word_cache.cpp), and in Python elsewhere: slower,
the same ids. Memory: at most _MAX_BYTES (in Python _MAX_WORDS segments) and the segments of one batch.

The model file is a protocol buffer (sentencepiece_model.proto of the library); the few fields needed are read by hand.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from importlib.util import find_spec
from typing import Any, Protocol

import numpy as np

from megalite.data.tokenizer import FlatIds, flatten

__all__ = ["NativeWords", "PythonWords", "WordEncoder", "word_encoder"]

_SPACE = "\u2581"
_MAX_BYTES = 48 << 20
_MAX_WORDS = 1 << 18
_MAX_REMEMBERED = 64
_DIGITS = "0-9"
_SIGNS = r"\x00-\x09\x0b-\x1f!-/:-@\[-`{-\x7f\xa0-\xbf\u2000-\u206f\u3000-\u303f"
_REST = r"A-Za-z\x80-\x9f\xc0-\u1fff\u2070-\u2fff\u3040-\U0010ffff"
_BPE = 2
# ModelProto: trainer_spec 2, normalizer_spec 3. TrainerSpec: model_type 3, treat_whitespace_as_suffix 24, byte_fallback 35.
# NormalizerSpec: precompiled_charsmap 2, remove_extra_whitespaces 4, escape_whitespaces 5, normalization_rule_tsv 6.


class WordEncoder(Protocol):
    """Encodes texts segment by segment with one SentencePiece model for which that is exact (see `word_encoder`)."""

    name: str

    def encode_flat(self, texts: Sequence[str]) -> FlatIds:
        """The ids of all texts in one array; the texts must have a UTF-8 form."""
        ...


class NativeWords:
    """The encoder by words with the tables in C++."""

    name = "sentencepiece by words"

    def __init__(self, processor: Any, is_apart: tuple[bool, bool]) -> None:
        from megalite._word_cache import WordCache

        self._processor = processor
        self._skip = len(processor.encode("\n", out_type=int))
        self._cache = WordCache(*is_apart, max_bytes=_MAX_BYTES)

    def encode_flat(self, texts: Sequence[str]) -> FlatIds:
        if any(_SPACE in text for text in texts):
            return flatten(self._library(texts))
        first, inside = self._cache.new_segments(list(texts))
        self._cache.learn_first(first, self._library(first))
        # Behind a newline, which stays by itself, the model puts nothing in front.
        self._cache.learn_inside(inside, self._library(["\n" + segment for segment in inside]), self._skip)
        return FlatIds(*self._cache.encode())

    def _library(self, texts: Sequence[str]) -> list[list[int]]:
        return self._processor.encode(list(texts), out_type=int, num_threads=1)


class PythonWords:
    """The encoder by words without the C++ extension."""

    name = "sentencepiece by words in Python"

    def __init__(self, processor: Any, is_apart: tuple[bool, bool]) -> None:
        self._processor = processor
        self._find_segments = _segment_pattern(is_apart).findall
        self._skip = len(processor.encode("\n", out_type=int))
        self._remembered: dict[str, bytes] = {}  # segment inside a text -> its int32 ids
        self._first: dict[str, bytes] = {}  # segment at the start of a text, where the model may put a space in front

    def encode_flat(self, texts: Sequence[str]) -> FlatIds:
        cut = [[] if _SPACE in text else self._find_segments(text) for text in texts]
        inside = set().union(*(segments[1:] for segments in cut))
        self._learn(self._remembered, inside, "\n", self._skip)
        self._learn(self._first, {segments[0] for segments in cut if segments}, "", 0)
        encoded = [self._encode(text, segments) for text, segments in zip(texts, cut, strict=True)]
        for segment in inside:
            if len(segment) > _MAX_REMEMBERED:
                del self._remembered[segment]
        lengths = np.fromiter(map(len, encoded), np.int64, len(encoded)) // 4
        return FlatIds(np.frombuffer(b"".join(encoded), dtype=np.int32), lengths)

    def _learn(self, remembered: dict[str, bytes], segments: set[str], before: str, skip: int) -> None:
        """Encode the segments that are not remembered, all in one call."""
        unknown = segments.difference(remembered)
        if len(remembered) + len(unknown) > _MAX_WORDS:
            remembered.clear()
            unknown = segments
        new = list(unknown)
        for segment, ids in zip(new, self._library([before + segment for segment in new]), strict=True):
            remembered[segment] = np.array(ids[skip:], dtype=np.int32).tobytes()

    def _encode(self, text: str, segments: list[str]) -> bytes:
        if segments:
            return self._first[segments[0]] + b"".join(map(self._remembered.__getitem__, segments[1:]))
        return np.array(self._library([text])[0], dtype=np.int32).tobytes()

    def _library(self, texts: list[str]) -> list[list[int]]:
        return self._processor.encode(texts, out_type=int, num_threads=1)


def word_encoder(processor: Any) -> WordEncoder | None:
    """The encoder by words of a loaded SentencePiece model, or None where its ids could differ from the library's."""
    parts = {number: value for number, value in _fields(processor.serialized_model_proto()) if number in (2, 3)}
    trainer, normalizer = dict(_fields(parts.get(2, b""))), dict(_fields(parts.get(3, b"")))
    changes_nothing = not normalizer.get(2) and normalizer.get(4, 1) == 0 and normalizer.get(5, 1) == 1 and not normalizer.get(6)
    merges_freely = trainer.get(3, 1) == _BPE and trainer.get(35, 0) == 1 and trainer.get(24, 0) == 0
    if not (changes_nothing and merges_freely):
        return None
    pieces = [processor.id_to_piece(token) for token in range(processor.get_piece_size())]
    pieces = [
        piece
        for token, piece in enumerate(pieces)
        if not (processor.is_control(token) or processor.is_byte(token) or processor.is_unknown(token))
    ]
    if any(piece != "\n" and ("\n" in piece or " " in piece or _SPACE in piece.lstrip(_SPACE)) for piece in pieces):
        return None
    kind = NativeWords if find_spec("megalite._word_cache") else PythonWords
    return kind(processor, _is_apart([piece.lstrip(_SPACE) for piece in pieces]))


def _is_apart(pieces: Sequence[str]) -> tuple[bool, bool]:
    """Whether no piece mixes digits with anything else, and whether none mixes signs with anything else."""
    digits, signs = (re.compile(rf"(?=.*[{characters}]).*[^{characters}]", re.DOTALL).match for characters in (_DIGITS, _SIGNS))
    return not any(map(digits, pieces)), not any(map(signs, pieces))


def _segment_pattern(is_apart: tuple[bool, bool]) -> re.Pattern[str]:
    """The segments between cuts: classes that some piece mixes with the rest belong to it."""
    apart = [characters for characters, alone in zip((_DIGITS, _SIGNS), is_apart, strict=True) if alone]
    mixed = [characters for characters, alone in zip((_DIGITS, _SIGNS), is_apart, strict=True) if not alone]
    return re.compile("|".join([*(f" *[{characters}]+" for characters in (_REST + "".join(mixed), *apart)), " +", r"\n+"]))


def _fields(message: bytes) -> Iterator[tuple[int, Any]]:
    """Field numbers and values (an integer, or bytes) of a protocol buffer message."""
    position = 0
    while position < len(message):
        key, position = _varint(message, position)
        kind = key & 7
        if kind == 0:
            value, position = _varint(message, position)
        elif kind == 2:
            length, start = _varint(message, position)
            position = start + length
            value = message[start:position]
        else:
            assert kind in (1, 5), f"field type {kind}"  # the library has read this message before
            start, position = position, position + (8 if kind == 1 else 4)
            value = message[start:position]
        yield key >> 3, value


def _varint(message: bytes, position: int) -> tuple[int, int]:
    """A number of seven bits a byte, and the position behind it."""
    value = shift = 0
    while True:
        byte = message[position]
        value |= (byte & 127) << shift
        shift, position = shift + 7, position + 1
        if byte < 128:
            return value, position
