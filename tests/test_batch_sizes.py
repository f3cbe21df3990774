"""The sizes of global batches: Megatron's ramp step by step, and the two directions between steps and samples."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from megalite.batch_sizes import BatchSizes
from megalite.cli import parse_run_config
from megalite.config import RunConfig, TrainConfig
from megalite.errors import ConfigError
from megalite.validate import violations

# made by the num_microbatches_calculator of megatron-core 0.16.1; the second and third ramp need its double precision
GOLDEN = json.loads((Path(__file__).parent / "golden" / "rampup.json").read_text())


@pytest.mark.parametrize("case", GOLDEN, ids=lambda case: "-".join(map(str, case["rampup"])))
def test_equals_megatron(case: dict[str, Any]) -> None:
    sizes = BatchSizes(case["full"], tuple(case["rampup"]))
    assert len(case["consumed_and_size"]) >= 60
    for consumed, size in case["consumed_and_size"]:
        assert sizes.at(consumed) == size, consumed


@settings(deadline=None)
@given(st.integers(1, 5), st.integers(1, 4), st.integers(0, 6), st.integers(1, 200))
def test_steps_and_samples_agree_in_both_directions(start: int, increment: int, num_increments: int, samples: int) -> None:
    sizes = BatchSizes(start + increment * num_increments, (start, increment, samples))
    consumed = 0
    for step in range(300):
        size = sizes.at(consumed)
        assert size in sizes.possible
        assert sizes.consumed_before(step) == consumed
        assert {sizes.step_of(sample) for sample in range(consumed, consumed + size)} == {step}
        if step % 50 == 0:
            assert sizes.num_steps(0, consumed + size - 1) == step
        consumed += size
    assert sizes.at(consumed + samples) == sizes.full


def test_without_a_ramp_every_step_is_full() -> None:
    sizes = BatchSizes(6)
    assert [sizes.at(consumed) for consumed in (0, 6, 7)] == [6, 6, 6]
    assert (sizes.consumed_before(4), sizes.step_of(23), sizes.step_of(24), sizes.possible) == (24, 3, 4, [6])
    assert (sizes.num_steps(5, 17), sizes.num_steps(5, 16), sizes.num_steps(30, 16)) == (2, 1, 0)


@pytest.mark.parametrize(
    ("rampup", "words"),
    [
        ((4, 4), ["has 2 numbers", "three", "START INCREMENT SAMPLES"]),
        ((0, 4, 10), ["rampup_batch_size 0 4 10", "1 or more"]),
        ((4, 0, 10), ["rampup_batch_size 4 0 10", "1 or more"]),
        ((28, 4, 10), ["starts at 28", "global_batch_size 24"]),
        ((4, 8, 10), ["4 8 10", "24", "reach 20 and 28"]),
        ((6, 6, 10), ["6, 18", "micro_batch_size x data-parallel size = 4"]),
    ],
)
def test_a_ramp_that_cannot_be_is_refused_with_the_numbers(rampup: tuple[int, ...], words: list[str]) -> None:
    config = RunConfig(train=TrainConfig(global_batch_size=24, micro_batch_size=2, rampup_batch_size=rampup))
    found = [text for text in violations(config, 2) if "rampup" in text]
    assert len(found) == 1
    assert all(word in found[0] for word in words), found[0]
    with pytest.raises(ConfigError):
        config.all_num_microbatches(2)


def test_the_flag_is_megatrons_and_counts_the_samples_of_the_run() -> None:
    config = parse_run_config("--mbs 2 --gbs 12 --rampup-batch-size 4 4 20 --train-iters 6".split(), prog="p", description="")
    assert config.train.rampup_batch_size == (4, 4, 20)
    assert config.all_num_microbatches(2) == [1, 2, 3]
    assert config.num_samples(12) == {"train": 4 + 4 + 4 + 8 + 12 + 12}
    assert RunConfig.from_toml(config.to_toml()) == config


def test_every_size_must_suit_the_schedule() -> None:
    flags = "--mock-data --vocab-size 8 --pp 2 --vpp 2 --num-layers 4 --mbs 1 --gbs 8 --rampup-batch-size 1 1 20"
    (found,) = violations(parse_run_config(flags.split(), prog="p", description=""), 2)
    assert "got 1 for 2 ranks" in found
