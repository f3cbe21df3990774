"""Bytes of states against the formulas and examples of the ZeRO paper and others (sources in the tests)."""

from __future__ import annotations

from dataclasses import replace

import pytest

from megalite.planner.states import ParameterShape, Sharding, state_memory

ONE = Sharding(zero=0, dp_shard=1, dp_replicate=1, compute_itemsize=4, reduce_itemsize=4)
UNITS = [ParameterShape(unit=f"layer {i}", shape=(960, 40), state_itemsize=8.0) for i in range(5)]
NUMEL = 5 * 960 * 40


def states(sharding: Sharding) -> int:
    found = state_memory(UNITS, sharding)
    return found.weights + found.gradients + found.optimizer


def test_fp32_adam_takes_16_bytes_per_parameter() -> None:
    found = state_memory(UNITS, ONE)
    assert states(ONE) == 16 * NUMEL
    assert found.gathered == found.buffers == found.waiting == 0


@pytest.mark.parametrize("ranks", [1, 2, 4, 8])
def test_zero_3_divides_everything(ranks: int) -> None:
    assert states(replace(ONE, zero=3, dp_shard=ranks)) == 16 * NUMEL // ranks


@pytest.mark.parametrize("ranks", [2, 4, 8])
def test_zero_1_and_2_keep_gathered_weights(ranks: int) -> None:
    """Rajbhandari et al. 2020, figure 1, in 16-bit computation: the gathered weights are the 2 bytes that are not divided; ZeRO 1 adds
    up whole fp32 gradients before it cuts them."""
    half = Sharding(zero=2, dp_shard=ranks, dp_replicate=1, compute_itemsize=2, reduce_itemsize=4)
    two, one = state_memory(UNITS, half), state_memory(UNITS, replace(half, zero=1))
    assert two.gathered == 2 * NUMEL
    assert states(half) + two.gathered == (2 + 16 / ranks) * NUMEL
    assert one.gradients + one.waiting == 4 * NUMEL
    assert one.weights == two.weights


def test_zero_3_gathers_two_units_at_a_time() -> None:
    found = state_memory(UNITS, Sharding(zero=3, dp_shard=4, dp_replicate=1, compute_itemsize=2, reduce_itemsize=4))
    assert found.gathered == 2 * 2 * 960 * 40


def test_slices_of_odd_sizes_are_those_of_the_fullest_rank() -> None:
    odd = [ParameterShape(unit="norm", shape=(7,), state_itemsize=8.0)]
    assert state_memory(odd, replace(ONE, zero=3, dp_shard=3)).weights == 4 * 3
    assert state_memory(odd, replace(ONE, zero=3, dp_shard=16)).weights == 4 * 1


def test_frozen_parameters_have_weights_only() -> None:
    frozen = [replace(shape, is_trained=False) for shape in UNITS]
    found = state_memory(frozen, ONE)
    assert (found.weights, found.gradients, found.optimizer) == (4 * NUMEL, 0, 0)


def test_published_example_of_zero() -> None:
    """7.5 billion parameters, 64 ranks: 120, 31.4, 16.6 and 1.9 GB with 16 bytes per parameter, of which 2 are 16-bit weights and 2
    16-bit gradients. Ours with fp32 masters only, ZeRO 3: the same 1.9 GB."""
    parameters = [ParameterShape(unit=f"{i}", shape=(75_000, 1000), state_itemsize=8.0) for i in range(100)]
    three = state_memory(parameters, Sharding(zero=3, dp_shard=64, dp_replicate=1, compute_itemsize=2, reduce_itemsize=4))
    assert (three.weights + three.gradients + three.optimizer) / 1e9 == pytest.approx(1.9, rel=0.02)
    assert states(ONE) / NUMEL * 7.5 == pytest.approx(120)


def test_published_difference_between_8_and_128_ranks() -> None:
    """torchtitan's Llama 3 8B with full sharding: 15.4 and 15.0 GiB less on 128 GPUs than on 8 (its docs, December 2024)."""
    parameters = [ParameterShape(unit=f"{i}", shape=(16_384, 4096), state_itemsize=8.0) for i in range(120)]
    total = sum(parameter.numel for parameter in parameters)
    bytes_of = {
        ranks: state_memory(parameters, Sharding(zero=3, dp_shard=ranks, dp_replicate=1, compute_itemsize=2, reduce_itemsize=4))
        for ranks in (8, 128)
    }
    eight, many = (found.weights + found.gradients + found.optimizer for found in bytes_of.values())
    assert (eight - many) * 8.03e9 / total / 2**30 == pytest.approx(15.2, rel=0.1)
