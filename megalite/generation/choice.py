"""Which token follows: settings of sampling, and one draw.

Decisions
- In this order: repetition penalty on logits, temperature, top k, top p, min p; the likeliest token always remains.
- Probabilities are computed in fp64 on the CPU from a generator of the row's own: a temperature however small does not overflow, the
  same seed draws the same way on every device, and no row depends on the others.
- What can be done by NumPy is: torch would wake its threads for a vocabulary's length of numbers, and on a busy machine waiting for them
  takes longer than the model.

Legend: V vocabulary.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from megalite.errors import ConfigError

__all__ = ["Sampling", "are_finite", "choose"]


@dataclass(frozen=True, kw_only=True)
class Sampling:
    """How tokens are chosen. Raises ConfigError for settings without a meaning, all in one message.

    temperature: 0 always takes the likeliest. top_k: only so many of the likeliest; None: all. top_p: only the likeliest that make up
    this share of the probability together. min_p: only those with at least this share of the likeliest one's probability.
    repetition_penalty: logits of tokens that occurred are divided (below 0: multiplied) by it (Keskar et al. 2019, arXiv:1909.05858).
    """

    max_new_tokens: int
    temperature: float = 1.0
    top_k: int | None = None
    top_p: float | None = None
    min_p: float | None = None
    repetition_penalty: float = 1.0
    seed: int = 1

    def __post_init__(self) -> None:
        violations = []
        if self.max_new_tokens < 1:
            violations.append(f"max_new_tokens is {self.max_new_tokens}, it must be at least 1")
        if not 0 <= self.temperature < float("inf"):
            violations.append(f"temperature is {self.temperature}, it must be 0 (always the likeliest token) or more")
        if self.top_k is not None and self.top_k < 1:
            violations.append(f"top_k is {self.top_k}, it must be at least 1")
        for name in ("top_p", "min_p"):
            value = getattr(self, name)
            if value is not None and not 0 < value <= 1:
                violations.append(f"{name} is {value}, it must lie above 0 and up to 1")
        if not 0 < self.repetition_penalty < float("inf"):
            violations.append(f"repetition_penalty is {self.repetition_penalty}, it must be above 0 (1: none)")
        if not 0 <= self.seed < 2**64:
            violations.append(f"seed is {self.seed}, it must lie in [0, 2^64)")
        if violations:
            raise ConfigError(violations)


def are_finite(logits: Tensor) -> bool:
    """logits: fp32 [V] on the CPU."""
    return bool(np.isfinite(logits.numpy()).all())


def choose(logits: Tensor, sampling: Sampling, generator: torch.Generator, seen: Iterable[int] = ()) -> int:
    """One id from logits, fp32 [V] on the CPU. seen: tokens that occurred, for the penalty."""
    if sampling.repetition_penalty != 1.0:
        logits = _penalised(logits, sampling.repetition_penalty, seen)
    if sampling.temperature == 0:
        return int(np.argmax(logits.numpy()))
    values, candidates = torch.from_numpy(logits.numpy().astype(np.float64)), None
    if sampling.top_k is not None or sampling.top_p is not None:  # sorting a whole vocabulary takes longer than drawing from it
        values, candidates = torch.topk(values, min(sampling.top_k or len(values), len(values)))
    probabilities = torch.softmax((values - values.max()) / sampling.temperature, dim=-1)
    if sampling.top_p is not None:
        before = probabilities.cumsum(0) - probabilities
        probabilities = probabilities.masked_fill(before >= sampling.top_p, 0.0)
    if sampling.min_p is not None:
        probabilities = probabilities.masked_fill(probabilities < sampling.min_p * probabilities.max(), 0.0)
    drawn = int(torch.multinomial(probabilities, 1, generator=generator))
    return drawn if candidates is None else int(candidates[drawn])


def _penalised(logits: Tensor, penalty: float, seen: Iterable[int]) -> Tensor:
    tokens = torch.tensor(sorted({token for token in seen if token < len(logits)}), dtype=torch.int64)
    logits = logits.clone()
    values = logits[tokens]
    logits[tokens] = torch.where(values > 0, values / penalty, values * penalty)
    return logits
