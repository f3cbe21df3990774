"""From raw records to token arrays: the part of preprocessing that runs in the workers.

Decisions. A record is valid or not as a whole: with several keys, a bad value in one drops the record from all of
them, so that their documents stay aligned. A key's value is a text (one sequence) or a list of texts (one sequence
each, empty ones left out). A document without tokens gets neither BOS nor EOD and no sequence, only its entry in the
document index. White space is text. Numbers and null are never turned into text.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field

import numpy as np
import orjson

from megalite.data.documents import Chunk
from megalite.data.indexed import best_dtype
from megalite.data.tokenizer import Tokenizer
from megalite.errors import DataError

__all__ = ["EncodeOptions", "EncodedChunk", "EncodedDocuments", "Encoder", "parse_record"]


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
    """Documents of one key: all tokens, the length of each sequence, the number of sequences of each document."""

    tokens: np.ndarray
    sequence_lengths: list[int]
    sequences_per_document: list[int]

    def documents(self) -> Iterator[list[np.ndarray]]:
        """The sequences of each document."""
        start, sequence = 0, 0
        for count in self.sequences_per_document:
            sequences = []
            for length in self.sequence_lengths[sequence : sequence + count]:
                sequences.append(self.tokens[start : start + length])
                start += length
            sequence += count
            yield sequences


@dataclass
class EncodedChunk:
    """One chunk's documents by key, and what was met on the way; `problem` describes the first invalid record."""

    keys: dict[str, EncodedDocuments]
    num_bytes: int
    skipped: int = 0
    problem: str | None = None
    special_strings: int = 0


@dataclass
class _Record:
    """A valid record: how messages name it, and the non-empty texts of each key."""

    where: str
    texts: list[list[str]] = field(default_factory=list)


class Encoder:
    """Encodes chunks with one tokenizer."""

    def __init__(self, tokenizer: Tokenizer, options: EncodeOptions) -> None:
        self._tokenizer = tokenizer
        self._options = options
        self._dtype = best_dtype(tokenizer.vocab_size - 1)

    def encode(self, chunk: Chunk) -> EncodedChunk:
        """All documents of a chunk in order; raises DataError for an invalid record unless those are skipped."""
        result = EncodedChunk({}, num_bytes=sum(len(record) for record in chunk.records))
        records = list(self._valid_records(chunk, result))
        encoded = self._encode_records(records, result)
        for position, key in enumerate(self._options.json_keys):
            result.keys[key] = self._pack([sequences[position] for sequences in encoded])
        return result

    def _valid_records(self, chunk: Chunk, result: EncodedChunk) -> Iterator[_Record]:
        for index, raw in enumerate(chunk.records):
            if chunk.is_json_lines and not raw.strip():
                continue  # a blank line is no record
            try:
                yield _Record(chunk.where(index), parse_record(raw, chunk.is_json_lines, self._options.json_keys))
            except DataError as error:
                self._reject(chunk.where(index), error, result)

    def _reject(self, where: str, error: DataError, result: EncodedChunk) -> None:
        problem = f"{where}: {error}"
        if not self._options.skip_invalid:
            raise DataError(problem) from None
        result.skipped += 1
        result.problem = result.problem or problem

    def _encode_records(self, records: list[_Record], result: EncodedChunk) -> list[list[list[list[int]]]]:
        """Ids of each record, key and sequence. The whole chunk goes to the tokenizer at once, as batches are fast."""
        try:
            encoded = self._encode_batch(records)
        except DataError:  # some text cannot be encoded: find out which
            encoded, valid = [], []
            for record in records:
                try:
                    encoded += self._encode_batch([record])
                    valid.append(record)
                except DataError as error:
                    self._reject(record.where, error, result)
            records = valid
        if self._options.count_special:
            result.special_strings = sum(self._count_special(record) for record in records)
        return encoded

    def _encode_batch(self, records: Sequence[_Record]) -> list[list[list[list[int]]]]:
        texts = [text for record in records for key_texts in record.texts for text in key_texts]
        ids = iter(self._tokenizer.encode_batch(texts) if texts else [])
        return [[[next(ids) for _ in key_texts] for key_texts in record.texts] for record in records]

    def _count_special(self, record: _Record) -> int:
        spellings = self._tokenizer.special_strings
        return sum(text.count(spelling) for texts in record.texts for text in texts for spelling in spellings)

    def _pack(self, documents: list[list[list[int]]]) -> EncodedDocuments:
        parts: list[np.ndarray] = []
        lengths: list[int] = []
        counts: list[int] = []
        for document in documents:
            sequences = [ids for ids in document if ids]
            if sequences and self._options.prepend_bos:
                sequences[0] = [self._bos_id(), *sequences[0]]
            if sequences and self._options.append_eod:
                sequences[-1] = [*sequences[-1], self._eod_id()]
            parts += [np.asarray(ids, dtype=self._dtype) for ids in sequences]
            lengths += [len(ids) for ids in sequences]
            counts.append(len(sequences))
        tokens = np.concatenate(parts) if parts else np.empty(0, dtype=self._dtype)
        return EncodedDocuments(tokens, lengths, counts)

    def _bos_id(self) -> int:
        assert self._tokenizer.bos_id is not None, "checked before any record is read"
        return self._tokenizer.bos_id

    def _eod_id(self) -> int:
        assert self._tokenizer.eod_id is not None, "checked before any record is read"
        return self._tokenizer.eod_id


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
