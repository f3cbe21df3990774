"""Reading, writing and derived numbers of a configuration."""

from __future__ import annotations

import json
from dataclasses import fields, is_dataclass, replace
from types import NoneType, UnionType
from typing import Any, Literal, Union, get_args, get_origin, get_type_hints

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from megalite.aliases import ALIASES, UNSUPPORTED
from megalite.cli_help import field_sentences
from megalite.config import DataConfig, ModelConfig, OptimConfig, OutputConfig, ParallelConfig, RunConfig, TrainConfig
from megalite.config_io import assign, field_types, write_toml
from megalite.errors import ConfigError

SECTIONS = (ModelConfig, ParallelConfig, DataConfig, OptimConfig, TrainConfig, OutputConfig)


def values_of(kind: Any) -> st.SearchStrategy[Any]:
    """Any value of a field's type; "None" is the one reserved text, NaN is not equal to itself."""
    if get_origin(kind) in (Union, UnionType):
        (inner,) = [part for part in get_args(kind) if part is not NoneType]
        return st.none() | values_of(inner)
    if get_origin(kind) is Literal:
        return st.sampled_from(get_args(kind))
    if get_origin(kind) is tuple:
        return st.lists(values_of(get_args(kind)[0]), max_size=3).map(tuple)
    return {
        int: st.integers(-(2**63), 2**63 - 1),
        float: st.floats(allow_nan=False),
        bool: st.booleans(),
        str: st.text().filter(lambda text: text != "None"),
    }[kind]


def runs() -> st.SearchStrategy[RunConfig]:
    return st.fixed_dictionaries({name: values_of(kind) for name, (_, kind) in field_types(RunConfig).items()}).map(
        lambda values: assign(RunConfig(), values)
    )


def problems_of(data: dict[str, Any]) -> list[str]:
    with pytest.raises(ConfigError) as caught:
        RunConfig.from_dict(data)
    return caught.value.violations


# ---- reading and writing ---------------------------------------------------------------------------------------------


@settings(max_examples=60, deadline=None)
@given(runs())
def test_every_run_is_read_back_equal(run: RunConfig) -> None:
    assert RunConfig.from_toml(run.to_toml()) == run
    assert RunConfig.from_dict(run.to_dict()) == run
    assert RunConfig.from_dict(json.loads(json.dumps(run.to_dict()))) == run


def test_toml_of_a_run_names_every_setting_once() -> None:
    lines = [line.split(" = ")[0] for line in RunConfig().to_toml().splitlines() if " = " in line]
    assert sorted(lines) == sorted(field_types(RunConfig))


def test_sections_flat_keys_dashes_and_aliases_mean_the_same() -> None:
    expected = assign(
        RunConfig(),
        {
            "hidden_size": 48,
            "tensor_model_parallel_size": 2,
            "data_parallel_sharding_strategy": "optim_grads",
            "activation": "relu_squared",
            "add_bias_linear": True,
            "precision": "bf16",
            "untie_embeddings_and_output_weights": False,
            "lr": 1.0,
            "data_path": ("a", "b"),
            "pipeline_layer_split": (3, 2),
            "tokenizer_type": "hf",
        },
    )
    text = """
        tp = 2
        squared-relu = true
        disable_bias_linear = false
        bf16 = true
        tie = true
        lr = 1
        [model]
        hidden-size = 48
        [parallel]
        zero = 2
        pipeline_layer_split = [3, 2]
        [data]
        data_path = ["a", "b"]
        tokenizer_type = "HuggingFaceTokenizer"
    """
    assert RunConfig.from_toml(text) == expected
    assert isinstance(RunConfig.from_toml(text).optim.lr, float)


def test_all_problems_of_a_document_are_listed_at_once() -> None:
    found = problems_of({"hiden_size": 3, "model": {"num_layer": 2}, "optim": {"lr": "3"}, "num_experts": 4})
    assert found == [
        "unknown key 'hiden_size', did you mean 'hidden_size'?",
        "unknown key 'model.num_layer', did you mean 'num_layers'?",
        "optim.lr = '3' has the wrong type: a number is wanted",
        "'num_experts' is not a setting of megalite: there are no expert layers",
    ]


@pytest.mark.parametrize(
    "data",
    [
        {"lr": 0.1, "optim": {"lr": 0.1}},
        {"tp": 2, "tensor_model_parallel_size": 2},
        {"micro_batch_size": 2, "micro-batch-size": 2},
        {"parallel": {"zero": 1, "use_distributed_optimizer": True}},
        {"swiglu": True, "activation": "swiglu"},
    ],
)
def test_a_setting_that_is_given_twice_is_refused(data: dict[str, Any]) -> None:
    (problem,) = problems_of(data)
    assert "are the same setting" in problem


