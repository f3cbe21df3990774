"""The command line: which flags there are, what they mean, what wins, and how mistakes end."""

from __future__ import annotations

import resource
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from megalite.aliases import ALIASES
from megalite.cli import parse_and_validate, parse_run_config, read_run_config
from megalite.config import RunConfig
from megalite.config_io import assign, field_types
from megalite.errors import ConfigError
from megalite.presets import apply_preset

# Every flag. A new one must be added here, so that it is seen in review. Switches also exist with --no-.
FROZEN_LIST = """
activation adam-beta1 adam-beta2 adam-eps add-attention-output-bias add-bias-linear add-mlp-bias add-qkv-bias async-save
attention-dropout balance-pipeline-stages bf16 bias chat-template check-replicas-interval clip-grad config
context-parallel-size cp cpu-offloading data-cache-path data-parallel-replicate-size data-parallel-sharding-strategy
data-path device disable-bias-linear distributed-timeout-minutes dp-replicas dpo-beta dpo-data-path dpo-valid-path
eod-mask-loss eval-interval eval-iters exit-duration-in-mins exit-interval exp-avg-dtype exp-avg-sq-dtype
ffn-hidden-size finetune fp16 fp8 gbs global-batch-size grad-reduce-in-bf16 group-query-attention hash-tensors
hidden-dropout hidden-size hysteresis init-method-std initial-loss-scale keep-every keep-last kv-channels
label-smoothing load load-weights-only log-gradient-noise-scale log-interval lora-allocation-end
lora-allocation-interval lora-allocation-start lora-alpha lora-alphas lora-average-rank lora-base lora-dropout lora-r
lora-ranks lora-targets loss-chunk-tokens loss-scale loss-scale-window lr lr-decay-iters lr-decay-samples lr-decay-style
lr-multipliers lr-warmup-fraction lr-warmup-iters lr-warmup-samples lr-wsd-decay-iters lr-wsd-decay-samples
lr-wsd-decay-style make-vocab-size-divisible-by max-position-embeddings max-skipped-steps mbs memory-report metrics-file
micro-batch-size microbatch-group-size-per-virtual-pipeline-stage min-loss-scale min-lr mock-data model muon-dtype
muon-momentum muon-num-ns-steps muon-scale-mode muon-use-nesterov norm-epsilon normalization num-attention-heads
num-distributed-optimizer-instances num-layers num-query-groups num-virtual-stages-per-pipeline-rank num-workers
on-damaged-checkpoint on-nonfinite on-save-failure optimizer optimizer-cpu-offload persistent-save-interval
pipeline-layer-split pipeline-model-parallel-layout pipeline-model-parallel-size pipeline-schedule
pipeline-schedule-costs position-embedding-type pp precision preset probe-dir probe-steps qk-layernorm quantize-base
rampup-batch-size recompute-activations recompute-granularity recompute-modules recompute-num-layers
reset-attention-mask reset-position-ids rewind-steps rope-scaling rope-scaling-attention-factor rope-scaling-beta-fast
rope-scaling-beta-slow rope-scaling-factor rope-scaling-high-freq-factor rope-scaling-low-freq-factor
rope-scaling-mscale rope-scaling-mscale-all-dim rope-scaling-original-length rope-scaling-truncate rotary-base
rotary-percent save save-interval schedule seed sentencepiece-model separate-last-epoch seq-length sequence-parallel
sft-data-path sft-too-long sft-valid-path sgd-momentum shuffle skip-spikes sliding-window sp spike-factor spike-window
split squared-relu straggler-factor swiglu tensor-model-parallel-size tensorboard-dir test-data-path tie tokenizer-model
tokenizer-type tp trace-pipeline train-data-path train-iters untie-embeddings-and-output-weights
use-distributed-optimizer use-dora use-rotary-position-embeddings use-rslora valid-data-path vocab-size vpp
watchdog-seconds weight-decay weight-decay-multipliers z-loss zero
"""
FROZEN = FROZEN_LIST.split()


def read(line: str) -> RunConfig:
    return read_run_config(line.split(), "prog", "")


def changed(**values: Any) -> RunConfig:
    return assign(RunConfig(), values)


