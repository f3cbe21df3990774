"""Perplexity: the exponential of the mean loss of a text's tokens, each of them predicted exactly once.

Decisions
- The mean is over tokens: losses and tokens are summed over all windows and divided once. A mean of windows' means would count the tokens
  of a short last window more than others.
- A stream is cut into windows of `context` tokens that the model reads. With `stride` below `context` they overlap: every window reads
  context - stride tokens again and counts the new ones alone, so all but the first tokens are predicted from at least that many. The last
  window is as long as what is left.
- The first token is predicted after a token that begins documents, where there is one; else it is read and not counted.

S tokens of a stream.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np

from megalite.errors import ConfigError, DataError
from megalite.evaluation.scoring import Row, Scorer

__all__ = ["Perplexity", "TokenStream", "Window", "measure", "windows"]


class Window(NamedTuple):
    """The model reads tokens [start, stop) of a stream; the predictions at [counted, stop) count: of tokens counted + 1 to stop."""

    start: int
    counted: int
    stop: int


class TokenStream:
    """Documents laid end to end.

    parts: their ids; a list of views of a file costs no memory. first: the id after which the first token is predicted; None: it is not.
    is_counted: for each token, whether its prediction counts; None: all do. num_bytes: of the text that the predicted tokens stand for.
    """

    def __init__(
        self, parts: Sequence[np.ndarray], first: int | None, *, is_counted: np.ndarray | None = None, num_bytes: int | None = None
    ) -> None:
        begin = [] if first is None else [np.array([first])]
        self._parts = [*begin, *parts]
        self._ends = np.cumsum([len(part) for part in self._parts], dtype=np.int64)
        self._is_counted = is_counted if is_counted is None or first is None else np.concatenate(([False], is_counted))
        self.num_bytes = None if first is None else num_bytes

    def __len__(self) -> int:
        """Tokens with the first one."""
        return int(self._ends[-1]) if len(self._ends) else 0

    def row(self, window: Window) -> Row:
        """What is computed for a window."""
        start, stop = window.start, window.stop + 1
        part = int(np.searchsorted(self._ends, start, side="right"))
        pieces, place = [], start
        while place < stop:
            begin = int(self._ends[part]) - len(self._parts[part])
            piece = self._parts[part][place - begin : stop - begin]
            pieces.append(piece)
            place += len(piece)
            part += 1
        is_counted = np.arange(start, window.stop) >= window.counted
        if self._is_counted is not None:
            is_counted &= self._is_counted[start + 1 : stop]
        return Row(np.concatenate(pieces, dtype=np.int64), is_counted)  # type: ignore[arg-type]


@dataclass(frozen=True)
class Perplexity:
    """total_loss: in nats, of num_tokens predictions; num_bytes: of the text they stand for, None where it is not known."""

    total_loss: float
    num_tokens: int
    num_windows: int
    num_bytes: int | None = None

    @property
    def loss(self) -> float:
        """Nats per token."""
        return self.total_loss / self.num_tokens

    @property
    def perplexity(self) -> float:
        """exp(loss); infinite beyond what a float holds."""
        return math.exp(self.loss) if self.loss < math.log(float(np.finfo(np.float64).max)) else math.inf

    @property
    def bits_per_byte(self) -> float | None:
        """Comparable between tokenizers; None where the bytes are not known."""
        return None if not self.num_bytes else self.total_loss / math.log(2) / self.num_bytes


def windows(num_tokens: int, context: int, stride: int) -> Iterator[Window]:
    """The windows of a stream of so many tokens.

    >>> list(windows(8, 3, 2))
    [Window(start=0, counted=0, stop=3), Window(start=2, counted=3, stop=5), Window(start=4, counted=5, stop=7)]
    """
    last = num_tokens - 1  # nothing is predicted after the last token
    start = counted = 0
    while counted < last:
        stop = min(start + context, last)
        yield Window(start, counted, stop)
        start, counted = start + stride, stop


def measure(scorer: Scorer, streams: Iterable[TokenStream], *, context: int, stride: int | None = None) -> Perplexity:
    """Raises ConfigError for sizes that do not fit, DataError where nothing can be predicted, and as `Scorer.total_loss`."""
    stride = context if stride is None else stride
    if not 1 <= stride <= context or (scorer.longest is not None and context > scorer.longest):
        limit = "" if scorer.longest is None else f", and the model reads {scorer.longest} tokens at once"
        raise ConfigError(f"context is {context} and stride {stride}: stride must be from 1 to context{limit}")
    total, num_tokens, num_windows, num_bytes = 0.0, 0, 0, 0
    is_known, waiting = True, []
    for stream in streams:
        is_known &= stream.num_bytes is not None
        num_bytes += stream.num_bytes or 0
        for window in windows(len(stream), context, stride):
            row = stream.row(window)
            if not np.any(row.is_counted):
                continue
            waiting.append(row)
            num_windows += 1
            num_tokens += int(np.sum(row.is_counted))
            if len(waiting) == scorer.batch_size:
                total += scorer.total_loss(waiting)
                waiting = []
    total += scorer.total_loss(waiting)
    if num_tokens == 0:
        raise DataError("the data holds no token to predict: give a text of two tokens or more")
    return Perplexity(total, num_tokens, num_windows, num_bytes if is_known else None)
