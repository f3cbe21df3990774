"""Presets are the models that they are named after."""

from __future__ import annotations

from dataclasses import replace

import pytest

from megalite.config import DataConfig, RunConfig
from megalite.errors import ConfigError
from megalite.presets import PRESETS, apply_preset
from megalite.validate import violations

# published numbers of parameters (of the weights, each tied head once)
PARAMETERS = {
    "gpt2-124m": 124_439_808,
    "gpt2-medium": 354_823_168,
    "gpt2-large": 774_030_080,
    "gpt2-xl": 1_557_611_200,
    "llama3.2-1b": 1_235_814_400,
    "llama3-8b": 8_030_261_248,
    "llama3-70b": 70_553_706_496,
    "llama2-7b": 6_738_415_616,
    "llama3.1-8b": 8_030_261_248,
    "llama3.2-3b": 3_212_749_824,
    "mistral-7b": 7_241_732_096,
    "qwen2.5-0.5b": 494_032_768,
    "qwen2.5-7b": 7_615_616_512,
    "qwen3-0.6b": 596_049_920,
    "qwen3-8b": 8_190_735_360,
    "smollm2-135m": 134_515_008,
}


@pytest.mark.parametrize("name", PARAMETERS)
def test_number_of_parameters_is_the_published_one(name: str) -> None:
    assert apply_preset(RunConfig(), name).model.num_parameters() == PARAMETERS[name]


def test_gpt2_facts() -> None:
    model = apply_preset(RunConfig(), "gpt2-124m").model
    assert (model.position_embedding_type, model.normalization, model.activation) == (
        "learned_absolute",
        "LayerNorm",
        "gelu_tanh",
    )
    assert (model.vocab_size, model.padded_vocab_size, model.max_position_embeddings) == (50257, 50304, 1024)
    assert model.add_bias_linear
    assert not model.untie_embeddings_and_output_weights


def test_llama_facts() -> None:
    run = apply_preset(RunConfig(), "llama3-8b")
    model = run.model
    assert (model.head_dim, model.num_kv_heads, model.rotary_base, run.data.seq_length) == (128, 8, 500000.0, 8192)
    assert (model.normalization, model.activation, model.add_bias_linear) == ("RMSNorm", "swiglu", False)
    assert model.untie_embeddings_and_output_weights
    small = apply_preset(RunConfig(), "llama3.2-1b").model
    assert (small.head_dim, small.untie_embeddings_and_output_weights) == (64, False)


@pytest.mark.parametrize("name", PRESETS)
def test_a_preset_is_a_run_that_can_start(name: str) -> None:
    run = apply_preset(RunConfig(data=DataConfig(mock_data=True)), name)
    model = run.model if run.model.vocab_size else replace(run.model, vocab_size=65)
    assert run.preset == name
    assert violations(replace(run, model=model), world_size=1) == []


def test_tiny_fits_many_layouts() -> None:
    run = apply_preset(RunConfig(data=DataConfig(mock_data=True)), "tiny")
    for tp, pp, world_size in [(4, 2, 8), (2, 2, 8), (1, 4, 8), (2, 1, 4), (1, 1, 8)]:
        parallel = replace(run.parallel, tensor_model_parallel_size=tp, pipeline_model_parallel_size=pp)
        assert violations(replace(run, parallel=parallel), world_size) == []


def test_an_unknown_preset_is_suggested() -> None:
    with pytest.raises(ConfigError, match=r"'llama3-8B', did you mean 'llama3-8b'\? presets are tiny"):
        apply_preset(RunConfig(), "llama3-8B")
