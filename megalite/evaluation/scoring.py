"""How likely a model finds tokens, over tp and pp.

Decisions
- Sums of losses come from the model's own loss, as in training: it never holds the logits of a batch.
- Likelihoods of continuations need to know the likeliest token too, so there the logits exist, of a bounded number of rows at a time; they
  stay cut over tp.
- Rows are padded at their end, which nothing before it can see. All ranks make the same calls and get the same numbers.

Legend: B rows, S tokens of a row, H hidden, V vocabulary; `_local` is this tp rank's share.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from megalite import comm
from megalite.data.batch import MicroBatch
from megalite.errors import ConfigError, DataError, MegaliteError
from megalite.grid import Axis
from megalite.model import GPTStage
from megalite.tensor_parallel.cross_entropy import vocab_parallel_argmax, vocab_parallel_cross_entropy

__all__ = ["Likelihood", "Row", "Scorer"]

_MOST_LOGITS = 1 << 28


class Row(NamedTuple):
    """ids: one token more than the model reads; is_counted: of each of the others, whether its prediction counts."""

    ids: Sequence[int]
    is_counted: Sequence[bool]


class Likelihood(NamedTuple):
    """Of a continuation: the natural logarithm of its probability, and whether every token of it is the likeliest one."""

    log_probability: float
    is_greedy: bool


class Scorer:
    """stage: in evaluation mode, built without sequence parallelism; pp: the axis whose rank holds that stage, None: it is the whole model.

    batch_size: rows that are computed together. Raises ConfigError for a size that is none.
    """

    def __init__(self, stage: GPTStage, pp: Axis | None = None, *, batch_size: int = 8) -> None:
        if batch_size < 1:
            raise ConfigError(f"batch_size is {batch_size}, it must be at least 1")
        assert not stage.ctx.sequence_parallel, "evaluation needs a stage without sequence parallelism"
        self.pp, self.batch_size, self._stage = pp or Axis.single("pp"), batch_size, stage
        parameter = next(stage.parameters())
        self._device, self._dtype = parameter.device, parameter.dtype

    @property
    def longest(self) -> int | None:
        """Tokens that the model can read at once; None: without end."""
        return self._stage.config.max_position_embeddings

    def total_loss(self, rows: Sequence[Row]) -> float:
        """The sum of the counted tokens' cross entropies, in nats. Raises DataError for ids outside the vocabulary, and MegaliteError where
        the model's numbers are not finite."""
        total = 0.0
        for first in range(0, len(rows), self.batch_size):
            batch = self._batch(rows[first : first + self.batch_size])
            loss = self._run(batch, return_logits=False)
            total += self._shared(None if loss is None else loss.reshape(1), 1)[0]
        return total

    def likelihoods(self, pairs: Sequence[tuple[Sequence[int], Sequence[int]]]) -> list[Likelihood]:
        """How likely each continuation is after its context (ids; both not empty). Of what is longer than the model can read, the oldest
        tokens are left out. Raises ConfigError for a continuation that is longer by itself, and as `total_loss`."""
        rows = [self._row(context, continuation) for context, continuation in pairs]
        order = sorted(range(len(rows)), key=lambda number: -len(rows[number].ids))  # rows of a batch are of similar length
        found: dict[int, Likelihood] = {}
        while order:
            width = (len(rows[order[0]].ids) - 1) * self._stage.config.padded_vocab_size // self._stage.ctx.tp.size
            count = max(1, min(self.batch_size, _MOST_LOGITS // width))
            numbers, order = order[:count], order[count:]
            found |= zip(numbers, self._likelihoods([rows[number] for number in numbers]), strict=True)
        return [found[number] for number in range(len(rows))]

    def _row(self, context: Sequence[int], continuation: Sequence[int]) -> Row:
        if not context or not continuation:
            raise ConfigError("a likelihood needs a context and a continuation of at least one token each")
        ids = [*context, *continuation]
        if self.longest is not None:
            if len(continuation) > self.longest:
                raise ConfigError(f"a continuation has {len(continuation)} tokens, the model reads {self.longest}: shorten it")
            ids = ids[-(self.longest + 1) :]
        return Row(ids, [False] * (len(ids) - 1 - len(continuation)) + [True] * len(continuation))

    def _likelihoods(self, rows: Sequence[Row]) -> list[Likelihood]:
        batch, config = self._batch(rows), self._stage.config
        logits = self._run(batch, return_logits=True)
        numbers = None
        if logits is not None:
            sizes: dict[str, Any] = dict(
                vocab_size=config.known_vocab_size, padded_vocab_size=config.padded_vocab_size, tp=self._stage.ctx.tp
            )
            labels, counted = batch.labels.t(), batch.loss_mask.t() > 0
            losses = vocab_parallel_cross_entropy(logits, labels, **sizes).double().masked_fill(~counted, 0.0)
            is_likeliest = (vocab_parallel_argmax(logits, **sizes) == labels) | ~counted
            numbers = torch.cat((-losses.sum(0), is_likeliest.all(0).double()))
        shared = self._shared(numbers, 2 * len(rows))
        return [Likelihood(value, greedy == 1) for value, greedy in zip(shared[: len(rows)], shared[len(rows) :], strict=True)]

    def _batch(self, rows: Sequence[Row]) -> MicroBatch:
        length = max(len(row.ids) for row in rows) - 1
        ids = torch.zeros(len(rows), length + 1, dtype=torch.int64)
        mask = torch.zeros(len(rows), length)
        for number, row in enumerate(rows):
            ids[number, : len(row.ids)] = torch.as_tensor(row.ids, dtype=torch.int64)
            mask[number, : len(row.is_counted)] = torch.as_tensor(row.is_counted, dtype=torch.float32)
        low, high, vocab_size = int(ids.min()), int(ids.max()), self._stage.config.known_vocab_size
        if low < 0 or high >= vocab_size:
            raise DataError(
                f"the data holds token {high if low >= 0 else low}, but the model's vocabulary has the ids 0 to {vocab_size - 1}: "
                "use data and a tokenizer that the model was trained with"
            )
        batch = MicroBatch(
            tokens=ids[:, :-1].contiguous(),
            labels=ids[:, 1:].contiguous(),
            loss_mask=mask,
            position_ids=torch.arange(length).expand(len(rows), -1).contiguous(),
            first_sample=0,
        )
        return batch.to(self._device)

    @torch.no_grad()  # not inference mode: the model keeps tables, and could not be trained with them any more
    def _run(self, batch: MicroBatch, *, return_logits: bool) -> Tensor | None:
        """The stage's loss or logits [S, B, V_local]; None on stages without the head."""
        x, stage = None, self._stage
        if stage.embedding is None:
            buffer = torch.empty((*batch.tokens.t().shape, stage.config.hidden_size), dtype=self._dtype, device=self._device)
            x = comm.start_recv(buffer, self.pp, self.pp.rank - 1).wait()
        if stage.head is None:
            comm.start_send(stage(x, batch).contiguous(), self.pp, self.pp.rank + 1).wait()
            return None
        return stage(x, batch, return_logits=return_logits)

    def _shared(self, numbers: Tensor | None, count: int) -> list[float]:
        """What the last stage knows, on all ranks."""
        if numbers is None:
            numbers = torch.zeros(count, device=self._device)
        values = comm.broadcast(numbers.double(), self.pp, source=self.pp.size - 1).tolist()
        if not all(abs(value) < float("inf") for value in values):
            raise MegaliteError("the model's losses are not finite; its weights are damaged, or --dtype is too narrow for it")
        return values
