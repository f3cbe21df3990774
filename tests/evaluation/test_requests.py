"""Likelihoods of continuations and texts, generated answers, and the harness's adapter where the harness is installed."""

from __future__ import annotations

import pytest
import torch

from megalite.data.tokenizer import BytesTokenizer
from megalite.errors import ConfigError
from megalite.evaluation import Scorer
from megalite.evaluation.requests import TextRequests
from tests.generation.helpers import plain_greedy, plain_logits, tiny_run, tiny_stage

C = 11
STAGE = tiny_stage(tiny_run()).eval()


def requests(batch_size: int = 2) -> TextRequests:
    return TextRequests(stage=STAGE, tokenizer=BytesTokenizer(), scorer=Scorer(STAGE, batch_size=batch_size))


def brute_force(context: list[int], continuation: list[int]) -> tuple[float, bool]:
    """By one forward pass for each token, with the newest tokens that the model reads for the last of them."""
    total, is_greedy = 0.0, True
    start = max(0, len(context) + len(continuation) - 1 - C)
    for place, token in enumerate(continuation):
        logits = plain_logits(STAGE, [*context, *continuation[:place]][start:])
        total += float(torch.log_softmax(logits.double(), dim=-1)[token])
        is_greedy &= int(logits.argmax()) == token
    return total, is_greedy


def test_likelihoods() -> None:
    greedy = plain_greedy(STAGE, [5, 6, 7], 3)
    pairs = [
        ([1, 2, 3], [4, 5]),
        ([5, 6, 7], greedy),
        ([5, 6, 7], [*greedy[:2], (greedy[2] + 1) % 257]),
        ([9] * 30, [1, 2, 3]),
        ([8], [9] * C),
    ]
    found = Scorer(STAGE, batch_size=2).likelihoods(pairs)
    for (context, continuation), one in zip(pairs, found, strict=True):
        expected, is_greedy = brute_force(context, continuation)
        assert one.log_probability == pytest.approx(expected, rel=1e-4)
        assert one.is_greedy == is_greedy
    assert [one.is_greedy for one in found[:3]] == [False, True, False]


def test_likelihoods_that_cannot_be() -> None:
    scorer = Scorer(STAGE)
    with pytest.raises(ConfigError, match="at least one token each"):
        scorer.likelihoods([([], [1])])
    with pytest.raises(ConfigError, match="has 12 tokens, the model reads 11"):
        scorer.likelihoods([([1], [2] * 12)])
    assert scorer.likelihoods([]) == []


def test_texts_and_their_borders() -> None:
    """Spaces at the context's end go to the continuation; an empty context is the token that begins documents."""
    texts = requests()
    assert texts.encode_pair("ab  ", "c") == (list(b"ab"), list(b"  c"))
    assert texts.encode_pair("", "c") == ([256], [99])
    assert texts.encode_pair(" ", "c") == ([256], [32, 99])
    (found,) = texts.likelihoods([("ab", " c")])
    assert found.log_probability == pytest.approx(brute_force(list(b"ab"), list(b" c"))[0], rel=1e-4)
    with pytest.raises(ConfigError, match="has no bos token"):
        TextRequests(stage=STAGE, tokenizer=BytesTokenizer(), scorer=Scorer(STAGE), add_bos=True)


def test_whole_texts() -> None:
    """Windows of 11 tokens, the last of which reaches back."""
    text = b"nineteen characters"
    ids = [256, *text]
    expected = sum(brute_force([ids[0]], [ids[1]])[0] for _ in range(1)) + brute_force(ids[:2], ids[2:12])[0]
    for place in range(12, len(ids)):
        expected += brute_force(ids[len(ids) - 1 - C : place], [ids[place]])[0]
    (found, short) = requests().text_log_probabilities([text.decode(), "a"])
    assert found == pytest.approx(expected, rel=1e-5)
    assert short == pytest.approx(brute_force([256], [97])[0], rel=1e-5)


def test_generated_answers() -> None:
    texts = requests(batch_size=2)
    settings = {"max_gen_toks": 4, "until": ["\n\n"], "do_sample": False, "temperature": 0.7}
    prompts = ["ab", "a much longer prompt than the model reads", "z"]
    decode = texts.tokenizer.decode
    expected = [decode(plain_greedy(STAGE, list(prompt.encode())[-(C - 4) :], 4)) for prompt in prompts]
    found = texts.generate(prompts, settings)
    assert found == expected
    stop = next(letter for letter in found[1] if letter != "\ufffd")
    assert texts.generate(prompts[1:2], {"max_gen_toks": 4, "until": stop}) == [found[1][: found[1].index(stop)]]
    with pytest.raises(ConfigError, match="generation settings beams are not known"):
        texts.generate(["a"], {"beams": 3})
    with pytest.raises(ConfigError, match="max_gen_toks is 11, the model reads 11"):
        texts.generate(["a"], {"max_gen_toks": 11})


def test_the_harness_gets_what_it_asks_for() -> None:
    pytest.importorskip("lm_eval")
    from lm_eval.api.instance import Instance

    from megalite.evaluation.lm_eval import MegaliteLM

    texts = requests()
    model = MegaliteLM(STAGE, texts.tokenizer, texts.scorer)

    def ask(kind: str, *arguments: tuple) -> list[Instance]:
        return [Instance(request_type=kind, doc={}, arguments=one, idx=number) for number, one in enumerate(arguments)]  # type: ignore[arg-type]

    pairs = [("ab", " c"), ("", "x")]
    assert model.loglikelihood(ask("loglikelihood", *pairs)) == [tuple(one) for one in texts.likelihoods(pairs)]
    assert model.loglikelihood_rolling(ask("loglikelihood_rolling", ("abc",))) == texts.text_log_probabilities(["abc"])
    few, many = {"max_gen_toks": 2, "until": []}, {"max_gen_toks": 4, "until": []}
    answers = model.generate_until(ask("generate_until", ("ab", many), ("c", few), ("z", many)))
    assert answers == [texts.generate(["ab"], many)[0], texts.generate(["c"], few)[0], texts.generate(["z"], many)[0]]
