"""What a client of the completion server asks for, checked field by field (the shape of OpenAI's `POST /v1/completions`).

Decisions
- Every field is known or refused: a setting that is silently ignored gives other text than what was asked for. What is wrong is said in
  one message, all of it.
- Fields of the original that are not built are accepted only with the value that changes nothing.
- Beyond the original: top_k, min_p and repetition_penalty, as in `choice.Sampling`.
"""

from __future__ import annotations

import secrets
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from megalite.errors import ConfigError
from megalite.generation.choice import Sampling

__all__ = ["CompletionRequest", "parse_request"]

_MOST_STOPS = 16
# what each field may be, and its value when it is not given
_FIELDS: dict[str, tuple[tuple[type, ...], Any]] = {
    "max_tokens": ((int,), 16),
    "temperature": ((int, float), 1.0),
    "top_p": ((int, float), None),
    "top_k": ((int,), None),
    "min_p": ((int, float), None),
    "repetition_penalty": ((int, float), 1.0),
    "n": ((int,), 1),
    "stream": ((bool,), False),
    "echo": ((bool,), False),
    "seed": ((int,), None),
}
_UNCHANGING: dict[str, tuple[Any, ...]] = {
    "logprobs": (None,),
    "suffix": (None, ""),
    "best_of": (None, 1),
    "presence_penalty": (None, 0),
    "frequency_penalty": (None, 0),
    "logit_bias": (None, {}),
    "stream_options": (None,),
}
_IGNORED = ("model", "user", "prompt", "stop")


@dataclass(frozen=True, kw_only=True)
class CompletionRequest:
    """prompts: texts, or token ids. num_samples: of each; the row of sample s of prompt p is p * num_samples + s. seed: of the first row
    of a prompt, the others count on."""

    prompts: list[str] | list[list[int]]
    sampling: Sampling
    num_samples: int
    stops: list[str]
    stream: bool
    echo: bool

    @property
    def num_rows(self) -> int:
        return len(self.prompts) * self.num_samples

    @property
    def seeds(self) -> list[int]:
        """Of every row."""
        return [(self.sampling.seed + sample) % 2**64 for _ in self.prompts for sample in range(self.num_samples)]


def parse_request(body: Any, *, most_tokens: int, most_rows: int) -> CompletionRequest:
    """body: the decoded JSON. most_tokens: new ones per row; most_rows: prompts times samples. Raises ConfigError with all reasons."""
    if not isinstance(body, Mapping):
        raise ConfigError("the body must be a JSON object with a prompt")
    problems = [f"{name} is not a field of this server" for name in sorted(body.keys() - _FIELDS.keys() - _UNCHANGING.keys() - {*_IGNORED})]
    problems += [f"{name} is not supported here" for name, values in _UNCHANGING.items() if body.get(name) not in values]
    values = {name: _value(body, name, problems) for name in _FIELDS}
    prompts, stops = _prompts(body.get("prompt"), problems), _stops(body.get("stop"), problems)
    if values["n"] < 1 or values["n"] * max(len(prompts), 1) > most_rows:
        problems.append(f"n is {values['n']} for {len(prompts)} prompts: at least 1, and at most {most_rows} texts in all")
    if values["max_tokens"] > most_tokens:
        problems.append(f"max_tokens is {values['max_tokens']}, this server gives at most {most_tokens}")
    sampling = None
    try:
        sampling = Sampling(
            max_new_tokens=values["max_tokens"],
            temperature=values["temperature"],
            top_k=values["top_k"] or None,
            top_p=values["top_p"],
            min_p=values["min_p"],
            repetition_penalty=values["repetition_penalty"],
            seed=secrets.randbits(32) if values["seed"] is None else values["seed"],
        )
    except ConfigError as error:
        problems += [problem.replace("max_new_tokens", "max_tokens") for problem in error.violations]
    if problems or sampling is None:
        raise ConfigError(problems)
    return CompletionRequest(
        prompts=prompts, sampling=sampling, num_samples=values["n"], stops=stops, stream=values["stream"], echo=values["echo"]
    )


def _value(body: Mapping[str, Any], name: str, problems: list[str]) -> Any:
    kinds, default = _FIELDS[name]
    value = body.get(name)
    if value is None:
        return default
    if not isinstance(value, kinds) or (isinstance(value, bool) and bool not in kinds):
        problems.append(f"{name} is {value!r}, it must be {' or '.join(kind.__name__ for kind in kinds)}")
        return default
    return value


def _prompts(prompt: Any, problems: list[str]) -> Any:
    """The four forms of the original: a text, texts, ids, several lists of ids."""
    if isinstance(prompt, str):
        return [prompt]
    if isinstance(prompt, list) and prompt:
        if all(isinstance(item, str) for item in prompt):
            return prompt
        if _are_ids(prompt):
            return [prompt]
        if all(isinstance(item, list) and item and _are_ids(item) for item in prompt):
            return prompt
    problems.append("prompt must be a text, a list of texts, a list of token ids, or a list of such lists, and not empty")
    return []


def _are_ids(items: list[Any]) -> bool:
    return all(isinstance(item, int) and not isinstance(item, bool) for item in items)


def _stops(stop: Any, problems: list[str]) -> list[str]:
    stops = [] if stop is None else [stop] if isinstance(stop, str) else stop
    if not isinstance(stops, list) or len(stops) > _MOST_STOPS or not all(isinstance(item, str) and item for item in stops):
        problems.append(f"stop must be a text or a list of at most {_MOST_STOPS} texts, none of them empty")
        return []
    return stops
