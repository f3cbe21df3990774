"""The cache gives what the plain definition gives: token by token, in pieces, and in batches of prompts of different lengths.

Requirements 85 (cached and uncached decoding are identical, chunked prefill included) and 86 (a batch equals its single rows).
"""

from __future__ import annotations

from typing import Any

import pytest
import torch

from megalite.generation import Sampling, generate_batch
from megalite.generation.decoder import Decoder
from megalite.generation.sample import next_logits
from tests.generation.helpers import tiny_run, tiny_stage

GPT2: dict[str, Any] = dict(
    normalization="LayerNorm",
    activation="gelu_tanh",
    add_bias_linear=True,
    position_embedding_type="learned_absolute",
    num_query_groups=None,
    untie_embeddings_and_output_weights=False,
)
MODELS: dict[str, dict[str, Any]] = {
    "llama": {},
    "gpt2": GPT2,
    "qwen2": dict(add_qkv_bias=True, untie_embeddings_and_output_weights=False, num_query_groups=1),
    "qwen3": dict(qk_layernorm=True, kv_channels=10),
    "mistral": dict(sliding_window=4, kv_channels=8),
    "yarn": dict(rope_scaling="yarn", rope_scaling_factor=4.0, rope_scaling_original_length=8, rotary_percent=1.0),
    "half rotary": dict(rotary_percent=0.5, kv_channels=8),
    "no positions": dict(position_embedding_type="none", activation="relu_squared"),
}
LONGEST = 24
PROMPTS = [[3], [5, 250, 7, 7, 1, 9, 30], [11, 12, 13], [100] * 13]


def stage_of(name: str) -> Any:
    return tiny_stage(tiny_run(max_position_embeddings=LONGEST, **MODELS[name])).eval()


@pytest.mark.parametrize("name", MODELS)
def test_requirement_85_logits_of_every_step_are_the_plain_ones(name: str) -> None:
    stage = stage_of(name)
    decoder = Decoder(stage)
    for chunk in (1, 3, 512):
        cache = decoder.new_cache(1, LONGEST)
        ids = list(PROMPTS[1])
        logits = decoder.prefill(cache, 0, ids, chunk)
        for token in (8, 200, 0, 41, 17):
            torch.testing.assert_close(logits, next_logits(stage, ids), rtol=0, atol=2e-5)
            ids.append(token)
            logits = decoder.step(cache, [token])[0]
        torch.testing.assert_close(logits, next_logits(stage, ids), rtol=0, atol=2e-5)


def greedy(stage: Any, ids: list[int], num: int) -> list[int]:
    sequence = list(ids)
    for _ in range(num):
        sequence.append(int(next_logits(stage, sequence).argmax()))
    return sequence[len(ids) :]


@pytest.mark.parametrize("name", MODELS)
def test_requirement_86_a_batch_is_its_rows_and_goes_beyond_the_longest_sequence(name: str) -> None:
    stage = stage_of(name)
    num = LONGEST - 8
    found = generate_batch(stage, PROMPTS, Sampling(max_new_tokens=num, temperature=0))
    assert found == [greedy(stage, ids, num) for ids in PROMPTS]


def test_rows_draw_by_themselves() -> None:
    stage = stage_of("llama")
    sampling = Sampling(max_new_tokens=9, temperature=1.5, seed=4)
    together = generate_batch(stage, PROMPTS, sampling, seeds=[4, 5, 6, 7])
    alone = [generate_batch(stage, [ids], sampling, seeds=[seed])[0] for ids, seed in zip(PROMPTS, (4, 5, 6, 7), strict=True)]
    assert together == alone
    same = generate_batch(stage, [PROMPTS[0]] * 2, sampling, seeds=[1, 2])
    assert same[0] != same[1]


def test_a_row_can_be_ended_from_outside_and_stop_ids_end_it() -> None:
    stage = stage_of("llama")
    plain = generate_batch(stage, PROMPTS, Sampling(max_new_tokens=6, temperature=0))
    seen: list[tuple[int, int]] = []

    def on_token(row: int, token: int) -> bool:
        seen.append((row, token))
        return row == 2 and len([1 for r, _ in seen if r == 2]) == 3

    found = generate_batch(stage, PROMPTS, Sampling(max_new_tokens=6, temperature=0), on_token=on_token)
    assert found == [plain[0], plain[1], plain[2][:3], plain[3]]
    assert [token for row, token in seen if row == 1] == plain[1]
    stop = plain[1][2]
    assert (
        generate_batch(stage, PROMPTS[1:2], Sampling(max_new_tokens=6, temperature=0), stop_id=stop)[0] == plain[1][: plain[1].index(stop)]
    )


def test_training_goes_on_after_a_generation() -> None:
    """Joined weights are views of the parameters: what is trained afterwards is generated from."""
    stage = stage_of("yarn")
    before = greedy(stage, PROMPTS[1], 5)
    assert generate_batch(stage, PROMPTS[1:2], Sampling(max_new_tokens=5, temperature=0))[0] == before
    with torch.no_grad():
        for parameter in stage.parameters():
            parameter.mul_(-0.7)
    assert generate_batch(stage, PROMPTS[1:2], Sampling(max_new_tokens=5, temperature=0))[0] == greedy(stage, PROMPTS[1], 5)
