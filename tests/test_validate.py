"""Every violation is found by itself, says its numbers and a remedy, and comes together with the others."""

from __future__ import annotations

import subprocess
import sys
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from megalite.config import RunConfig
from megalite.config_io import assign
from megalite.data.splits import parse_split
from megalite.errors import ConfigError, DataError
from megalite.validate import launched_ranks, validate, violations
from megalite.validate_training import split_shares

GOOD = {"mock_data": True, "vocab_size": 131, "num_attention_heads": 12, "hidden_size": 96, "seq_length": 48}


def found(world_size: int = 1, **changes: Any) -> list[str]:
    return violations(assign(RunConfig(), GOOD | changes), world_size)


def layout(tp: int = 1, pp: int = 1, vpp: int = 1) -> dict[str, int]:
    return {
        "tensor_model_parallel_size": tp,
        "pipeline_model_parallel_size": pp,
        "num_virtual_stages_per_pipeline_rank": vpp,
    }


@pytest.mark.parametrize(
    ("world_size", "changes"),
    [
        (1, {}),
        (8, layout(tp=4, pp=2)),
        (6, layout(tp=2)),
        (4, {"data_parallel_sharding_strategy": "optim_grads_params", "data_parallel_replicate_size": 2}),
        (4, {**layout(tp=4), "num_query_groups": 2}),  # key/value heads are repeated
        (4, {"data_parallel_replicate_size": 4}),
        (2, {**layout(pp=2, vpp=2), "num_layers": 4, "global_batch_size": 6}),
        (3, {**layout(pp=3), "num_layers": 5, "pipeline_layer_split": (3, 2, 0)}),
        (2, {**layout(tp=2), "seq_length": 47, "sequence_parallel": False}),
        (1, {"sequence_parallel": True}),  # no effect, and says so in its help
        (1, {"position_embedding_type": "none", "rotary_percent": 0.01, "kv_channels": 7}),
        (1, {"lr_warmup_fraction": 0.1, "lr_decay_style": "WSD", "lr_wsd_decay_iters": 90}),
        (1, {"lr_warmup_iters": 200, "lr_decay_style": "constant"}),
        (1, {"mock_data": False, "data_path": ("corpus",), "vocab_size": None}),  # the data may know its vocabulary
        (1, {"mock_data": False, "data_path": ("corpus",), "eval_interval": 3}),
        (2, {**layout(tp=2), "vocab_size": None, "mock_data": False, "data_path": ("corpus",)}),
        (1, {"clip_grad": 0.0, "weight_decay": 0.0, "seed": 0, "split": "1"}),
        (1, {"label_smoothing": 0.1, "z_loss": 1e-4, "loss_chunk_tokens": 7, "grad_reduce_in_bf16": True}),
        (1, {"fp8": "rowwise", "precision": "bf16", "num_attention_heads": 6}),
    ],
)
def test_a_good_run_has_no_violation(world_size: int, changes: dict[str, Any]) -> None:
    assert found(world_size, **changes) == []


