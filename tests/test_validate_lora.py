"""Every wrong setting of adapters is one sentence with its numbers and a remedy."""

from __future__ import annotations

from typing import Any

import pytest

from megalite.config import LoraConfig, RunConfig
from megalite.config_io import assign
from megalite.validate_lora import lora_violations

GOOD = {"lora_r": 4, "lora_base": "runs/base", "num_layers": 3, "train_iters": 100}


def found(**changes: Any) -> list[str]:
    return lora_violations(assign(RunConfig(), GOOD | changes))


@pytest.mark.parametrize(
    "changes",
    [
        {},
        {"lora_targets": ("all-linear",), "lora_ranks": (r"layers\.0\.=0", "mlp=8"), "lora_alphas": ("down=1.5",), "use_dora": True},
        {"lora_average_rank": 2.5, "lora_allocation_start": 10, "lora_allocation_end": 90},
        {"lora_r": None, "lora_base": None},
    ],
)
def test_good_settings(changes: dict[str, Any]) -> None:
    assert found(**changes) == []


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"lora_alpha": 0.0}, ["lora_alpha is 0.0", "above 0"]),
        ({"lora_dropout": 1.0}, ["lora_dropout is 1.0", "less than 1"]),
        ({"lora_base": None}, ["without lora_base", "--lora-base"]),
        ({"lora_r": None}, ["lora_base without lora_r", "--lora-r"]),
        ({"lora_targets": ()}, ["lora_targets is empty"]),
        ({"lora_targets": ("q_proj", "qkv")}, ["'qkv'", "q_proj, k_proj"]),
        ({"lora_targets": ("gate_proj",), "activation": "gelu"}, ["'gate_proj'", "up_proj"]),
        ({"lora_ranks": ("layers",)}, ["'layers' is not REGEX=NUMBER"]),
        ({"lora_ranks": ("mlp=2.5",)}, ["'2.5' is not a whole number"]),
        ({"lora_ranks": ("(=2",)}, ["not a regular expression"]),
        ({"lora_ranks": (r"layers\.7=2",)}, ["found in no layer", "layers.0.attention.q_proj to layers.2"]),
        ({"lora_ranks": ("layers=0",)}, ["nothing would be trained"]),
        ({"lora_alphas": ("mlp=-1",)}, ["'-1' is not a number above 0"]),
        ({"lora_average_rank": 5.0}, ["lora_average_rank is 5.0", "at most lora_r 4"]),
        ({"lora_average_rank": 2.0, "lora_allocation_end": 101}, ["lora_allocation_end 101", "train_iters 100"]),
        ({"lora_allocation_end": 50}, ["without lora_average_rank"]),
    ],
)
def test_one_mistake_is_one_sentence(changes: dict[str, Any], words: list[str]) -> None:
    (sentence,) = found(**changes)
    assert all(word in sentence for word in words), sentence


def test_scales_and_ranks_by_name() -> None:
    lora = LoraConfig(lora_r=8, lora_alpha=16, lora_targets=("q_proj", "down_proj"), lora_ranks=("layers.1=2",), lora_alphas=("down=4",))
    assert [lora.rank_of(f"layers.{n}.attention.q_proj") for n in (0, 1)] == [8, 2]
    assert lora.rank_of("layers.0.attention.k_proj") == lora.rank_of("head.output") == 0
    assert [lora.scale_of(f"layers.{n}.mlp.down_proj") for n in (0, 1)] == [0.5, 2.0]
    assert LoraConfig(lora_r=4, lora_alpha=8, use_rslora=True).scale_of("layers.0.attention.q_proj") == 4.0