def problems_of(line: str) -> list[str]:
    with pytest.raises(ConfigError) as caught:
        read(line)
    return caught.value.violations


def test_the_flags_are_the_frozen_list() -> None:
    names = {*field_types(RunConfig), *ALIASES, "config"}
    assert sorted(name.replace("_", "-") for name in names) == sorted(FROZEN)


def test_no_flags_give_the_defaults() -> None:
    assert read("") == RunConfig()


@pytest.mark.parametrize(
    ("line", "values"),
    [
        ("--tp 2 --pp 3 --cp 4 --vpp 5", dict(zip(
            ("tensor_model_parallel_size", "pipeline_model_parallel_size", "context_parallel_size",
             "num_virtual_stages_per_pipeline_rank"), (2, 3, 4, 5), strict=True))),
        ("--mbs 2 --gbs 8", {"micro_batch_size": 2, "global_batch_size": 8}),
        ("--micro-batch-size=2 --global_batch_size=8", {"micro_batch_size": 2, "global_batch_size": 8}),
        ("--zero 0", {"data_parallel_sharding_strategy": "no_shard"}),
        ("--zero 3", {"data_parallel_sharding_strategy": "optim_grads_params"}),
        ("--use-distributed-optimizer", {"data_parallel_sharding_strategy": "optim"}),
        ("--data-parallel-sharding-strategy optim_grads", {"data_parallel_sharding_strategy": "optim_grads"}),
        ("--swiglu", {"activation": "swiglu"}),
        ("--squared-relu", {"activation": "relu_squared"}),
        ("--activation gelu_tanh", {"activation": "gelu_tanh"}),
        ("--no-disable-bias-linear", {"add_bias_linear": True}),
        ("--bias --add-qkv-bias", {"add_bias_linear": True, "add_qkv_bias": True}),
        ("--bf16", {"precision": "bf16"}),
        ("--tie", {"untie_embeddings_and_output_weights": False}),
        ("--no-untie-embeddings-and-output-weights", {"untie_embeddings_and_output_weights": False}),
        ("--sequence-parallel", {"sequence_parallel": True}),
        ("--no-sequence-parallel", {"sequence_parallel": False}),
        ("--no-sp", {"sequence_parallel": False}),
        ("--group-query-attention --num-query-groups 2", {"num_query_groups": 2}),
        ("--use-rotary-position-embeddings --rotary-base 500000", {"rotary_base": 500000.0}),
        ("--normalization LayerNorm --norm-epsilon 1e-6", {"normalization": "LayerNorm", "norm_epsilon": 1e-6}),
        ("--lr-decay-style WSD --lr-wsd-decay-iters 7", {"lr_decay_style": "WSD", "lr_wsd_decay_iters": 7}),
        ("--data-path 0.3 a 0.7 b --seed 7", {"data_path": ("0.3", "a", "0.7", "b"), "seed": 7}),
        ("--pipeline-layer-split 3 2", {"pipeline_layer_split": (3, 2)}),
        ("--tokenizer-type GPTSentencePieceTokenizer", {"tokenizer_type": "sentencepiece"}),
        ("--tokenizer-type bytes", {"tokenizer_type": "bytes"}),
        ("--weight-decay -0.5 --split -1,1,0", {"weight_decay": -0.5, "split": "-1,1,0"}),
        ("--mock-data --save out --save-interval 5", {"mock_data": True, "save": "out", "save_interval": 5}),
        ("--tp 2 --lr 1 --tp 4", {"tensor_model_parallel_size": 4, "lr": 1.0}),
        ("--mock-data --no-mock-data", {}),
        ("--vocab-size None --save None", {}),
    ],
)  # fmt: skip
def test_flags(line: str, values: dict[str, Any]) -> None:
    assert read(line) == changed(**values)


