"""megalite's models in EleutherAI's lm-evaluation-harness (pip install 'megalite[lm-eval]').

    from megalite.evaluation.lm_eval import MegaliteLM, run_tasks
    run_tasks(MegaliteLM(stage, tokenizer, Scorer(stage)), ["lambada_openai"])

The harness asks in texts and groups of requests; what it gets is computed in `requests`. Under tp and pp every rank runs the harness with
the same requests in the same order, and all get the same answers; to the harness there is one process.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from lm_eval.api.instance import Instance  # pyright: ignore[reportMissingImports]
from lm_eval.api.model import LM  # pyright: ignore[reportMissingImports]
from lm_eval.evaluator import simple_evaluate  # pyright: ignore[reportMissingImports]

from megalite.data.tokenizer import Tokenizer
from megalite.errors import ConfigError, MegaliteError
from megalite.evaluation.requests import TextRequests
from megalite.evaluation.scoring import Scorer
from megalite.model import GPTStage

__all__ = ["MegaliteLM", "run_tasks"]


class MegaliteLM(LM):
    """stage: in evaluation mode, the model that `scorer` scores; add_bos: see `TextRequests`."""

    def __init__(self, stage: GPTStage, tokenizer: Tokenizer, scorer: Scorer, *, add_bos: bool = False) -> None:
        super().__init__()
        self.texts = TextRequests(stage=stage, tokenizer=tokenizer, scorer=scorer, add_bos=add_bos)

    @property
    def tokenizer_name(self) -> str:
        """For the harness's cache of requests."""
        return self.texts.tokenizer.name.replace("/", "_")

    def loglikelihood(self, requests: list[Instance]) -> list[tuple[float, bool]]:
        found = [(one.log_probability, one.is_greedy) for one in self.texts.likelihoods([request.args for request in requests])]
        for request, answer in zip(requests, found, strict=True):
            self.cache_hook.add_partial("loglikelihood", request.args, answer)
        return found

    def loglikelihood_rolling(self, requests: list[Instance]) -> list[float]:
        found = self.texts.text_log_probabilities([request.args[0] for request in requests])
        for request, answer in zip(requests, found, strict=True):
            self.cache_hook.add_partial("loglikelihood_rolling", request.args, answer)
        return found

    def generate_until(self, requests: list[Instance]) -> list[str]:
        groups: dict[str, list[int]] = {}
        for number, request in enumerate(requests):  # requests of equal settings are computed together
            groups.setdefault(repr(sorted(request.args[1].items())), []).append(number)
        found = [""] * len(requests)
        for numbers in groups.values():
            texts = self.texts.generate([requests[number].args[0] for number in numbers], requests[numbers[0]].args[1])
            for number, text in zip(numbers, texts, strict=True):
                found[number] = text
                self.cache_hook.add_partial("generate_until", requests[number].args, text)
        return found


def run_tasks(
    model: MegaliteLM, tasks: Sequence[Any], *, limit: int | None = None, num_fewshot: int | None = None
) -> dict[str, dict[str, Any]]:
    """The harness's figures by task. tasks: names, or what else its `simple_evaluate` takes. Raises ConfigError for unknown tasks."""
    try:
        found = simple_evaluate(model=model, tasks=list(tasks), limit=limit, num_fewshot=num_fewshot, bootstrap_iters=0)
    except (KeyError, ValueError) as error:
        raise ConfigError(f"lm-evaluation-harness cannot run {', '.join(map(str, tasks))}: {error}") from error
    if found is None or not found["results"]:
        raise MegaliteError("lm-evaluation-harness gave no results")
    return {task: {key: _plain(value) for key, value in figures.items() if value != "N/A"} for task, figures in found["results"].items()}


def _plain(value: Any) -> Any:
    """A number of NumPy as one that JSON knows."""
    return value.item() if hasattr(value, "item") else value
