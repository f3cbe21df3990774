"""Sampling from a whole model: one sequence, one token after the other.

Decisions
- Every token is computed from all tokens before it, nothing is cached: the plain definition, which a faster way must
  reproduce.
- Beyond the model's longest sequence only the newest tokens are read, as positions 0, 1, ...: the model has learned no
  others.
- Rows that pad the vocabulary are cut off before anything is chosen, so they can be neither sampled nor counted among
  the top k.
- Probabilities are computed in fp64 on the CPU from a generator of our own: a temperature however small does not
  overflow, and the same seed draws the same way on every device.

Legend: S tokens that the model reads, V vocabulary.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from megalite.data.batch import MicroBatch
from megalite.errors import ConfigError, DataError, MegaliteError
from megalite.model import GPTStage

__all__ = ["choose", "generate"]


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
    """The ids that follow the prompt `ids`: at most `max_new_tokens`, and up to the first `stop_id`, which is left out.

    temperature: 0 always takes the likeliest token. top_k: only so many of the likeliest tokens are drawn from; None:
    all. vocab_size: ids from here on are never predicted, for a tokenizer smaller than the model's vocabulary. The
    stage must be the whole model on one rank; its training mode is kept.
    Raises ConfigError for settings without a meaning or an empty prompt, DataError for ids outside the vocabulary, and
    MegaliteError when the model gives logits that are not finite.
    """
    whole = stage.spec.has_embedding and stage.spec.has_head and stage.ctx.tp.size == 1
    assert whole, "generation needs the whole model on one rank"
    _check(stage, ids, _setting_violations(max_new_tokens, temperature, top_k, seed))
    vocab_size = min(vocab_size or stage.config.known_vocab_size, stage.config.known_vocab_size)
    generator = torch.Generator().manual_seed(seed)
    sequence, was_training = list(ids), stage.training
    stage.eval()
    try:
        for _ in range(max_new_tokens):
            token = choose(_next_logits(stage, sequence)[:vocab_size], temperature, top_k, generator)
            if token == stop_id:
                break
            sequence.append(token)
    finally:
        stage.train(was_training)
    return sequence[len(ids) :]


def choose(logits: Tensor, temperature: float, top_k: int | None, generator: torch.Generator) -> int:
    """One id from logits [V] on the CPU; temperature and top_k as for `generate`."""
    if temperature == 0:
        return int(logits.argmax())
    values, candidates = torch.topk(logits.double(), min(top_k or len(logits), len(logits)))
    probabilities = torch.softmax((values - values[0]) / temperature, dim=-1)
    return int(candidates[torch.multinomial(probabilities, 1, generator=generator)])


def _setting_violations(max_new_tokens: int, temperature: float, top_k: int | None, seed: int) -> list[str]:
    """What is wrong with these settings, one sentence each."""
    violations = []
    if max_new_tokens < 1:
        violations.append(f"max_new_tokens is {max_new_tokens}, it must be at least 1")
    if not 0 <= temperature < float("inf"):
        violations.append(f"temperature is {temperature}, it must be 0 (always the likeliest token) or more")
    if top_k is not None and top_k < 1:
        violations.append(f"top_k is {top_k}, it must be at least 1")
    if not 0 <= seed < 2**64:
        violations.append(f"seed is {seed}, it must lie in [0, 2^64)")
    return violations


def _check(stage: GPTStage, ids: Sequence[int], violations: list[str]) -> None:
    if not ids:
        violations = [*violations, "the prompt has no tokens: give at least one, such as the end-of-document token"]
    if violations:
        raise ConfigError(violations)
    vocab_size = stage.config.known_vocab_size
    outside = [token for token in ids if not 0 <= token < vocab_size]
    if outside:
        raise DataError(
            f"the prompt holds token {outside[0]}, but the model's vocabulary ends at {vocab_size - 1}: "
            "use the tokenizer that the model was trained with"
        )


@torch.no_grad()  # not inference_mode, whose tensors (the model keeps rotary frequencies) could not be trained with
def _next_logits(stage: GPTStage, sequence: Sequence[int]) -> Tensor:
    """Logits of the token after `sequence`, fp32 [V] on the CPU, without the rows that pad the vocabulary."""
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
    logits = stage.logits(None, batch)[-1, 0, : stage.config.known_vocab_size].float().cpu()
    if not torch.isfinite(logits).all():
        raise MegaliteError(f"the model's logits after {len(sequence)} tokens are not finite; its weights are damaged")
    return logits
