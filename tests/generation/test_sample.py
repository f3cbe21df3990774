"""Sampling: what is drawn, from what, and that padding never is."""

from __future__ import annotations

from collections import Counter

import pytest
import torch

from megalite.errors import ConfigError, DataError, MegaliteError
from megalite.generation import generate
from megalite.generation.choice import Sampling, choose
from tests.generation.helpers import SEQ_LENGTH, tiny_run, tiny_stage

PROMPT = [72, 5, 256]


def reference_greedy(stage, ids: list[int], num: int) -> list[int]:
    """The likeliest continuation, straight from the embedding, blocks and head."""
    from megalite.data.batch import MicroBatch

    ids = list(ids)
    for _ in range(num):
        tokens = torch.tensor([ids[-SEQ_LENGTH:]])
        ones = torch.ones_like(tokens)
        positions = torch.arange(tokens.shape[1])[None]
        batch = MicroBatch(tokens=tokens, labels=ones, loss_mask=ones.float(), position_ids=positions, first_sample=0)
        with torch.no_grad():
            ids.append(int(stage.logits(None, batch)[-1, 0, :257].argmax()))
    return ids


@pytest.mark.parametrize("positions", ["rope", "learned_absolute", "none"])
@pytest.mark.parametrize("tied", [False, True])
def test_greedy_takes_the_likeliest_token_beyond_the_window_too(positions: str, tied: bool) -> None:
    stage = tiny_stage(tiny_run(position_embedding_type=positions, untie_embeddings_and_output_weights=not tied)).eval()
    num = SEQ_LENGTH + 4  # learned positions end at SEQ_LENGTH
    expected = reference_greedy(stage, PROMPT, num)[len(PROMPT) :]
    for seed in (1, 2):
        assert generate(stage, PROMPT, max_new_tokens=num, temperature=0, seed=seed) == expected


def test_beyond_the_window_only_the_newest_tokens_count() -> None:
    stage = tiny_stage(tiny_run())
    recent = list(range(40, 40 + SEQ_LENGTH))
    short = generate(stage, recent, max_new_tokens=6, temperature=0)
    assert generate(stage, [7, 8, 9, *recent], max_new_tokens=6, temperature=0) == short
    assert generate(stage, [*recent[1:], 99], max_new_tokens=6, temperature=0) != short


def test_the_seed_decides() -> None:
    stage = tiny_stage(tiny_run())
    state = torch.get_rng_state()
    texts = [generate(stage, PROMPT, max_new_tokens=9, temperature=2.0, seed=seed) for seed in (3, 3, 4)]
    assert texts[0] == texts[1] != texts[2]
    assert torch.equal(torch.get_rng_state(), state), "the generator is its own"


def test_dropout_is_off_and_the_mode_is_kept() -> None:
    stage = tiny_stage(tiny_run(hidden_dropout=0.5, attention_dropout=0.5))
    for training in (True, False):
        stage.train(training)
        ids = generate(stage, PROMPT, max_new_tokens=5, temperature=0)
        assert stage.training is training
        assert ids == reference_greedy(stage.eval(), PROMPT, 5)[len(PROMPT) :]


def test_padded_rows_are_never_drawn() -> None:
    stage = tiny_stage(tiny_run())
    assert stage.head is not None
    assert stage.head.output is not None
    with torch.no_grad():
        stage.head.output.weight.zero_()  # all rows are equally likely: of 275 rows 18 pad the vocabulary
        stage.head.output.weight[257:] = 0.0
    ids = generate(stage, PROMPT, max_new_tokens=400, temperature=1.0)
    assert len(ids) == 400
    assert max(ids) <= 256
    assert max(generate(stage, PROMPT, max_new_tokens=100, temperature=1.0, top_k=1000)) <= 256
    assert max(generate(stage, PROMPT, max_new_tokens=100, temperature=1.0, vocab_size=90)) <= 89


def test_padded_rows_do_not_win_either() -> None:
    stage = tiny_stage(tiny_run())
    before = generate(stage, PROMPT, max_new_tokens=6, temperature=0)
    assert stage.head is not None
    assert stage.head.output is not None
    with torch.no_grad():
        stage.head.output.weight[257:] = 100 * stage.head.output.weight[:18]
    assert generate(stage, PROMPT, max_new_tokens=6, temperature=0) == before
    assert max(generate(stage, PROMPT, max_new_tokens=60, temperature=1.0, top_k=2)) <= 256


def test_stops_before_the_stop_id() -> None:
    stage = tiny_stage(tiny_run())
    free = generate(stage, PROMPT, max_new_tokens=12, temperature=0)
    stop = free[4]
    assert generate(stage, PROMPT, max_new_tokens=12, temperature=0, stop_id=stop) == free[: free.index(stop)]


def test_choose_follows_the_probabilities() -> None:
    """20,000 draws of 3 of 4 ids at temperature 2: each share is within 5 standard deviations."""
    logits, generator, num = torch.tensor([0.0, 3.0, 1.0, 2.0]), torch.Generator().manual_seed(1), 20_000
    counts = Counter(choose(logits, Sampling(max_new_tokens=1, temperature=2.0, top_k=3), generator) for _ in range(num))
    shares = torch.softmax(torch.tensor([3.0, 1.0, 2.0]).double() / 2, dim=-1).tolist()
    assert counts[0] == 0
    for token, share in zip((1, 2, 3), shares, strict=True):
        assert abs(counts[token] / num - share) < 5 * (share * (1 - share) / num) ** 0.5


@pytest.mark.parametrize("temperature", [1e-3, 1e-30, 5e-324])
def test_a_tiny_temperature_is_greedy(temperature: float) -> None:
    logits = torch.tensor([-4.0, 300.0, 299.0, 1.0])
    assert choose(logits, Sampling(max_new_tokens=1, temperature=temperature), torch.Generator().manual_seed(1)) == 1


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"max_new_tokens": 0}, "max_new_tokens is 0"),
        ({"temperature": -0.5}, "temperature is -0.5"),
        ({"temperature": float("nan")}, "temperature is nan"),
        ({"top_k": 0}, "top_k is 0"),
        ({"seed": -1}, "seed is -1"),
    ],
)
def test_settings_without_a_meaning_are_refused(changes: dict, words: str) -> None:
    settings = {"max_new_tokens": 3, **changes}
    with pytest.raises(ConfigError, match=words):
        generate(tiny_stage(tiny_run()), PROMPT, **settings)


def test_wrong_prompts_are_refused() -> None:
    stage = tiny_stage(tiny_run())
    with pytest.raises(ConfigError, match="the prompt has no tokens"):
        generate(stage, [], max_new_tokens=3)
    with pytest.raises(ConfigError, match=r"2 settings are wrong.*\n.*top_k is -3.*\n.*top_p is 1.5"):
        Sampling(max_new_tokens=3, top_k=-3, top_p=1.5)
    with pytest.raises(DataError, match="holds token 257, but the model's vocabulary ends at 256"):
        generate(stage, [1, 257], max_new_tokens=3)


def test_damaged_weights_are_reported() -> None:
    stage = tiny_stage(tiny_run())
    with torch.no_grad():
        stage.layers["1"].attention_norm.weight.fill_(float("nan"))
    with pytest.raises(MegaliteError, match="after 3 tokens are not finite"):
        generate(stage, PROMPT, max_new_tokens=3)
