"""What evaluation harnesses ask of a model, in texts: likelihoods of continuations, of whole texts, and generated answers.

Decisions
- A context and its continuation are encoded together, and the continuation's tokens are those beyond as many as the context has by itself.
  Spaces at the end of the context go to the continuation, as tokens begin with them. Both as in lm-evaluation-harness, so that figures are
  comparable.
- An empty context is the token that begins documents (bos, else eod). Others get it only with `add_bos`, for models that were trained so.
- A whole text is cut into windows of as many tokens as the model reads; the last of them reaches back to be as long as the others.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from megalite.data.tokenizer import Tokenizer
from megalite.errors import ConfigError
from megalite.evaluation.perplexity import TokenStream, Window, windows
from megalite.evaluation.scoring import Likelihood, Scorer
from megalite.generation import Sampling, TextStream, generate_batch
from megalite.model import GPTStage

__all__ = ["TextRequests"]

_SAMPLING = ("temperature", "top_k", "top_p", "min_p", "repetition_penalty")
_DEFAULT_NEW_TOKENS = 256
_DEFAULT_LENGTH = 2048


@dataclass(frozen=True, kw_only=True)
class TextRequests:
    """stage: what `scorer` scores. add_bos: begin every context with the tokenizer's bos. Raises ConfigError where it has none."""

    stage: GPTStage
    tokenizer: Tokenizer
    scorer: Scorer
    add_bos: bool = False

    def __post_init__(self) -> None:
        if self.add_bos and self.tokenizer.bos_id is None:
            raise ConfigError(f"tokenizer {self.tokenizer.name} has no bos token to begin prompts with: leave out add_bos")

    @property
    def longest(self) -> int:
        """Tokens of a window."""
        return self.scorer.longest or _DEFAULT_LENGTH

    @property
    def first_token(self) -> int:
        """What stands before everything. Raises ConfigError for a tokenizer without such a token."""
        token = self.tokenizer.eod_id if self.tokenizer.bos_id is None else self.tokenizer.bos_id
        if token is None:
            raise ConfigError(f"tokenizer {self.tokenizer.name} has neither a bos nor an eod token to predict a first token from")
        return token

    def likelihoods(self, pairs: Sequence[tuple[str, str]]) -> list[Likelihood]:
        """Of each (context, continuation). Errors are those of `Scorer.likelihoods`."""
        return self.scorer.likelihoods([self.encode_pair(*pair) for pair in pairs])

    def encode_pair(self, context: str, continuation: str) -> tuple[list[int], list[int]]:
        """The ids of both."""
        num_spaces = len(context) - len(context.rstrip())
        if num_spaces:
            context, continuation = context[:-num_spaces], context[-num_spaces:] + continuation
        if not context:
            return [self.first_token], self.tokenizer.encode(continuation)
        before, whole = self.tokenizer.encode(context), self.tokenizer.encode(context + continuation)
        begin = [self.first_token] if self.add_bos else []
        return [*begin, *whole[: len(before)]], whole[len(before) :]

    def text_log_probabilities(self, texts: Sequence[str]) -> list[float]:
        """The natural logarithm of each text's probability, all its tokens predicted once."""
        found = []
        for text in texts:
            stream = TokenStream([np.array(self.tokenizer.encode(text), dtype=np.int64)], self.first_token)
            cut = list(windows(len(stream), self.longest, self.longest))
            rows = [stream.row(Window(max(0, window.stop - self.longest), window.counted, window.stop)) for window in cut]
            found.append(-self.scorer.total_loss(rows))
        return found

    def generate(self, prompts: Sequence[str], settings: Mapping[str, Any]) -> list[str]:
        """What the model writes after each prompt, up to a stop text. Of a prompt too long for the model the newest tokens are kept.

        settings: until (a text or several), max_gen_toks, do_sample, and those of `Sampling`. Raises ConfigError for unknown ones.
        """
        stops, sampling = _read_settings(settings)
        room = self.longest - sampling.max_new_tokens
        if room < 1:
            raise ConfigError(f"max_gen_toks is {sampling.max_new_tokens}, the model reads {self.longest} tokens in all: use fewer")
        texts: list[str] = []
        for first in range(0, len(prompts), self.scorer.batch_size):
            rows = [self._prompt_ids(prompt)[-room:] for prompt in prompts[first : first + self.scorer.batch_size]]
            texts += self._generate(rows, stops, sampling)
        return texts

    def _prompt_ids(self, prompt: str) -> list[int]:
        ids = self.tokenizer.encode(prompt) if prompt else []
        return [self.first_token, *ids] if self.add_bos or not ids else ids

    def _generate(self, rows: list[list[int]], stops: list[str], sampling: Sampling) -> list[str]:
        streams, texts = [TextStream(self.tokenizer.decode, stops) for _ in rows], [""] * len(rows)

        def on_token(row: int, token: int) -> bool:
            texts[row] += streams[row].add(token)
            return streams[row].is_stopped

        generate_batch(
            self.stage,
            rows,
            sampling,
            stop_id=self.tokenizer.eod_id,
            vocab_size=self.tokenizer.vocab_size,
            on_token=on_token,
            pp=self.scorer.pp,
        )
        return [text + stream.finish() for text, stream in zip(texts, streams, strict=True)]


def _read_settings(settings: Mapping[str, Any]) -> tuple[list[str], Sampling]:
    rest = dict(settings)
    until = rest.pop("until", None) or []
    stops = [until] if isinstance(until, str) else list(until)
    new_tokens = rest.pop("max_gen_toks", _DEFAULT_NEW_TOKENS)
    is_sampled = rest.pop("do_sample", rest.get("temperature", 0) > 0)
    unknown = sorted(rest.keys() - set(_SAMPLING))
    if unknown:
        raise ConfigError(
            f"generation settings {', '.join(unknown)} are not known: there are until, max_gen_toks, do_sample, {', '.join(_SAMPLING)}"
        )
    if not is_sampled:
        rest["temperature"] = 0.0
    return stops, Sampling(max_new_tokens=new_tokens, **rest)