CASES: list[tuple[int, dict[str, Any], list[str]]] = [
    # world and grid
    (6, layout(tp=4), ["world size 6", "tp 4", "a multiple of 4"]),
    (6, layout(tp=2, pp=2), ["world size 6", "= 4"]),
    (0, {}, ["world size is 0", "at least 1"]),
    (2, {"context_parallel_size": 2}, ["context_parallel_size is 2", "use 1"]),
    (
        4,
        {"data_parallel_sharding_strategy": "optim", "data_parallel_replicate_size": 3},
        ["replicate_size 3", "size 4", "1, 2, 4"],
    ),
    (4, {"data_parallel_replicate_size": 2}, ["replicate_size 2", "without sharding", "--zero"]),
    # tensor parallelism
    (8, {**layout(tp=8), "kv_channels": 8, "num_query_groups": 4}, ["num_attention_heads 12", "size 8", "6 or 12"]),
    (4, {**layout(tp=4), "num_query_groups": 6}, ["num_query_groups 6", "size 4", "1, 2, 3, 6 or 12"]),
    (2, {**layout(tp=2), "ffn_hidden_size": 99}, ["ffn_hidden_size 99", "size 2", "1, 3, 9", "100"]),
    (
        4,
        {**layout(tp=4), "vocab_size": 129, "make_vocab_size_divisible_by": 2},
        ["padded vocabulary 130", "size 4", "make_vocab_size_divisible_by"],
    ),
    (4, {**layout(tp=4), "seq_length": 50}, ["seq_length 50", "size 4", "--no-sequence-parallel"]),
    # model
    (1, {"hidden_size": 100}, ["hidden_size 100", "heads 12", "kv_channels"]),
    (1, {"num_query_groups": 5}, ["num_attention_heads 12", "num_query_groups 5", "1, 2, 3, 4, 6 or 12"]),
    (1, {"kv_channels": 7}, ["head size 7", "7 channels", "even"]),
    (1, {"rotary_percent": 0.7}, ["rotary_percent 0.7", "head size 8", "5 channels"]),
    (1, {"rotary_percent": 0.1}, ["rotary_percent 0.1", "0 channels"]),
    (1, {"rotary_percent": 1.5}, ["rotary_percent is 1.5"]),
    (1, {"rotary_base": 1.0}, ["rotary_base is 1.0"]),
    (1, {"hidden_dropout": 1.0}, ["hidden_dropout is 1.0"]),
    (1, {"attention_dropout": -0.1}, ["attention_dropout is -0.1"]),
    (1, {"norm_epsilon": 0.0}, ["norm_epsilon is 0.0"]),
    (1, {"init_method_std": float("nan")}, ["init_method_std is nan"]),
    (
        1,
        {"position_embedding_type": "learned_absolute", "max_position_embeddings": 47},
        ["seq_length 48", "max_position_embeddings 47"],
    ),
    # pipeline
    (3, layout(pp=3), ["2 layers", "3 pipeline stages", "at most 2"]),
    (2, {**layout(pp=2), "pipeline_layer_split": (1, 2)}, ["1,2", "3 layers", "has 2", "take away 1"]),
    (2, {**layout(pp=2), "pipeline_layer_split": (2,)}, ["names 1 stages", "has 2"]),
    (2, {**layout(pp=2, vpp=2), "num_layers": 4, "global_batch_size": 1}, ["interleaved-1f1b", "got 1 for 2 ranks"]),
    (2, {**layout(pp=2, vpp=2), "num_layers": 4, "pipeline_schedule": "1f1b"}, ["1f1b", "one model chunk", "got 2"]),
    (1, {"pipeline_schedule": "2f2b"}, ["unknown pipeline schedule '2f2b'", "gpipe"]),
    # batch
    (2, {"global_batch_size": 9, "micro_batch_size": 2}, ["global_batch_size 9", "size 2", "= 4", "8 or 12"]),
    (2, {"global_batch_size": 1}, ["global_batch_size 1", "= 2", "2 or 4"]),
    # optimizer
    (1, {"lr": 0.0, "min_lr": 0.0}, ["lr is 0.0"]),
    (1, {"min_lr": 1.0}, ["min_lr is 1.0", "0.0003"]),
    (1, {"adam_beta1": 1.0}, ["adam_beta1 is 1.0"]),
    (1, {"adam_beta2": -0.5}, ["adam_beta2 is -0.5"]),
    (1, {"adam_eps": 0.0}, ["adam_eps is 0.0"]),
    (1, {"weight_decay": -0.1}, ["weight_decay is -0.1"]),
    (1, {"clip_grad": -1.0}, ["clip_grad is -1.0"]),
    (1, {"lr_warmup_iters": 100}, ["lr_warmup_iters 100", "train_iters 100"]),
    (1, {"lr_warmup_iters": 10, "lr_decay_iters": 10}, ["lr_warmup_iters 10", "lr_decay_iters 10"]),
    (1, {"lr_warmup_iters": 2, "lr_warmup_fraction": 0.1}, ["lr_warmup_iters 2", "lr_warmup_fraction 0.1", "both"]),
    (1, {"lr_warmup_fraction": 1.0}, ["lr_warmup_fraction is 1.0"]),
    (1, {"lr_decay_style": "WSD"}, ["WSD needs lr_wsd_decay_iters", "100"]),
    (1, {"lr_wsd_decay_iters": 5}, ["lr_wsd_decay_iters 5", "cosine"]),
    (
        1,
        {"lr_decay_style": "WSD", "lr_wsd_decay_iters": 95, "lr_warmup_iters": 6},
        ["lr_wsd_decay_iters 95", "6 warm-up", "at most 94"],
    ),
    # steps and output
    (1, {"eval_iters": 0}, ["eval_iters is 0", "1 or more"]),
    (1, {"eval_interval": 0}, ["eval_interval is 0"]),
    (1, {"distributed_timeout_minutes": 0.0}, ["distributed_timeout_minutes is 0.0"]),
    (1, {"save_interval": 5}, ["save_interval 5", "--save"]),
    (
        1,
        {"mock_data": False, "data_path": ("a",), "split": "9,0,1", "eval_interval": 2},
        ["eval_interval 2", "'9,0,1'", "validation"],
    ),
    # data
    (1, {"mock_data": False}, ["no data", "--data-path", "--mock-data"]),
    (1, {"data_path": ("a",)}, ["data_path and mock_data"]),
    (1, {"mock_data": False, "data_path": ("0.3", "a", "b", "c")}, ["data_path mixes", "'b'"]),
    (1, {"mock_data": False, "data_path": ("0", "a")}, ["weight 0 of a", "above 0"]),
    (1, {"mock_data": False, "data_path": ("a",), "train_data_path": ("b",)}, ["data_path and data paths of single splits"]),
    (1, {"mock_data": False, "valid_data_path": ("b",), "eval_interval": 2}, ["no training data", "--train-data-path"]),
    (1, {"mock_data": False, "train_data_path": ("a",), "valid_data_path": ("b",)}, ["valid_data_path", "--eval-interval"]),
    (1, {"mock_data": False, "train_data_path": ("a",), "eval_interval": 2}, ["no validation data", "--valid-data-path"]),
    (1, {"mock_data": False, "train_data_path": ("a",), "split": "9,1"}, ["split '9,1' has no effect"]),
    (1, {"reset_attention_mask": True}, ["reset_attention_mask", "mock_data"]),
    (1, {"shuffle": "feistel", "separate_last_epoch": False}, ["separate_last_epoch", "feistel"]),
    (1, {"vocab_size": None}, ["mock_data", "--vocab-size"]),
    (1, {"tokenizer_type": "hf"}, ["tokenizer_type hf", "--tokenizer-model"]),
    (1, {"tokenizer_type": "bytes", "tokenizer_model": "m"}, ["bytes has no file", "'m'"]),
    (1, {"tokenizer_model": "m"}, ["tokenizer_model 'm'", "without tokenizer_type"]),
    (1, {"split": "-1,1,0"}, ["split '-1,1,0'", "969,30,1"]),
    (1, {"split": "90,abc5,5"}, ["split '90,abc5,5'"]),
    (1, {"split": "0,0,0"}, ["split '0,0,0'", "training"]),
    (1, {"split": "0,1,0"}, ["split '0,1,0'", "training"]),
    # the loss and fp8
    (1, {"label_smoothing": 1.0}, ["label_smoothing is 1.0", "less than 1"]),
    (1, {"label_smoothing": -0.1}, ["label_smoothing is -0.1", "0 or more"]),
    (1, {"z_loss": -1e-4}, ["z_loss is -0.0001", "use 0"]),
    (1, {"z_loss": float("inf")}, ["z_loss is inf", "use 0"]),
    (1, {"fp8": "rowwise", "device": "auto"}, ["fp8 rowwise", "precision is fp32", "--precision bf16"]),
    (1, {"fp8": "tensorwise", "precision": "bf16", "device": "cpu"}, ["needs a GPU", "device is cpu"]),
    (
        2,
        {**layout(tp=2), "fp8": "rowwise", "precision": "bf16", "ffn_hidden_size": 250},
        ["multiples of 16", "ffn_hidden_size of a rank 125"],
    ),
]


