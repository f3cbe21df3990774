"""Settings of recomputation that cannot work or would be ignored, each with its numbers and remedy."""

from __future__ import annotations

from dataclasses import replace

import pytest

from megalite.config_numerics import MemoryConfig
from megalite.testing.layouts import Layout
from megalite.testing.parity import tiny_config
from megalite.validate import violations


def found(memory: MemoryConfig, pp: int = 1) -> list[str]:
    return violations(Layout(pp=pp).apply(replace(tiny_config(), memory=memory)), pp)


@pytest.mark.parametrize(
    "memory",
    [
        MemoryConfig(recompute_granularity="selective"),
        MemoryConfig(recompute_granularity="selective", recompute_modules=("mlp_act", "norm")),
        MemoryConfig(recompute_granularity="full", recompute_num_layers=5, cpu_offloading=True),
    ],
)
def test_sound_settings(memory: MemoryConfig) -> None:
    assert found(memory, pp=2) == []


@pytest.mark.parametrize(
    ("memory", "words"),
    [
        (MemoryConfig(recompute_granularity="selective", recompute_modules=("norm", "moe")), ["'moe'", "core_attn, norm"]),
        (MemoryConfig(recompute_granularity="selective", recompute_modules=()), ["empty", "core_attn"]),
        (MemoryConfig(recompute_granularity="full", recompute_modules=("norm",)), ["granularity full", "selective"]),
        (MemoryConfig(recompute_num_layers=1), ["recompute_num_layers 1", "--recompute-granularity"]),
        (MemoryConfig(recompute_granularity="full", recompute_num_layers=6), ["is 6", "1 to 5"]),
    ],
)
def test_one_mistake_is_one_sentence(memory: MemoryConfig, words: list[str]) -> None:
    (sentence,) = found(memory, pp=2)
    assert all(word in sentence for word in words), sentence


def test_all_mistakes_come_at_once() -> None:
    assert len(found(MemoryConfig(recompute_modules=("nrom",), recompute_num_layers=3))) == 3