@pytest.mark.parametrize(
    ("line", "problems"),
    [
        ("--tpp 2", ["unknown flag --tpp, did you mean '--tp'?"]),
        ("--hiden-size 3 --tp 2 --xyzzy", ["unknown flag --hiden-size, did you mean '--hidden-size'?",
                                           "unknown flag --xyzzy"]),
        ("--tensor 2", ["unknown flag --tensor"]),
        ("--no-sequence-paralel", ["unknown flag --no-sequence-paralel, did you mean '--no-sequence-parallel'?"]),
        ("--no-tp 2", ["unknown flag --no-tp"]),
        ("--tp 2 --tensor-model-parallel-size 2",
         ["--tp and --tensor-model-parallel-size are the same setting: keep one of them"]),
        ("--swiglu --activation gelu", ["--swiglu and --activation are the same setting: keep one of them"]),
        ("--zero 1 --use-distributed-optimizer",
         ["--zero and --use-distributed-optimizer are the same setting: keep one of them"]),
        ("--tp", ["--tp needs one value after it"]),
        ("--tp 2 4 --bf16", ["--tp needs one value after it, got 2: 2 4"]),
        ("--data-path --bf16", ["--data-path needs one value or more after it"]),
        ("--mock-data true", ["--mock-data takes no value, got 'true': write --mock-data alone"]),
        ("--bf16=1", ["--bf16 takes no value, got '1': write --bf16 alone"]),
        ("tp 2 --bf16", ["unexpected argument 'tp': settings are written --name value"]),
        ("-lr 2", ["unexpected argument '-lr': settings are written --name value"]),
        ("-- x", ["unknown flag --"]),
        ("--zero 4", ["--zero = '4' is not one of 0, 1, 2, 3"]),
        ("--no-swiglu", ["'--no-swiglu' can only be switched on: leave it out and set 'activation' instead"]),
        ("--num-experts 4", ["--num-experts is not a setting of megalite: there are no expert layers"]),
        ("--group-query-attention",
         ["'--group-query-attention' says nothing by itself: set 'num_query_groups' as well"]),
        ("--config /does/not/exist",
         ["--config /does/not/exist cannot be read: [Errno 2] No such file or directory: '/does/not/exist'"]),
    ],
)  # fmt: skip
def test_wrong_flags_are_all_named(line: str, problems: list[str]) -> None:
    found = problems_of(line)
    assert [text if text in problems else text.split(", did you")[0] for text in found] == problems


