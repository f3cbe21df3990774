"""From raw records to token arrays: the part of preprocessing that runs in the workers.

Decisions. A record is valid or not as a whole: with several keys, a bad value in one drops the record from all of
them, so that their documents stay aligned. A key's value is a text (one sequence) or a list of texts (one sequence
each, empty ones left out). A document without tokens gets neither BOS nor EOD and no sequence, only its entry in the
document index. White space is text. Numbers and null are never turned into text.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np
import orjson

from megalite.data.documents import Chunk
from megalite.data.indexed import best_dtype
from megalite.data.tokenizer import FlatIds, Tokenizer
from megalite.errors import DataError

__all__ = ["EncodeOptions", "EncodedChunk", "EncodedDocuments", "Encoder", "parse_record"]

_JSON_SPACE = b" \t\r"


@dataclass(frozen=True)
class EncodeOptions:
    """What to take from a record and what to add to its documents."""

    json_keys: tuple[str, ...] = ("text",)
    append_eod: bool = False
    prepend_bos: bool = False
    skip_invalid: bool = False
    count_special: bool = False


@dataclass
class EncodedDocuments:
    """Documents of one key.

    `tokens` [T] are all of them, `sequence_lengths` int64 [S] the tokens of each sequence, `sequences_per_document`
    int64 [D] the sequences of each document (none for an empty one).
    """

    tokens: np.ndarray
    sequence_lengths: np.ndarray
    sequences_per_document: np.ndarray


@dataclass
class EncodedChunk:
    """One chunk's documents by key, and what was met on the way.

    `records` counts what was neither blank nor skipped; `problem` describes the first skipped record; `num_bytes` is
    text, `consumed` the file's own bytes, `backend` says what encoded it.
    """

    keys: dict[str, EncodedDocuments]
    num_bytes: int
    consumed: int = 0
    backend: str = ""
    records: int = 0
    skipped: int = 0
    problem: str | None = None
    special_strings: int = 0


@dataclass(frozen=True)
class _Record:
    """A valid record: its place in the chunk, and the non-empty texts of each key."""

    index: int
    texts: list[list[str]]

    def all_texts(self) -> list[str]:
        return [text for texts in self.texts for text in texts]


class Encoder:
    """Encodes chunks with one tokenizer."""

    def __init__(self, tokenizer: Tokenizer, options: EncodeOptions) -> None:
        self._tokenizer = tokenizer
        self._options = options
        self._dtype = best_dtype(tokenizer.vocab_size - 1)

    def encode(self, chunk: Chunk) -> EncodedChunk:
        """All documents of a chunk in order; raises DataError for an invalid record unless those are skipped."""
        result = EncodedChunk({}, sum(len(record) for record in chunk.records), chunk.consumed, self._tokenizer.backend)
        problems: dict[int, str] = {}
        records = list(self._valid_records(chunk, problems))
        try:
            self._encode_keys(records, result)
        except DataError:  # some text cannot be encoded: find out which
            records = [record for record in records if self._is_encodable(record, problems)]
            self._encode_keys(records, result)
        if problems:
            result.skipped, first = len(problems), min(problems)
            result.problem = f"{chunk.where(first)}: {problems[first]}"
            if not self._options.skip_invalid:
                raise DataError(result.problem)
        result.records = len(records)
        if self._options.count_special:
            spellings = self._tokenizer.special_strings
            texts = [text for record in records for text in record.all_texts()]
            result.special_strings = sum(text.count(spelling) for text in texts for spelling in spellings)
        return result

    def _valid_records(self, chunk: Chunk, problems: dict[int, str]) -> Iterator[_Record]:
        """The records up to the first invalid one, or all valid ones where those are skipped."""
        for index, raw in enumerate(chunk.records):
            if chunk.is_json_lines and not raw.strip(_JSON_SPACE):
                continue  # a blank line is no record
            try:
                yield _Record(index, parse_record(raw, chunk.is_json_lines, self._options.json_keys))
            except DataError as error:
                problems[index] = str(error)
                if not self._options.skip_invalid:
                    return

    def _encode_keys(self, records: list[_Record], result: EncodedChunk) -> None:
        """Encode all texts of a key at once, as large batches are fast."""
        for position, key in enumerate(self._options.json_keys):
            texts = [text for record in records for text in record.texts[position]]
            num_texts = np.fromiter((len(record.texts[position]) for record in records), np.int64, len(records))
            result.keys[key] = self._pack(self._tokenizer.encode_flat(texts), num_texts)

    def _is_encodable(self, record: _Record, problems: dict[int, str]) -> bool:
        try:
            self._tokenizer.encode_flat(record.all_texts())
        except DataError as error:
            problems[record.index] = str(error)
            return False
        return True

    def _pack(self, encoded: FlatIds, num_texts: np.ndarray) -> EncodedDocuments:
        """Documents from the ids of their texts, of which document d has `num_texts[d]`; adds BOS and EOD."""
        ids = encoded.ids
        if len(ids) and not 0 <= int(ids.min()) <= int(ids.max()) < self._tokenizer.vocab_size:
            bad = int(ids.min()) if int(ids.min()) < 0 else int(ids.max())
            raise DataError(f"{self._tokenizer.name} gave the id {bad}, but has only {self._tokenizer.vocab_size} ids")
        kept = encoded.lengths > 0
        lengths = encoded.lengths[kept]
        document = np.repeat(np.arange(len(num_texts)), num_texts)[kept]
        changes = np.flatnonzero(np.diff(document)) + 1
        if len(document) and self._options.prepend_bos:
            first = np.concatenate(([0], changes))
            ids = np.insert(ids, _ends(lengths)[first] - lengths[first], self._bos_id())
            lengths[first] += 1
        if len(document) and self._options.append_eod:
            last = np.concatenate((changes - 1, [len(document) - 1]))
            ids = np.insert(ids, _ends(lengths)[last], self._eod_id())
            lengths[last] += 1
        counts = np.bincount(document, minlength=len(num_texts))
        return EncodedDocuments(ids.astype(self._dtype), lengths, counts)

    def _bos_id(self) -> int:
        assert self._tokenizer.bos_id is not None, "checked before any record is read"
        return self._tokenizer.bos_id

    def _eod_id(self) -> int:
        assert self._tokenizer.eod_id is not None, "checked before any record is read"
        return self._tokenizer.eod_id


def _ends(lengths: np.ndarray) -> np.ndarray:
    return np.cumsum(lengths)


def parse_record(raw: bytes, is_json_lines: bool, keys: Sequence[str]) -> list[list[str]]:
    """The non-empty texts of each key; raises DataError with the reason (the caller knows the place)."""
    if not is_json_lines:
        try:
            text = raw.decode("utf-8")
        except UnicodeDecodeError as error:
            line = raw.count(b"\n", 0, error.start) + 1
            raise DataError(f"not UTF-8: byte 0x{raw[error.start]:02x} in line {line} of it") from None
        return [[text] if text else []]
    try:
        record = orjson.loads(raw.removesuffix(b"\r"))
    except orjson.JSONDecodeError as error:
        raise DataError(f"invalid JSON: {error.msg} (column {error.colno}); each line must hold one whole JSON object") from None
    if not isinstance(record, dict):
        raise DataError(f"the record is {_json_type(record)}, not an object with the key {keys[0]!r}")
    return [_texts(record, key) for key in keys]


def _texts(record: dict[str, object], key: str) -> list[str]:
    if key not in record:
        present = ", ".join(repr(name) for name in record) or "none"
        raise DataError(f"the key {key!r} is missing; keys present: {present}")
    value = record[key]
    values = value if isinstance(value, list) else [value]
    texts: list[str] = []
    for item in values:
        if not isinstance(item, str):
            kind = f"a list with {_json_type(item)}" if isinstance(value, list) else _json_type(item)
            present = ", ".join(map(repr, record))
            raise DataError(f"the value of {key!r} is {kind}, not a text or a list of texts; keys present: {present}")
        if item:
            texts.append(item)
    return texts


def _json_type(value: object) -> str:
    if value is None:
        return "null"
    names = {
        bool: "true or false",
        int: "a number",
        float: "a number",
        str: "a text",
        list: "a list",
        dict: "an object",
    }
    return names[type(value)]