@pytest.mark.parametrize(("world_size", "changes", "words"), CASES)
def test_one_mistake_is_one_sentence_with_numbers_and_remedy(world_size: int, changes: dict[str, Any], words: list[str]) -> None:
    (sentence,) = found(world_size, **changes)
    assert [word for word in words if word not in sentence] == []


POSITIVE_LIST = """num_layers hidden_size num_attention_heads num_query_groups kv_channels ffn_hidden_size vocab_size
make_vocab_size_divisible_by max_position_embeddings tensor_model_parallel_size pipeline_model_parallel_size
context_parallel_size data_parallel_replicate_size num_virtual_stages_per_pipeline_rank seq_length micro_batch_size
global_batch_size train_iters eval_interval eval_iters log_interval lr_decay_iters loss_chunk_tokens"""


@pytest.mark.parametrize("name", POSITIVE_LIST.split())
@pytest.mark.parametrize("value", [0, -3])
def test_sizes_are_positive(name: str, value: int) -> None:
    (sentence,) = found(**{name: value})
    assert sentence == f"{name} is {value}: use 1 or more"


@pytest.mark.parametrize("name", ["seed", "lr_warmup_iters"])
def test_some_numbers_may_be_zero_but_not_negative(name: str) -> None:
    assert found(**{name: 0}) == []
    assert found(**{name: -1}) == [f"{name} is -1: use 0 or more"]


