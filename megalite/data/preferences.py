"""Pairs of answers of which one is preferred, for direct preference optimisation (DPO, arXiv:2305.18290).

A line of the file holds what was asked and two answers: `{"prompt": TEXT, "chosen": TEXT, "rejected": TEXT}`, or `{"messages": [...],
"chosen": TEXT, "rejected": TEXT}` with the conversation before the answer. `tools/score_preferences.py` adds how likely the reference model
finds them: `"chosen_logp"` and `"rejected_logp"`, natural logarithms of probabilities.

Decisions
- The reference model is not needed while training: its scores are part of the data. So a run that resumes, or that trains in another
  layout, compares with the same numbers, and memory and time for a second model are spent once.
- A pair is two samples, 2p the chosen answer and 2p + 1 the rejected one, so both lie in one micro-batch of an even size. Every epoch
  shuffles the pairs: a function of (seed, epoch).
- Pairs are not packed and not cut: a preference is for the whole answer. A pair that is too long is left out, counted and named, or
  refused.

S sequence.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np
import orjson

from megalite.data.chat import ASSISTANT, Conversation, check_messages
from megalite.data.chat_encoding import ChatEncoder, EncodedChat
from megalite.data.documents import find_sources, read_chunks
from megalite.data.sample import Sample
from megalite.data.sft_dataset import TooLong
from megalite.errors import ConfigError, DataError

__all__ = ["Preference", "PreferenceDataset", "encode_preferences", "read_preferences"]

ANSWERS = ("chosen", "rejected")
_CHUNK_BYTES = 1 << 20
_NAMED = 3


@dataclass(frozen=True)
class Preference:
    """answers: the conversation with the chosen answer, and with the rejected one. scores: the reference's, None before they are there.
    record: the line itself."""

    answers: tuple[Conversation, Conversation]
    scores: tuple[float, float] | None
    where: str
    record: dict[str, Any]


def read_preferences(path: str) -> Iterator[Preference]:
    """The pairs of a .jsonl file in its order. Raises DataError with file and line for what is none, and for a file without any."""
    count = 0
    (source, *more) = find_sources([path])
    if more or not source.is_json_lines:
        raise DataError(f"preferences {path} must be one file of JSON lines (.jsonl)")
    for chunk in read_chunks([source], None, _CHUNK_BYTES, None):
        for index, raw in enumerate(chunk.records):
            if raw.strip():
                count += 1
                yield _parse(raw, chunk.where(index))
    if count == 0:
        raise DataError(f'{path} holds no pair; each line must be one: {{"prompt": ..., "chosen": ..., "rejected": ...}}')


def _parse(raw: bytes, where: str) -> Preference:
    try:
        record = orjson.loads(raw)
    except orjson.JSONDecodeError as error:
        raise DataError(f"{where}: invalid JSON: {error.msg} (column {error.colno})") from None
    if not isinstance(record, dict):
        raise DataError(f"{where}: the record is no object")
    try:
        asked, learned = _asked(record)
        chosen, rejected = (_conversation(asked, learned, record, name, where) for name in ANSWERS)
        return Preference((chosen, rejected), _scores(record), where, record)
    except DataError as error:
        raise DataError(f"{where}: {error}") from None


def _asked(record: dict[str, Any]) -> tuple[list[dict[str, Any]], list[bool]]:
    """The conversation before the answer; nothing in it is learned."""
    if "messages" not in record:
        prompt = record.get("prompt")
        if not isinstance(prompt, str) or not prompt:
            raise DataError("there is no prompt; a pair has a text prompt (or messages), chosen and rejected")
        return [{"role": "user", "content": prompt}], [False]
    messages = record["messages"]
    if not isinstance(messages, list) or not all(isinstance(message, dict) for message in messages):
        raise DataError("messages must be a list of objects with role and content")
    return messages, [False] * len(messages)


def _conversation(asked: list[dict[str, Any]], learned: list[bool], record: dict[str, Any], name: str, where: str) -> Conversation:
    answer = record.get(name)
    if not isinstance(answer, str) or not answer:
        raise DataError(f"{name} is no text")
    messages = [*asked, {"role": ASSISTANT, "content": answer}]
    check_messages(messages)
    return Conversation(messages, [*learned, True], where)


def _scores(record: dict[str, Any]) -> tuple[float, float] | None:
    values = [record.get(f"{name}_logp") for name in ANSWERS]
    if values == [None, None]:
        return None
    for name, value in zip(ANSWERS, values, strict=True):
        if not isinstance(value, int | float) or isinstance(value, bool) or not -np.inf < value <= 0:
            raise DataError(f"{name}_logp is {value!r}, a logarithm of a probability is a number of at most 0")
    return float(values[0]), float(values[1])  # type: ignore[arg-type]


@dataclass(frozen=True)
class _Pair:
    answers: tuple[EncodedChat, EncodedChat]
    scores: tuple[float, float]


def encode_preferences(
    pairs: Iterator[Preference], encoder: ChatEncoder, seq_length: int, too_long: TooLong = "truncate"
) -> tuple[list[_Pair], list[str]]:
    """The pairs whose answers fit, and where those are from that do not ("truncate" leaves them out, "refuse" raises).

    Raises DataError for a pair without scores, with its remedy, and where no pair is left.
    """
    encoded, left_out = [], []
    for pair in pairs:
        if pair.scores is None:
            raise DataError(
                f"{pair.where}: the pair has no scores of the reference model (chosen_logp, rejected_logp): "
                "python tools/score_preferences.py --load REFERENCE --input PAIRS.jsonl --output SCORED.jsonl adds them"
            )
        chosen, rejected = (encoder.encode(answer) for answer in pair.answers)
        longest = max(len(chosen.ids), len(rejected.ids))
        if longest <= seq_length + 1:
            encoded.append(_Pair((chosen, rejected), pair.scores))
        elif too_long == "refuse":
            raise DataError(f"{pair.where}: an answer ends after {longest} tokens, a sequence of {seq_length} holds {seq_length + 1}")
        else:
            left_out.append(pair.where)
    if not encoded:
        raise DataError(f"none of the {len(left_out)} pairs fits {seq_length + 1} tokens: use a longer --seq-length")
    return encoded, left_out


class PreferenceDataset:
    """Samples of `seq_length` tokens, at least `num_samples` in whole epochs; None: one epoch. Raises ConfigError and DataError."""

    def __init__(
        self, pairs: list[_Pair], *, seq_length: int, num_samples: int | None, seed: int, left_out: list[str] | None = None
    ) -> None:
        if num_samples is not None and num_samples < 0:
            raise ConfigError(f"{num_samples} samples were asked for; the number must not be negative")
        self._pairs, self.seq_length, self._seed, self._left_out = pairs, seq_length, seed, left_out or []
        self.num_epochs = max(1, -(-(num_samples or 0) // (2 * len(pairs))))

    def __len__(self) -> int:
        """The number of samples, two for each pair."""
        return 2 * len(self._pairs) * self.num_epochs

    def __getitem__(self, i: int) -> Sample:
        """Sample `i`, in fresh arrays. Raises IndexError beyond the end."""
        if not 0 <= i < len(self):
            raise IndexError(f"sample {i} of {len(self)}")
        epoch, place = divmod(i // 2, len(self._pairs))
        # The legacy generator is the one whose stream NumPy promises never to change.
        pair = self._pairs[np.random.RandomState([self._seed, epoch]).permutation(len(self._pairs))[place]]
        chat = pair.answers[i % 2]
        tokens, labels = (np.zeros(self.seq_length, np.int64) for _ in range(2))
        loss_mask, length = np.zeros(self.seq_length, np.float32), len(chat.ids) - 1
        tokens[:length], labels[:length], loss_mask[:length] = chat.ids[:-1], chat.ids[1:], chat.is_answer[1:]
        return Sample(tokens, labels, loss_mask, np.arange(self.seq_length), reference=pair.scores[i % 2])

    def lines(self, name: str) -> list[str]:
        """What the dataset is made of, for people."""
        rows = [f"{name}: {len(self):,} samples of {self.seq_length} tokens, {self.num_epochs} epoch(s) of {len(self._pairs):,} pairs"]
        if self._left_out:
            more = ", ..." if len(self._left_out) > _NAMED else ""
            rows.append(f"  {len(self._left_out):,} pairs left out, too long ({', '.join(self._left_out[:_NAMED])}{more})")
        return rows
