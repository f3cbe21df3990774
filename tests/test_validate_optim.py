"""Settings of the optimizer and the learning rate that are refused, each with its numbers and what to do instead."""

from __future__ import annotations

from typing import Any

import pytest

from megalite.config import RunConfig
from megalite.config_io import assign
from megalite.validate import violations


def found(**values: Any) -> list[str]:
    base = {"mock_data": True, "vocab_size": 100, "micro_batch_size": 2, "global_batch_size": 8, "train_iters": 100}
    return violations(assign(RunConfig(), base | values), 1)


@pytest.mark.parametrize(
    "values",
    [
        {"lr_warmup_samples": 80, "lr_decay_samples": 800},
        {"lr_warmup_samples": 0, "lr_decay_iters": 10},
        {"lr_decay_style": "WSD", "lr_warmup_samples": 80, "lr_wsd_decay_samples": 720, "lr_wsd_decay_style": "exponential"},
        {"lr_decay_style": "inverse-square-root", "lr_warmup_iters": 10},
        {"optimizer": "muon", "exp_avg_dtype": "bf16", "exp_avg_sq_dtype": "bf16", "optimizer_cpu_offload": True},
        {"optimizer": "sgd", "sgd_momentum": 0.0, "exp_avg_dtype": "bf16"},
        {"lr_multipliers": ("embedding=0.1", r"layers\.\d+\.mlp=2"), "weight_decay_multipliers": ("norm=1",)},
        {"log_gradient_noise_scale": True},
    ],
    ids=str,
)
def test_settings_that_can_run(values: dict[str, Any]) -> None:
    assert found(**values) == []


@pytest.mark.parametrize(
    ("values", "parts"),
    [
        ({"lr_warmup_iters": 2, "lr_warmup_samples": 16}, ["lr_warmup_iters 2", "lr_warmup_samples 16", "both"]),
        ({"lr_warmup_iters": 2, "lr_warmup_samples": 16, "lr_warmup_fraction": 0.1}, ["all set", "all but one"]),
        ({"lr_decay_iters": 50, "lr_decay_samples": 400}, ["lr_decay_iters 50", "lr_decay_samples 400", "both"]),
        (
            {"lr_decay_style": "WSD", "lr_wsd_decay_iters": 5, "lr_wsd_decay_samples": 40},
            ["lr_wsd_decay_iters 5", "lr_wsd_decay_samples 40", "both"],
        ),
        ({"lr_warmup_samples": 800}, ["lr_warmup_samples 800", "train_iters 100", "fewer than 100 steps"]),
        ({"lr_warmup_iters": 50, "lr_decay_samples": 400}, ["lr_warmup_iters 50", "lr_decay_samples 400", "fewer than 50 steps"]),
        ({"lr_wsd_decay_samples": 8}, ["lr_wsd_decay_samples 8", "no effect", "cosine"]),
        (
            {"lr_decay_style": "WSD", "lr_warmup_samples": 80, "lr_wsd_decay_samples": 728},
            ["lr_wsd_decay_samples 728", "10 warm-up", "at most 90"],
        ),
        ({"sgd_momentum": 1.0}, ["sgd_momentum is 1.0", "less than 1"]),
        ({"muon_momentum": -0.1}, ["muon_momentum is -0.1"]),
        ({"muon_num_ns_steps": 0}, ["muon_num_ns_steps is 0"]),
        ({"optimizer": "sgd", "exp_avg_sq_dtype": "bf16"}, ["exp_avg_sq_dtype bf16", "no second moment"]),
        ({"lr_multipliers": ("embedding",)}, ["lr_multipliers 'embedding'", "REGEX=FACTOR"]),
        ({"weight_decay_multipliers": ("(=1",)}, ["weight_decay_multipliers", "not a regular expression"]),
        ({"lr_multipliers": ("norm=-2",)}, ["'-2'", "0 or more"]),
        ({"log_gradient_noise_scale": True, "global_batch_size": 6}, ["3 micro-batches", "even"]),
        ({"log_gradient_noise_scale": True, "trace_pipeline": "x.jsonl"}, ["trace_pipeline", "leave one out"]),
    ],
    ids=str,
)
def test_settings_that_are_refused(values: dict[str, Any], parts: list[str]) -> None:
    (violation,) = found(**values)
    assert all(part in violation for part in parts), violation


def test_everything_is_reported_at_once() -> None:
    wrong = {"lr": -1.0, "sgd_momentum": 2.0, "lr_multipliers": ("x", "y=z"), "lr_decay_iters": 1, "lr_decay_samples": 8}
    assert len(found(**wrong)) == 6  # min_lr is above lr, too