def test_requirement_87_all_violations_come_at_once() -> None:
    changes = {**layout(tp=8), "seq_length": 50, "ffn_hidden_size": 99, "lr": -1.0, "min_lr": -1.0, "save_interval": 5}
    sentences = found(12, **changes, split="x")
    starts = [
        "num_attention_heads 12 is not divisible by tensor_model_parallel_size 8; use a size of 1, 2, 3, 4, 6 or 12",
        "ffn_hidden_size 99",
        "world size 12",
        "seq_length 50",
        "lr is -1.0",
        "min_lr is -1.0",
        "split 'x'",
        "save_interval 5",
    ]
    assert [text[: len(start)] for text, start in zip(sentences, starts, strict=True)] == starts
    with pytest.raises(ConfigError, match="8 settings are wrong") as caught:
        validate(assign(RunConfig(), GOOD | changes | {"split": "x"}), 12)
    assert caught.value.violations == sentences


def test_a_good_run_is_validated_in_silence() -> None:
    validate(assign(RunConfig(), GOOD), 1)


LAUNCHED = {"RANK": "1", "WORLD_SIZE": "4", "MASTER_ADDR": "host", "MASTER_PORT": "29500"}


@pytest.mark.parametrize(("environment", "ranks"), [({}, 1), ({"WORLD_SIZE": "1"}, 1), (LAUNCHED, 4)])
def test_ranks_are_counted_by_the_launchers_variables(environment: dict[str, str], ranks: int) -> None:
    assert launched_ranks(environment) == ranks


@pytest.mark.parametrize(
    ("environment", "words"),
    [
        ({"WORLD_SIZE": "two"}, "WORLD_SIZE is 'two'"),
        ({"WORLD_SIZE": "2"}, "WORLD_SIZE is 2 in the environment, but RANK is not set"),
        ({"RANK": "0"}, "RANK is set in the environment, but not WORLD_SIZE, MASTER_ADDR, MASTER_PORT"),
        ({"RANK": "0", "WORLD_SIZE": "1"}, "but not MASTER_ADDR, MASTER_PORT"),
    ],
)
def test_half_a_launch_is_an_error_and_not_a_run_of_one_rank(environment: dict[str, str], words: str) -> None:
    with pytest.raises(ConfigError, match="torchrun") as caught:
        launched_ranks(environment)
    assert words in str(caught.value)


@given(st.text(alphabet="0123.,/ -e\u0663\u2003", max_size=9))
def test_splits_are_read_as_the_data_reads_them(split: str) -> None:
    shares = split_shares(split)
    try:
        expected = parse_split(split)
    except DataError:
        assert shares is None or sum(shares) == 0
    else:
        assert shares is not None
        assert [share / sum(shares) for share in shares] == pytest.approx(expected)


def test_validation_needs_no_torch_and_no_numpy() -> None:
    program = (
        "import sys; from megalite.validate import violations; from megalite.config import RunConfig; "
        "assert violations(RunConfig(), 3); print(sorted({'torch', 'numpy', 'tyro'} & set(sys.modules)))"
    )
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"