@pytest.mark.parametrize(
    ("data", "words"),
    [
        ({"num_layers": 2.0}, ["num_layers", "2.0", "whole number"]),
        ({"num_layers": True}, ["num_layers", "True", "whole number"]),
        ({"num_layers": "None"}, ["num_layers", "None", "whole number"]),
        ({"lr": True}, ["lr", "True", "a number"]),
        ({"mock_data": 1}, ["mock_data", "1", "true or false"]),
        ({"save": 3}, ["save", "3", "string"]),
        ({"data_path": "a"}, ["data_path", "'a'", "list"]),
        ({"data_path": ["a", 3]}, ["data_path[1]", "3", "string"]),
        ({"pipeline_layer_split": [1, "2"]}, ["pipeline_layer_split[1]", "'2'", "whole number"]),
        ({"activation": "swiglo"}, ["activation", "'swiglo'", "gelu_tanh", "did you mean 'swiglu'"]),
        ({"zero": 4}, ["zero", "4", "0, 1, 2, 3"]),
        ({"zero": True}, ["zero", "True", "0, 1, 2, 3"]),
        ({"swiglu": False}, ["swiglu", "activation"]),
        ({"swiglu": 1}, ["swiglu", "1", "true"]),
        ({"model": "gpt2-124m"}, ["'model' is a section", "preset = 'gpt2-124m'"]),
        ({"parallel": 3}, ["'parallel' is a section", "3"]),
        ({"paralel": {"tp": 2}}, ["[paralel]", "'parallel'"]),
        ({"model": {"lr": 0.1}}, ["'lr'", "[model]", "[optim]"]),
        ({"model": {"preset": "tiny"}}, ["'preset'", "[model]", "top level"]),
        ({"group_query_attention": True}, ["group_query_attention", "num_query_groups"]),
    ],
)
def test_a_wrong_value_is_named(data: dict[str, Any], words: list[str]) -> None:
    (problem,) = problems_of(data)
    assert [word for word in words if word not in problem] == []


def test_a_text_that_is_not_toml_is_a_config_error() -> None:
    with pytest.raises(ConfigError, match="not TOML"):
        RunConfig.from_toml("lr = = 3")


# ---- the tables are sound --------------------------------------------------------------------------------------------


def test_every_field_has_a_sentence() -> None:
    for section in (*SECTIONS, RunConfig):
        wanted = [entry.name for entry in fields(section) if not is_dataclass(get_type_hints(section)[entry.name])]
        sentences = field_sentences(section)
        assert [name for name in wanted if not sentences.get(name, "").endswith(".")] == []


def test_every_alias_means_a_field_and_a_value_of_its_type() -> None:
    types = field_types(RunConfig)
    for name, alias in ALIASES.items():
        assert alias.setting in types, name
        assert name not in types or alias.setting == name, name
        for written, meant in alias.values.items():
            run = RunConfig.from_dict({name: written})
            section = types[alias.setting][0] or ""
            assert getattr(getattr(run, section), alias.setting) == meant
    assert not set(UNSUPPORTED) & (set(types) | set(ALIASES))


def test_toml_writes_numbers_that_toml_reads() -> None:
    run = RunConfig(optim=OptimConfig(lr=1e16, min_lr=1e-7, clip_grad=float("inf"), adam_eps=5e-324))
    assert RunConfig.from_toml(write_toml(run)) == run


# ---- derived numbers -------------------------------------------------------------------------------------------------


def test_derived_sizes() -> None:
    model = ModelConfig(hidden_size=96, num_attention_heads=6)
    assert (model.num_kv_heads, model.head_dim, model.rotary_dim) == (6, 16, 16)
    assert model.ffn_size == 256  # 8/3 x 96 = 256
    assert replace(model, hidden_size=90).ffn_size == 192  # 240 rounded down to a multiple of 64
    assert replace(model, hidden_size=12).ffn_size == 64
    assert replace(model, activation="gelu").ffn_size == 384
    assert replace(model, activation="gelu", ffn_hidden_size=100).ffn_size == 100
    assert replace(model, num_query_groups=2, kv_channels=20, rotary_percent=0.5).rotary_dim == 10
    assert replace(model, num_query_groups=2).num_kv_heads == 2
    assert replace(model, position_embedding_type="none").rotary_dim == 0


@pytest.mark.parametrize(("vocab", "unit", "padded"), [(50257, 128, 50304), (256, 128, 256), (1, 128, 128), (7, 3, 9)])
def test_padded_vocabulary(vocab: int, unit: int, padded: int) -> None:
    assert ModelConfig(vocab_size=vocab, make_vocab_size_divisible_by=unit).padded_vocab_size == padded


@pytest.mark.parametrize("ask", ["padded_vocab_size", "num_parameters", "flops_per_token"])
def test_an_unknown_vocabulary_is_an_error_with_a_remedy(ask: str) -> None:
    asks = {
        "padded_vocab_size": lambda model: model.padded_vocab_size,
        "num_parameters": lambda model: model.num_parameters(),
        "flops_per_token": lambda model: model.flops_per_token(16),
    }
    with pytest.raises(ConfigError, match="--vocab-size"):
        asks[ask](ModelConfig())


