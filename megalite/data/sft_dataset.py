"""Samples for fine-tuning: whole conversations beside each other in one sequence, loss on the answers alone.

Decisions
- A conversation of L tokens takes L - 1 positions: its last token is predicted, but nothing is predicted after it. Positions restart at 0
  in every conversation, and tokens attend within theirs, so a sample gives the losses that its conversations give alone.
- Every epoch shuffles the conversations anew, packs them first-fit in that order and shuffles the sequences that result: a function of
  (seed, epoch), so sample i is one of (data, seed, i) and neither of the layout nor of how many samples a run asks for. No conversation is
  cut for the sake of packing, and each is read exactly once in an epoch.
- What is longer than a sequence is cut at its end, or refused; what then holds no answer is left out. Both are counted, and named.
- Padding is a place without a token: loss mask 0, its own document. Positions of it start at 0 too.
- All conversations are encoded when the dataset is made, into two flat arrays, because packing needs their lengths.

S sequence, T tokens of all conversations.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Literal, NamedTuple

import numpy as np

from megalite.data.chat import Conversation, read_chat
from megalite.data.chat_encoding import ChatEncoder
from megalite.data.packing import first_fit
from megalite.data.sample import Sample
from megalite.errors import ConfigError, DataError

__all__ = ["EncodedChats", "SFTDataset", "TooLong", "encode_chats", "read_sft_dataset"]

TooLong = Literal["truncate", "refuse"]
_NAMED = 3


@dataclass(frozen=True)
class EncodedChats:
    """Conversations of up to S + 1 tokens, one after the other.

    ids: int32 [T]; is_answer: bool [T]; starts: int64 [conversations + 1], the borders between them. cut, without_answer: where those are
    from that were cut, and those that were left out as their answers begin after S + 1 tokens.
    """

    ids: np.ndarray
    is_answer: np.ndarray
    starts: np.ndarray
    cut: list[str] = field(default_factory=list)
    without_answer: list[str] = field(default_factory=list)

    def __len__(self) -> int:
        return len(self.starts) - 1

    @property
    def lengths(self) -> np.ndarray:
        """Tokens of every conversation."""
        return np.diff(self.starts)


def encode_chats(chats: Iterable[Conversation], encoder: ChatEncoder, seq_length: int, too_long: TooLong = "truncate") -> EncodedChats:
    """Encode all conversations. Raises DataError for the first that cannot be, with "refuse" also for one of more than S + 1 tokens, and
    where none is left."""
    ids, is_answer, lengths = [], [], []
    cut, without_answer = [], []
    for chat in chats:
        encoded = encoder.encode(chat)
        length = len(encoded.ids)
        if length > seq_length + 1:
            if too_long == "refuse":
                raise DataError(
                    f"{chat.where}: the conversation has {length} tokens, a sequence of {seq_length} holds {seq_length + 1}: use a longer "
                    "--seq-length, shorten it, or cut such conversations with --sft-too-long truncate"
                )
            length = seq_length + 1
        if not encoded.is_answer[1:length].any():
            without_answer.append(chat.where)
            continue
        if length < len(encoded.ids):
            cut.append(chat.where)
        ids.append(encoded.ids[:length])
        is_answer.append(encoded.is_answer[:length])
        lengths.append(length)
    if not lengths:
        raise DataError(
            f"none of the {len(without_answer)} conversations has an answer within {seq_length + 1} tokens: use a longer --seq-length"
        )
    return EncodedChats(np.concatenate(ids), np.concatenate(is_answer), np.cumsum([0, *lengths]), cut, without_answer)


class _Epoch(NamedTuple):
    """bins: the conversations of every sequence; first: the number of its first sample."""

    bins: list[np.ndarray]
    first: int


class SFTDataset:
    """Samples of `seq_length` tokens from `chats`, at least `num_samples` in whole epochs; None: one epoch.

    Raises ConfigError for numbers that make no sense.
    """

    def __init__(self, chats: EncodedChats, *, seq_length: int, num_samples: int | None, seed: int) -> None:
        violations = [] if seq_length >= 1 else [f"sequence length is {seq_length}, it must be at least 1"]
        if num_samples is not None and num_samples < 0:
            violations.append(f"{num_samples} samples were asked for; the number must not be negative")
        if not 0 <= seed < 2**32:
            violations.append(f"seed is {seed}, it must lie in [0, 2^32)")
        if violations:
            raise ConfigError(violations)
        self.chats, self.seq_length, self.seed = chats, seq_length, seed
        self._epochs: list[_Epoch] = []
        self._length = 0
        while not self._epochs or (num_samples is not None and self._length < num_samples):
            bins = self._pack(len(self._epochs))
            self._epochs.append(_Epoch(bins, self._length))
            self._length += len(bins)
        self._firsts = np.array([epoch.first for epoch in self._epochs])

    def __len__(self) -> int:
        """The number of samples."""
        return self._length

    @property
    def num_epochs(self) -> int:
        return len(self._epochs)

    def conversations(self, i: int) -> list[int]:
        """The conversations in sample `i`, in order. Raises IndexError beyond the end."""
        if not 0 <= i < self._length:
            raise IndexError(f"sample {i} of {self._length}")
        epoch = self._epochs[int(np.searchsorted(self._firsts, i, side="right")) - 1]
        return epoch.bins[i - epoch.first].tolist()

    def __getitem__(self, i: int) -> Sample:
        """Sample `i`, in fresh arrays. Raises IndexError beyond the end."""
        length = self.seq_length
        tokens, labels, position_ids = (np.zeros(length, np.int64) for _ in range(3))
        loss_mask, document_ids = np.zeros(length, np.float32), np.zeros(length, np.int32)
        place = 0
        for number, conversation in enumerate(self.conversations(i)):
            start, stop = self.chats.starts[conversation : conversation + 2].tolist()
            here = slice(place, place + stop - start - 1)
            tokens[here] = self.chats.ids[start : stop - 1]
            labels[here] = self.chats.ids[start + 1 : stop]
            loss_mask[here] = self.chats.is_answer[start + 1 : stop]
            position_ids[here] = np.arange(stop - start - 1)
            document_ids[here] = number
            place = here.stop
        if place < length:
            position_ids[place:] = np.arange(length - place)
            document_ids[place:] = document_ids[place - 1] + 1
        return Sample(tokens, labels, loss_mask, position_ids, document_ids)

    def lines(self, name: str) -> list[str]:
        """What the dataset is made of, for people."""
        chats, first = self.chats, self._epochs[0].bins
        answers, positions = int(chats.is_answer.sum()), int((chats.lengths - 1).sum())
        rows = [
            f"{name}: {len(self):,} samples of {self.seq_length} tokens, {self.num_epochs} epoch(s) of {len(chats):,} conversations",
            f"  {len(chats.ids):,} tokens, {answers:,} of them answers; packed into {len(first):,} sequences, "
            f"{positions / (len(first) * self.seq_length):.1%} full",
        ]
        for places, words in ((chats.cut, "cut at the end"), (chats.without_answer, "left out: no answer within a sequence")):
            if places:
                more = ", ..." if len(places) > _NAMED else ""
                rows.append(f"  {len(places):,} conversations {words} ({', '.join(places[:_NAMED])}{more})")
        return rows

    def _pack(self, epoch: int) -> list[np.ndarray]:
        # The legacy generator is the one whose stream NumPy promises never to change.
        random = np.random.RandomState([self.seed, epoch])
        order = random.permutation(len(self.chats))
        packed = first_fit((self.chats.lengths[order] - 1).tolist(), self.seq_length)
        return [order[packed[number]] for number in random.permutation(len(packed)).tolist()]


def read_sft_dataset(
    path: str, encoder: ChatEncoder, *, seq_length: int, num_samples: int | None, seed: int, too_long: TooLong
) -> SFTDataset:
    """The dataset of a .jsonl file. Raises DataError and ConfigError."""
    return SFTDataset(
        encode_chats(read_chat(path), encoder, seq_length, too_long), seq_length=seq_length, num_samples=num_samples, seed=seed
    )
