"""Every named schedule trains the same model with the same bits: alone, with tp 2, with ZeRO 3, and with an odd number of micro-batches."""

from __future__ import annotations

from dataclasses import replace
from functools import cache

import pytest

from megalite.config import RunConfig
from megalite.pipeline.schedules import SCHEDULES
from megalite.testing.layouts import Layout
from megalite.testing.parity import TrainedCase, bitwise_differences, problems, tiny_config, train_case
from tests.ranks import run_ranks

REFERENCE = "gpipe"
OTHERS = [name for name in SCHEDULES if name != REFERENCE]
CASES = {  # layout without its schedule, micro-batches per step
    "p 2, m 4, tp 2": (Layout(pp=2, tp=2, sequence_parallel=True), 4),
    "p 4, m 8": (Layout(pp=4), 8),
    "p 2, m 4, zero 3": (Layout(pp=2, dp=2, zero=3), 4),
    "p 2, m 5, zero 2, tied": (Layout(pp=2, dp=2, zero=2, tied=True), 5),
}


def config_for(layout: Layout, num_microbatches: int) -> RunConfig:
    config = tiny_config()
    train = replace(config.train, global_batch_size=num_microbatches * config.train.micro_batch_size * layout.dp, train_iters=2)
    return replace(config, model=replace(config.model, num_layers=8, hidden_dropout=0.1), train=train)


@cache
def trained(case: str, schedule: str) -> TrainedCase:
    layout, num_microbatches = CASES[case]
    layout = replace(layout, schedule=schedule)
    return run_ranks(train_case, layout.world_size, config_for(layout, num_microbatches), layout, timeout=120)[0]


@pytest.mark.parametrize("schedule", OTHERS)
@pytest.mark.parametrize("case", CASES)
def test_every_schedule_gives_the_same_bits(case: str, schedule: str) -> None:
    layout, num_microbatches = CASES[case]
    layout = replace(layout, schedule=schedule)
    impossible = problems(config_for(layout, num_microbatches), layout)
    if impossible:
        assert schedule == "interleaved-1f1b" or "micro-batches" in impossible[0], impossible
        pytest.skip(impossible[0])
    assert bitwise_differences(trained(case, schedule), trained(case, REFERENCE)) == []