@pytest.mark.parametrize(
    ("changes", "expected"),
    [
        # H 10, N 5, D 2, F 7, V 11, one layer; attention 4 x 100, norms 3 x 10, embedding and head 110 each
        ({}, 400 + 3 * 70 + 30 + 220),
        ({"activation": "gelu"}, 400 + 2 * 70 + 30 + 220),
        ({"normalization": "LayerNorm"}, 400 + 3 * 70 + 60 + 220),
        ({"untie_embeddings_and_output_weights": False}, 400 + 3 * 70 + 30 + 110),
        ({"num_query_groups": 1}, 200 + 2 * 20 + 3 * 70 + 30 + 220),
        ({"kv_channels": 3}, 600 + 3 * 70 + 30 + 220),
        ({"add_qkv_bias": True}, 400 + 30 + 3 * 70 + 30 + 220),
        ({"add_bias_linear": True}, 400 + 30 + 10 + 3 * 70 + 14 + 10 + 30 + 220),
        ({"add_bias_linear": True, "activation": "gelu"}, 400 + 40 + 2 * 70 + 7 + 10 + 30 + 220),
        ({"position_embedding_type": "learned_absolute", "max_position_embeddings": 13}, 400 + 210 + 30 + 220 + 130),
    ],
)
def test_number_of_parameters(changes: dict[str, Any], expected: int) -> None:
    small = ModelConfig(num_layers=1, hidden_size=10, num_attention_heads=5, ffn_hidden_size=7, vocab_size=11)
    assert replace(small, **changes).num_parameters() == expected


def test_flops_per_token() -> None:
    model = ModelConfig(num_layers=2, hidden_size=10, num_attention_heads=5, ffn_hidden_size=7, vocab_size=11)
    assert model.flops_per_token(16) == 6 * (2 * (400 + 210) + 110) + 12 * 2 * 10 * 16
    tied = replace(model, untie_embeddings_and_output_weights=False)
    assert tied.flops_per_token(16) == model.flops_per_token(16)


def test_layout_numbers() -> None:
    parallel = ParallelConfig(
        tensor_model_parallel_size=2,
        pipeline_model_parallel_size=2,
        data_parallel_replicate_size=3,
        data_parallel_sharding_strategy="optim_grads_params",
    )
    run = RunConfig(parallel=parallel, train=TrainConfig(micro_batch_size=2, global_batch_size=48))
    assert (run.zero, run.dp_size(24), run.num_microbatches(24)) == (3, 6, 4)
    assert run.grid_sizes(24) == {"pp": 2, "dp_replicate": 3, "dp_shard": 2, "cp": 1, "tp": 2}
    plain = replace(run, parallel=replace(parallel, data_parallel_sharding_strategy="no_shard"))
    assert plain.grid_sizes(24) == {"pp": 2, "dp_replicate": 6, "dp_shard": 1, "cp": 1, "tp": 2}
    derived = replace(run, train=TrainConfig(micro_batch_size=2))
    assert (derived.global_batch(24), derived.num_microbatches(24)) == (12, 1)


def test_layout_numbers_refuse_what_is_not_divisible() -> None:
    run = RunConfig(
        parallel=ParallelConfig(tensor_model_parallel_size=2, data_parallel_replicate_size=3, data_parallel_sharding_strategy="optim"),
        train=TrainConfig(micro_batch_size=2, global_batch_size=6),
    )
    with pytest.raises(ConfigError, match="world size 5"):
        run.dp_size(5)
    with pytest.raises(ConfigError, match=r"6 is not a multiple.* 4: use 4 or 8"):
        run.num_microbatches(4)
    with pytest.raises(ConfigError, match=r"replicate_size 3 does not divide .* 4: use one of 1, 2, 4"):
        run.grid_sizes(8)


def test_what_is_not_set_follows_the_layout() -> None:
    assert ParallelConfig().schedule == "1f1b"
    assert ParallelConfig(num_virtual_stages_per_pipeline_rank=2).schedule == "interleaved-1f1b"
    assert ParallelConfig(num_virtual_stages_per_pipeline_rank=2, pipeline_schedule="gpipe").schedule == "gpipe"
    cases = [(1, None), (1, True), (2, None), (2, True), (2, False)]
    used = [ParallelConfig(tensor_model_parallel_size=tp, sequence_parallel=on).use_sequence_parallel for tp, on in cases]
    assert used == [False, False, True, True, False]


def test_resolve_fills_what_is_open_and_keeps_what_is_set() -> None:
    run = RunConfig(data=DataConfig(seq_length=33)).resolve(257)
    assert (run.model.vocab_size, run.model.max_position_embeddings) == (257, 33)
    given_sizes = replace(run, model=ModelConfig(vocab_size=300, max_position_embeddings=64)).resolve(257)
    assert (given_sizes.model.vocab_size, given_sizes.model.max_position_embeddings) == (300, 64)
    with pytest.raises(ConfigError, match="vocab_size 200 is too small for the tokenizer's 257"):
        RunConfig(model=ModelConfig(vocab_size=200)).resolve(257)
