"""What every dataset hands out, so that loaders and blends need not know where tokens come from.

A `SampleFormat` turns the tokens that a dataset read into a sample: labels, masks, positions. Padding is known by its
position: a place without a token has input and label 0 and loss mask 0. No id of the data is ever rewritten, and none is
masked for its value except, where asked for, the end-of-document token as an input. A document's last token is its
end-of-document token; what follows is the next document.

S sequence.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple, Protocol

import numpy as np

__all__ = ["Piece", "Sample", "SampleDataset", "SampleFormat", "TokenSource", "read_stream", "stream_pieces"]


@dataclass(frozen=True, slots=True)
class Sample:
    """One training sequence; the arrays belong to whoever asked for it and may be changed.

    `tokens` int64 [S] the inputs; `labels` int64 [S] the id to predict there; `loss_mask` float32 [S] 1 where
    that prediction counts, else 0; `position_ids` int64 [S]; `document_ids` int32 [S] numbers the documents from 0, and
    tokens attend only within theirs, None where everything earlier may be attended to. `reference`: of a preferred or rejected answer, its
    log-probability under the reference model (`preferences`), None elsewhere.
    """

    tokens: np.ndarray
    labels: np.ndarray
    loss_mask: np.ndarray
    position_ids: np.ndarray
    document_ids: np.ndarray | None = None
    reference: float | None = None


class SampleDataset(Protocol):
    """A fixed list of samples: sample `i` never depends on which samples were read before."""

    def __len__(self) -> int: ...

    def __getitem__(self, i: int, /) -> Sample: ...


class Piece(NamedTuple):
    """Tokens [start, stop) of a sequence; `dataset` is its number in a blend."""

    sequence: int
    start: int
    stop: int
    dataset: int = 0


class TokenSource(Protocol):
    """What a dataset needs of a corpus: `IndexedDataset`, or a stand-in."""

    path_prefix: str
    dtype: np.dtype
    sizes: np.ndarray

    def __len__(self) -> int: ...

    def get(self, i: int, offset: int = 0, length: int | None = None) -> np.ndarray: ...


@dataclass(frozen=True, kw_only=True)
class SampleFormat:
    """How tokens become a sample of `seq_length` inputs.

    `eod_id`: the token that ends a document, needed by the others. `reset_position_ids`: positions restart after it.
    `reset_attention_mask`: nothing after it attends to it or to what is before it. `eod_mask_loss`: no loss where the
    input is it; the prediction of it keeps its loss.
    """

    seq_length: int
    eod_id: int | None = None
    reset_position_ids: bool = False
    reset_attention_mask: bool = False
    eod_mask_loss: bool = False

    def violations(self) -> list[str]:
        """One sentence for everything that cannot be."""
        found = [] if self.seq_length >= 1 else [f"sequence length is {self.seq_length}, it must be at least 1"]
        if self.eod_id is None and (self.reset_position_ids or self.reset_attention_mask or self.eod_mask_loss):
            found.append(
                "resetting position ids or the attention mask, or masking the loss after documents, needs the end-of-document id; "
                "neither the data's side file nor a tokenizer says it"
            )
        return found

    def sample(self, stream: np.ndarray) -> Sample:
        """The sample of `stream`, [at most seq_length + 1] tokens: inputs are the first seq_length, labels the next ones."""
        length = self.seq_length
        num_inputs, num_labels = min(len(stream), length), max(len(stream) - 1, 0)
        tokens, labels = np.zeros(length, np.int64), np.zeros(length, np.int64)
        tokens[:num_inputs] = stream[:num_inputs]
        labels[:num_labels] = stream[1:]
        loss_mask = np.zeros(length, np.float32)
        loss_mask[:num_labels] = 1.0
        position_ids = np.arange(length, dtype=np.int64)
        document_ids = None
        if self.eod_mask_loss or self.reset_position_ids or self.reset_attention_mask:
            ends = np.flatnonzero(tokens[:num_inputs] == self.eod_id)
            first_tokens = ends[ends + 1 < length] + 1
            if self.eod_mask_loss:
                loss_mask[ends] = 0.0
            if self.reset_position_ids:
                starts = np.zeros(length, np.int64)
                starts[first_tokens] = first_tokens
                position_ids -= np.maximum.accumulate(starts)
            if self.reset_attention_mask:
                document_ids = np.zeros(length, np.int32)
                document_ids[first_tokens] = 1
                document_ids = np.cumsum(document_ids, dtype=np.int32)
        return Sample(tokens, labels, loss_mask, position_ids, document_ids)


def read_stream(source: TokenSource, documents: list[int], start: int, end: int) -> np.ndarray:
    """Tokens of `documents` laid end to end: from token `start` of the first to before token `end` of the last; int64."""
    pieces = stream_pieces(source, documents, start, end)
    return np.concatenate([source.get(piece.sequence, piece.start, piece.stop - piece.start) for piece in pieces], dtype=np.int64)


def stream_pieces(source: TokenSource, documents: list[int], start: int, end: int) -> list[Piece]:
    """What `read_stream` reads, one piece per document in order, empty ones included."""
    pieces = []
    for position, document in enumerate(documents):
        offset = start if position == 0 else 0
        stop = end if position == len(documents) - 1 else int(source.sizes[document])
        pieces.append(Piece(document, offset, max(stop, offset)))
    return pieces
