"""The cache gives what the plain definition gives: token by token, in pieces, and in batches of prompts of different lengths.

Requirements 85 (cached and uncached decoding are identical, chunked prefill included) and 86 (a batch equals its single rows).
"""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from megalite.generation import Sampling, generate_batch
from megalite.generation.cache import Cache
from megalite.generation.decoder import Decoder
from megalite.generation.native import is_built
from tests.generation.helpers import plain_greedy, plain_logits, tiny_run, tiny_stage

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
    "ring": dict(sliding_window=5, num_query_groups=1),
    "dynamic": dict(rope_scaling="dynamic", rope_scaling_factor=3.0, rope_scaling_original_length=8),
    "yarn": dict(rope_scaling="yarn", rope_scaling_factor=4.0, rope_scaling_original_length=8, rotary_percent=1.0),
    "half rotary": dict(rotary_percent=0.5, kv_channels=8),
    "no positions": dict(position_embedding_type="none", activation="relu_squared"),
}
LONGEST = 24
PROMPTS = [[3], [5, 250, 7, 7, 1, 9, 30], [11, 12, 13], [100] * 13]


def stage_of(name: str) -> Any:
    return tiny_stage(tiny_run(max_position_embeddings=LONGEST, **MODELS[name])).eval()


WAYS = ["C++", "torch"] if is_built() else ["torch"]


def decoder_of(name: str, way: str = "torch") -> Decoder:
    decoder = Decoder(stage_of(name), native=way == "C++")
    assert (decoder.native is not None) == (way == "C++")
    return decoder


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("name", MODELS)
def test_requirement_85_logits_of_every_step_are_the_plain_ones(name: str, way: str) -> None:
    decoder, stage = decoder_of(name, way), stage_of(name)
    num = min(LONGEST, decoder.longest or LONGEST) - len(PROMPTS[1])
    for chunk in (1, 3, 512):
        cache = decoder.new_cache(1, LONGEST)
        ids = list(PROMPTS[1])
        logits = decoder.prefill(cache, 0, ids, chunk)
        for token in (8, 200, 0, 41, 17, 90, 3)[:num]:
            torch.testing.assert_close(logits, plain_logits(stage, ids), rtol=0, atol=6e-5)
            ids.append(token)
            logits = logits_after(decoder, cache, [token])[0]
        torch.testing.assert_close(logits, plain_logits(stage, ids), rtol=0, atol=6e-5)


def logits_after(decoder: Decoder, cache: Cache, tokens: list[int]) -> Tensor:
    logits = decoder.step(cache, tokens)
    assert logits is not None
    return logits.clone()


@pytest.mark.skipif(not is_built(), reason="the C++ extension is not built")
@pytest.mark.parametrize("name", ["llama", "gpt2", "ring"])
def test_requirement_86_in_cpp_a_row_does_not_depend_on_the_others_in_any_bit(name: str) -> None:
    """With one thread and with three."""
    before, logits = torch.get_num_threads(), []
    try:
        for threads in (1, 3):
            torch.set_num_threads(threads)
            decoder = decoder_of(name, "C++")
            together = decoder.new_cache(len(PROMPTS), LONGEST)
            alone = [decoder.new_cache(1, LONGEST) for _ in PROMPTS]
            for row, ids in enumerate(PROMPTS):
                decoder.prefill(together, row, ids)
                decoder.prefill(alone[row], 0, ids)
            for token in range(9):
                found = logits_after(decoder, together, [token + row for row in range(len(PROMPTS))])
                single = [logits_after(decoder, cache, [token + row]) for row, cache in enumerate(alone)]
                assert torch.equal(found, torch.cat(single))
            logits.append(found)
    finally:
        torch.set_num_threads(before)
    torch.testing.assert_close(*logits, rtol=0, atol=1e-5)  # torch read the prompts, and its sums know the number of threads


@pytest.mark.parametrize("way", WAYS)
def test_a_ring_holds_the_window_only(way: str) -> None:
    decoder = decoder_of("ring", way)
    cache, whole = decoder.new_cache(2, LONGEST), decoder_of("llama").new_cache(2, LONGEST)
    assert cache.shape.slots == 5
    assert cache.num_bytes * 2 * LONGEST == whole.num_bytes * 5  # half as many key/value heads
    for row in range(2):
        decoder.prefill(cache, row, list(range(9 + row)), chunk=7)
    ids = [list(range(9)), list(range(10))]
    for token in range(8):
        logits = logits_after(decoder, cache, [token, token + 50])
        for row in range(2):
            ids[row].append(token + 50 * row)
            torch.testing.assert_close(logits[row], plain_logits(stage_of("ring"), ids[row]), rtol=0, atol=6e-5)


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("name", ["llama", "qwen3", "mistral"])
def test_an_int8_cache_is_near_the_plain_one_and_the_same_in_chunks(name: str, way: str) -> None:
    decoder, logits = decoder_of(name, way), {}
    for chunk in (1, 4, 512):
        for int8 in (False, True):
            cache = decoder.new_cache(1, LONGEST, int8=int8)
            decoder.prefill(cache, 0, PROMPTS[1], chunk)
            for token in (8, 200, 0):
                logits[chunk, int8] = logits_after(decoder, cache, [token])[0]
    plain = logits[1, False]
    assert 0 < float((logits[1, True] - plain).abs().max()) < 0.1 * float(plain.std())
    for chunk in (4, 512):  # a number on the border between two integers may fall on either side
        torch.testing.assert_close(logits[chunk, True], logits[1, True], rtol=0, atol=0.03)
    sizes = {int8: decoder.new_cache(1, LONGEST, int8=int8).num_bytes for int8 in (False, True)}
    head_dim = decoder.config.head_dim
    assert sizes[True] * 4 * head_dim == sizes[False] * (head_dim + 4)


@pytest.mark.parametrize("way", WAYS)
def test_bf16_weights_are_near_fp32(way: str) -> None:
    stage = stage_of("llama")
    plain = plain_logits(stage, [*PROMPTS[1], 8])
    decoder = Decoder(stage.to(torch.bfloat16), native=way == "C++")
    assert (decoder.native is not None) == (way == "C++")
    for int8 in (False, True):
        cache = decoder.new_cache(1, LONGEST, int8=int8)
        decoder.prefill(cache, 0, PROMPTS[1])
        difference = (logits_after(decoder, cache, [8])[0] - plain).abs().max()
        assert 0 < float(difference) < 0.2 * float(plain.std())


@pytest.mark.parametrize("name", MODELS)
def test_requirement_86_a_batch_is_its_rows_and_goes_beyond_the_longest_sequence(name: str) -> None:
    stage = stage_of(name)
    num = LONGEST - 8
    found = generate_batch(stage, PROMPTS, Sampling(max_new_tokens=num, temperature=0))
    assert found == [plain_greedy(stage, ids, num) for ids in PROMPTS]


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
    before = plain_greedy(stage, PROMPTS[1], 5)
    assert generate_batch(stage, PROMPTS[1:2], Sampling(max_new_tokens=5, temperature=0))[0] == before
    with torch.no_grad():
        for parameter in stage.parameters():
            parameter.mul_(-0.7)
    assert generate_batch(stage, PROMPTS[1:2], Sampling(max_new_tokens=5, temperature=0))[0] == plain_greedy(stage, PROMPTS[1], 5)
