"""Recomputation changes no bit of training: kinds of schedules, tp, ZeRO 0 to 3, bf16, clipping, dropout."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import replace

import pytest
import torch

from megalite.config import RunConfig
from megalite.config_numerics import MemoryConfig
from megalite.testing.layouts import Layout
from megalite.testing.parity import TrainedCase, bitwise_differences, build_in_this_world, tiny_config, train_case
from megalite.training.loop import train_step
from tests.data_parallel.test_collectives import Collectives
from tests.ranks import run_ranks

FULL = MemoryConfig(recompute_granularity="full")
OUTPUTS = MemoryConfig(recompute_granularity="selective", recompute_modules=("norm", "core_attn", "mlp_act"))
PARTS = MemoryConfig(recompute_granularity="selective", recompute_modules=("attention", "norm", "mlp"), recompute_num_layers=1)
NONE = MemoryConfig()


def config_for(memory: MemoryConfig, dp: int = 1, precision: str = "fp32") -> RunConfig:
    """4 blocks, dropout everywhere, 4 micro-batches of 2 samples per data-parallel rank, a clipping norm that clips."""
    config = tiny_config()
    model = replace(config.model, num_layers=4, hidden_dropout=0.1, attention_dropout=0.1)
    train = replace(config.train, global_batch_size=8 * dp, train_iters=2)
    numerics = replace(config.numerics, precision=precision)
    return replace(config, model=model, train=train, memory=memory, numerics=numerics, optim=replace(config.optim, clip_grad=0.1))


def train_all(cases: Sequence[tuple[RunConfig, Layout]]) -> list[TrainedCase | None]:
    return [train_case(config, layout) for config, layout in cases]


def assert_same_bits(cases: Sequence[tuple[RunConfig, Layout]]) -> None:
    """The first is the reference."""
    reference, *others = run_ranks(train_all, cases[0][1].world_size, cases, timeout=120)[0]
    assert min(reference.grad_norms) > 0.1
    for (config, layout), case in zip(cases[1:], others, strict=True):
        assert bitwise_differences(case, reference) == [], (str(layout), config.memory)


def test_every_kind_of_schedule() -> None:
    """Whole and split backwards, one chunk per rank and two; that the schedules agree without recomputation is another test."""
    runs = [
        (NONE, "gpipe"),
        (FULL, "1f1b"),
        (FULL, "interleaved-1f1b"),
        (FULL, "zb-h1"),
        (FULL, "zb-v"),
        (PARTS, "zb-h1"),
        (OUTPUTS, "zb-v"),
    ]
    assert_same_bits([(config_for(memory), Layout(pp=2, schedule=schedule)) for memory, schedule in runs])


def test_tensor_parallelism_and_a_split_backward() -> None:
    layout = Layout(tp=2, pp=2, sequence_parallel=True, tied=True, schedule="zb-h1")
    assert_same_bits([(config_for(memory), layout) for memory in (NONE, FULL, OUTPUTS)])


@pytest.mark.parametrize("zero", [0, 1, 2, 3])
def test_sharded_data_parallelism(zero: int) -> None:
    precision, memories = ("bf16", (NONE, FULL, OUTPUTS)) if zero == 3 else ("fp32", (NONE, FULL))
    assert_same_bits([(config_for(memory, 2, precision), Layout(dp=2, zero=zero, tied=True)) for memory in memories])


def test_sharded_data_parallelism_and_a_split_backward() -> None:
    layout = Layout(pp=2, dp=2, zero=3, schedule="zb-h1")
    assert_same_bits([(config_for(memory, 2, "bf16"), layout) for memory in (NONE, FULL, PARTS)])


def collectives_of_a_step(memory: MemoryConfig) -> Counter:
    run = build_in_this_world(Layout(dp=2, zero=3).apply(config_for(memory, 2)).resolve())
    train_step(run)
    with Collectives() as counted:
        train_step(run)
    run.train_loader.close()
    return counted.found


def test_parameters_are_not_gathered_once_more() -> None:
    """With ZeRO 3 the block's backward has gathered them before the region runs again."""
    expected = run_ranks(collectives_of_a_step, 2, NONE)[0]
    assert expected["all_gather", torch.float32] > 2 * 4
    assert run_ranks(collectives_of_a_step, 2, FULL)[0] == expected
