"""Generation from a model, of one or several sequences at once.

Decisions
- Tokens are computed with a cache of keys and values (`decoder`). What it must reproduce is the model's own forward pass over the whole
  sequence, to which the tests compare it.
- Beyond the model's longest sequence only the newest tokens are read, as positions 0, 1, ...: the model has learned no others. There
  every token's position changes with every step, so nothing can be cached, and all are read anew.
- Rows that pad the vocabulary are cut off before anything is chosen, so they can be neither sampled nor counted among the top k.
- Every row draws from a generator of its own: what it gets does not depend on the other rows, nor on the layout.
- Under pp the last stage chooses, and all ranks learn which tokens, so that all of them agree on when a row ends.

Legend: S tokens that the model reads, V vocabulary.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from megalite import comm
from megalite.errors import ConfigError, DataError, MegaliteError
from megalite.generation.choice import Sampling, are_finite, choose
from megalite.generation.decoder import Decoder
from megalite.grid import Axis
from megalite.model import GPTStage

__all__ = ["generate", "generate_batch"]

OnToken = Callable[[int, int], bool]
_NOT_FINITE = -1


def generate(
    stage: GPTStage,
    ids: Sequence[int],
    *,
    max_new_tokens: int,
    temperature: float = 1.0,
    top_k: int | None = None,
    seed: int = 1,
    stop_id: int | None = None,
    vocab_size: int | None = None,
) -> list[int]:
    """The ids that follow one prompt, see `generate_batch` and `Sampling`."""
    sampling = Sampling(max_new_tokens=max_new_tokens, temperature=temperature, top_k=top_k, seed=seed)
    return generate_batch(stage, [ids], sampling, stop_id=stop_id, vocab_size=vocab_size)[0]


def generate_batch(
    stage: GPTStage,
    prompts: Sequence[Sequence[int]],
    sampling: Sampling,
    *,
    seeds: Sequence[int] | None = None,
    stop_id: int | None = None,
    vocab_size: int | None = None,
    on_token: OnToken | None = None,
    pp: Axis | None = None,
    int8_cache: bool = False,
) -> list[list[int]]:
    """The ids that follow each prompt: at most `max_new_tokens`, and up to the first `stop_id`, which is left out.

    seeds: of each row; None: `sampling.seed` for all. vocab_size: ids from here on are never predicted, for a tokenizer smaller than the
    model's vocabulary. on_token(row, token): called as tokens come; returning True ends that row. pp: as for `Decoder`, as is what the
    stage must be; over several ranks all make the same call, get the same tokens, and `on_token` must decide alike. int8_cache: keys and
    values take a quarter of fp32's memory and are rounded. The stage's training mode is kept. Raises ConfigError for an empty prompt,
    DataError for ids outside the vocabulary, and MegaliteError when the model gives logits that are not finite.
    """
    for ids in prompts:
        _check(stage, ids)
    limit = min(vocab_size or stage.config.known_vocab_size, stage.config.known_vocab_size)
    row_seeds = [sampling.seed] * len(prompts) if seeds is None else list(seeds)
    rows = [
        _Row(list(ids), len(ids), torch.Generator().manual_seed(seed), number)
        for number, (ids, seed) in enumerate(zip(prompts, row_seeds, strict=True))
    ]
    was_training = stage.training
    stage.eval()
    try:
        _Run(Decoder(stage, pp), rows, sampling, stop_id, limit, on_token).run(int8_cache)
    finally:
        stage.train(was_training)
    return [row.ids[row.prompt_length :] for row in rows]


@dataclass
class _Row:
    """One sequence. logits: of its next token, None on ranks that do not have them."""

    ids: list[int]
    prompt_length: int
    generator: torch.Generator
    number: int
    is_done: bool = False
    logits: Tensor | None = None


@dataclass
class _Run:
    decoder: Decoder
    rows: list[_Row]
    sampling: Sampling
    stop_id: int | None
    vocab_size: int
    on_token: OnToken | None

    def run(self, int8_cache: bool) -> None:
        longest = self.decoder.longest
        wanted = max(len(row.ids) for row in self.rows) + self.sampling.max_new_tokens
        capacity = wanted if longest is None else min(wanted, longest)
        cached = [row for row in self.rows if len(row.ids) <= capacity]
        cache = self.decoder.new_cache(len(cached), capacity, int8=int8_cache)
        for number, row in enumerate(cached):
            row.logits = self.decoder.prefill(cache, number, row.ids)
        while cached and not all(row.is_done for row in cached):
            self._take_tokens(cached)
            if max(cache.lengths) >= capacity or all(row.is_done for row in cached):
                break
            # a row that is done computes on: its numbers are not looked at
            logits = self.decoder.step(cache, [row.ids[-1] for row in cached])
            for row, own in zip(cached, [None] * len(cached) if logits is None else logits, strict=True):
                row.logits = own
        self._without_cache()

    def _without_cache(self) -> None:
        longest = self.decoder.config.max_position_embeddings
        for row in self.rows:
            while not row.is_done:
                row.logits = self.decoder.read_anew(row.ids if longest is None else row.ids[-longest:])
                self._take_tokens([row])

    def _take_tokens(self, rows: list[_Row]) -> None:
        waiting = [row for row in rows if not row.is_done]
        for row, token in zip(waiting, self._choose(waiting), strict=True):
            if token == _NOT_FINITE:
                raise MegaliteError(f"the model's logits after {len(row.ids)} tokens are not finite; its weights are damaged")
            if token == self.stop_id:
                row.is_done = True
                continue
            row.ids.append(token)
            is_stopped = self.on_token is not None and self.on_token(row.number, token)
            row.is_done = is_stopped or len(row.ids) - row.prompt_length >= self.sampling.max_new_tokens

    def _choose(self, rows: list[_Row]) -> list[int]:
        pp = self.decoder.pp
        tokens = [self._choice(row) for row in rows] if pp.is_last else [0] * len(rows)
        if pp.size == 1:
            return tokens
        device = self.decoder.device
        return comm.broadcast(torch.tensor(tokens, device=device), pp, source=pp.size - 1).tolist()

    def _choice(self, row: _Row) -> int:
        assert row.logits is not None, "the last stage has logits"
        logits = row.logits[: self.vocab_size].float().cpu()
        if not are_finite(logits):
            return _NOT_FINITE
        return choose(logits, self.sampling, row.generator, row.ids)


def _check(stage: GPTStage, ids: Sequence[int]) -> None:
    if not ids:
        raise ConfigError("the prompt has no tokens: give at least one, such as the end-of-document token")
    vocab_size = stage.config.known_vocab_size
    outside = [token for token in ids if not 0 <= token < vocab_size]
    if outside:
        raise DataError(
            f"the prompt holds token {outside[0]}, but the model's vocabulary ends at {vocab_size - 1}: "
            "use the tokenizer that the model was trained with"
        )