@pytest.mark.parametrize(
    ("line", "words"),
    [
        ("--hidden-size 2.5", ["--hidden-size", "2.5"]),
        ("--lr fast", ["--lr", "fast"]),
        ("--tp two", ["--tensor-model-parallel-size", "two"]),
        ("--activation swiglo", ["--activation", "swiglo", "gelu_tanh"]),
        ("--pipeline-layer-split 3 x", ["--pipeline-layer-split", "x"]),
    ],
)
def test_a_value_of_the_wrong_type_ends_with_code_2(line: str, words: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as caught:
        read(line)
    said = capsys.readouterr().err
    assert caught.value.code == 2
    assert [word for word in words if word not in said] == []


# ---- what wins -------------------------------------------------------------------------------------------------------


@pytest.fixture
def write(tmp_path: Path) -> Callable[[str], str]:
    def to_file(text: str) -> str:
        path = tmp_path / "run.toml"
        path.write_text(text, encoding="utf-8")
        return str(path)

    return to_file


def test_flags_win_over_the_file_over_the_preset_over_defaults(write: Callable[[str], str]) -> None:
    path = write('num_layers = 5\nhidden-size = 384\nsave = "out"\n[optim]\nlr = 0.5')
    run = read(f"--hidden-size 96 --config {path} --model gpt2-124m")
    expected = apply_preset(RunConfig(), "gpt2-124m")
    assert run == assign(expected, {"num_layers": 5, "hidden_size": 96, "lr": 0.5, "save": "out"})


def test_the_file_can_name_the_preset(write: Callable[[str], str]) -> None:
    path = write('preset = "llama3-8b"\nnum_query_groups = "None"')
    expected = assign(apply_preset(RunConfig(), "llama3-8b"), {"num_query_groups": None})
    assert read(f"--config {path}") == expected
    assert read(f"--config {path} --preset llama3-8b") == expected
    (problem,) = problems_of(f"--config {path} --preset tiny")
    assert "'llama3-8b'" in problem
    assert "'tiny'" in problem


@pytest.mark.parametrize("line", ["", "--preset llama3-8b --num-query-groups None", "--tp 2 --data-path a b --no-sp"])
def test_the_written_run_starts_again(line: str, write: Callable[[str], str]) -> None:
    run = read(line)
    assert read(f"--config {write(run.to_toml())}") == run


def test_problems_of_a_file_name_the_file(write: Callable[[str], str]) -> None:
    path = write("num_layer = 5\nlr = true")
    assert problems_of(f"--config {path}") == [
        f"{path}: unknown key 'num_layer', did you mean 'num_layers'?",
        f"{path}: lr = True has the wrong type: a number is wanted",
    ]
    assert problems_of(f"--config {write('lr = = 3')}")[0].startswith(f"{path}: this is not TOML")


def test_an_unknown_preset_is_suggested() -> None:
    (problem,) = problems_of("--preset lama3-8b")
    assert "did you mean 'llama3-8b'" in problem


# ---- the program -----------------------------------------------------------------------------------------------------


def test_mistakes_end_with_code_2_and_one_message(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(SystemExit) as caught:
        parse_run_config(["--tpp", "2", "--num-experts", "4"], "train.py", "")
    said = capsys.readouterr().err
    assert caught.value.code == 2
    assert said.startswith("train.py: 2 settings are wrong:\n  1. unknown flag --tpp, did you mean '--tp'?\n")
    assert "train.py --help" in said
    monkeypatch.setenv("LOCAL_RANK", "1")
    monkeypatch.setattr("megalite.cli.SILENT_RANKS_WAIT_S", 0.0)
    with pytest.raises(SystemExit) as caught:
        parse_run_config(["--tpp", "2"], "train.py", "")
    assert (caught.value.code, capsys.readouterr().err) == (2, "")


def test_validation_uses_the_number_of_launched_ranks(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    argv = ["--mock-data", "--vocab-size", "64", "--tp", "2", "--pp", "2"]
    for name, value in {"RANK": "0", "WORLD_SIZE": "8", "MASTER_ADDR": "localhost", "MASTER_PORT": "1"}.items():
        monkeypatch.setenv(name, value)
    assert parse_and_validate(argv, "train.py", "").dp_size(8) == 2
    monkeypatch.setenv("WORLD_SIZE", "6")
    with pytest.raises(SystemExit) as caught:
        parse_and_validate(argv, "train.py", "")
    assert caught.value.code == 2
    assert "world size 6" in capsys.readouterr().err


PROGRAM = """
import sys
from megalite.cli import parse_run_config
try:
    parse_run_config(sys.argv[1:], "train.py", "Train a model.")
finally:
    print("imported:", sorted({"torch", "numpy"} & set(sys.modules)), file=sys.stderr)
"""


def test_help_is_fast_and_complete_without_torch() -> None:
    before = resource.getrusage(resource.RUSAGE_CHILDREN)
    done = subprocess.run([sys.executable, "-c", PROGRAM, "--tp", "2", "--help"], capture_output=True, text=True)
    after = resource.getrusage(resource.RUSAGE_CHILDREN)
    assert done.returncode == 0
    assert done.stderr.strip() == "imported: []"
    # processor time: the machine may be busy with other things
    assert after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime < 1.0
    assert "Train a model." in done.stdout
    assert [flag for flag in FROZEN if f"--{flag}" not in done.stdout and flag != "group-query-attention"] == []
    words = " ".join(done.stdout.replace("│", " ").split())
    assert "Ranks that share every matmul. Also --tp. (default: 1)" in words
    assert "--sequence-parallel, --no-sequence-parallel" in words


def test_a_wrong_flag_shows_no_traceback() -> None:
    done = subprocess.run([sys.executable, "-c", PROGRAM, "--lrr", "2"], capture_output=True, text=True)
    assert done.returncode == 2
    assert "did you mean '--lr'?" in done.stderr
    assert "Traceback" not in done.stderr


def test_a_pager_may_close_the_help_early() -> None:
    command = f"{sys.executable} -c '{PROGRAM}' --help | head -n 1"
    done = subprocess.run(["sh", "-c", command], capture_output=True, text=True)
    assert "Traceback" not in done.stderr
    assert "BrokenPipe" not in done.stderr
