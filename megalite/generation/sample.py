"""Generation from a whole model, of one or several sequences at once.

Decisions
- Tokens are computed with a cache of keys and values (`decoder`); `next_logits` is the plain definition, which the cache must reproduce.
- Beyond the model's longest sequence only the newest tokens are read, as positions 0, 1, ...: the model has learned no others. There
  every token's position changes with every step, so nothing can be cached, and the plain way is taken.
- Rows that pad the vocabulary are cut off before anything is chosen, so they can be neither sampled nor counted among the top k.
- Every row draws from a generator of its own: what it gets does not depend on the other rows.

Legend: S tokens that the model reads, V vocabulary.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor

from megalite.data.batch import MicroBatch
from megalite.errors import ConfigError, DataError, MegaliteError
from megalite.generation.choice import Sampling, choose
from megalite.generation.decoder import Decoder
from megalite.model import GPTStage

__all__ = ["generate", "generate_batch", "next_logits"]

OnToken = Callable[[int, int], bool]


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
) -> list[list[int]]:
    """The ids that follow each prompt: at most `max_new_tokens`, and up to the first `stop_id`, which is left out.

    seeds: of each row; None: `sampling.seed` for all. vocab_size: ids from here on are never predicted, for a tokenizer smaller than the
    model's vocabulary. on_token(row, token): called as tokens come; returning True ends that row. The stage must be the whole model on
    one rank; its training mode is kept. Raises ConfigError for an empty prompt, DataError for ids outside the vocabulary, and
    MegaliteError when the model gives logits that are not finite.
    """
    for ids in prompts:
        _check(stage, ids)
    limit = min(vocab_size or stage.config.known_vocab_size, stage.config.known_vocab_size)
    row_seeds = [sampling.seed] * len(prompts) if seeds is None else list(seeds)
    rows = [_Row(list(ids), len(ids), torch.Generator().manual_seed(seed)) for ids, seed in zip(prompts, row_seeds, strict=True)]
    was_training = stage.training
    stage.eval()
    try:
        _Run(stage, rows, sampling, stop_id, limit, on_token).run()
    finally:
        stage.train(was_training)
    return [row.ids[row.prompt_length :] for row in rows]


@dataclass
class _Row:
    ids: list[int]
    prompt_length: int
    generator: torch.Generator
    is_done: bool = False
    logits: Tensor = field(default_factory=lambda: torch.empty(0))


class _Run:
    def __init__(
        self, stage: GPTStage, rows: list[_Row], sampling: Sampling, stop_id: int | None, vocab_size: int, on_token: OnToken | None
    ) -> None:
        self.stage, self.rows, self.sampling = stage, rows, sampling
        self.stop_id, self.vocab_size, self.on_token = stop_id, vocab_size, on_token
        self.decoder = Decoder(stage)

    def run(self) -> None:
        longest = self.decoder.longest
        wanted = max(len(row.ids) for row in self.rows) + self.sampling.max_new_tokens
        capacity = wanted if longest is None else min(wanted, longest)
        cached = [row for row in self.rows if len(row.ids) <= capacity]
        cache = self.decoder.new_cache(len(cached), capacity)
        for number, row in enumerate(cached):
            row.logits = self.decoder.prefill(cache, number, row.ids)
        while cached and not all(row.is_done for row in cached):
            self._take_tokens(cached)
            if max(cache.lengths) >= capacity:
                break
            # a row that is done computes on: its numbers are not looked at
            for row, logits in zip(cached, self.decoder.step(cache, [row.ids[-1] for row in cached]), strict=True):
                row.logits = logits
        self._without_cache()

    def _without_cache(self) -> None:
        for row in self.rows:
            while not row.is_done:
                row.logits = next_logits(self.stage, row.ids)
                self._take_tokens([row])

    def _take_tokens(self, rows: list[_Row]) -> None:
        for row in rows:
            if row.is_done:
                continue
            logits = row.logits[: self.vocab_size].float().cpu()
            if not torch.isfinite(logits).all():
                raise MegaliteError(f"the model's logits after {len(row.ids)} tokens are not finite; its weights are damaged")
            token = choose(logits, self.sampling, row.generator, row.ids)
            if token == self.stop_id:
                row.is_done = True
                continue
            row.ids.append(token)
            is_stopped = self.on_token is not None and self.on_token(self.rows.index(row), token)
            row.is_done = is_stopped or len(row.ids) - row.prompt_length >= self.sampling.max_new_tokens


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


@torch.no_grad()  # not inference_mode, whose tensors (the model keeps rotary frequencies) could not be trained with
def next_logits(stage: GPTStage, sequence: Sequence[int]) -> Tensor:
    """Logits of the token after `sequence`, [V], without the rows that pad the vocabulary, from the whole sequence."""
    longest = stage.config.max_position_embeddings
    window = sequence if longest is None else sequence[-longest:]
    tokens = torch.tensor([window], device=next(stage.parameters()).device)
    batch = MicroBatch(
        tokens=tokens,
        labels=torch.zeros_like(tokens),
        loss_mask=torch.zeros_like(tokens, dtype=torch.float32),
        position_ids=torch.arange(tokens.shape[1], device=tokens.device)[None],
        first_sample=0,
    )
    return stage.logits(None, batch)[-1, 0, : stage.config.known_vocab_size]
