"""Who reads which sample: Megatron's assignment, and an order that does not know the layout."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from megalite.data.sampler import global_micro_batch, num_local_micro_batches, step_micro_batches
from megalite.errors import ConfigError

GOLDEN = json.loads((Path(__file__).parents[1] / "golden" / "samplers.json").read_text())["sequential"]


@pytest.mark.parametrize("case", GOLDEN, ids=lambda case: f"dp{case['data_parallel_size']}at{case['consumed_samples']}")
def test_equals_megatron(case: dict[str, Any]) -> None:
    assert case["per_step"]
    for step, per_rank in enumerate(case["per_step"]):
        consumed = case["consumed_samples"] + step * case["global_batch_size"]
        for rank, expected in per_rank.items():
            batches = step_micro_batches(
                consumed,
                global_batch_size=case["global_batch_size"],
                micro_batch_size=case["micro_batch_size"],
                dp_rank=int(rank),
                dp_size=case["data_parallel_size"],
            )
            assert [list(batch.samples) for batch in batches] == expected


@given(st.integers(0, 1000), st.integers(1, 4), st.integers(1, 5), st.integers(1, 6))
def test_every_micro_batch_is_read_once_and_is_the_same_in_every_layout(
    consumed: int, micro_batch_size: int, dp_size: int, num_local: int
) -> None:
    sizes = {"global_batch_size": micro_batch_size * dp_size * num_local, "micro_batch_size": micro_batch_size}
    alone = {batch.index: batch.samples for batch in step_micro_batches(consumed, dp_rank=0, dp_size=1, **sizes)}
    assert [i for k in sorted(alone) for i in alone[k]] == list(range(consumed, consumed + sizes["global_batch_size"]))
    shared = [[*step_micro_batches(consumed, dp_rank=rank, dp_size=dp_size, **sizes)] for rank in range(dp_size)]
    assert {batch.index: batch.samples for batches in shared for batch in batches} == alone
    for rank, batches in enumerate(shared):
        assert [batch.index for batch in batches] == [global_micro_batch(j, rank, dp_size) for j in range(num_local)]


@pytest.mark.parametrize(("gbs", "mbs", "dp"), [(10, 2, 2), (0, 1, 1), (4, 0, 1), (4, 1, 0), (2, 4, 1)])
def test_a_batch_that_cannot_be_shared_is_refused(gbs: int, mbs: int, dp: int) -> None:
    with pytest.raises(ConfigError, match=f"global batch of {gbs} .* micro-batches of {mbs} on {dp} data-parallel"):
        num_local_micro_batches(gbs, mbs, dp)


@pytest.mark.parametrize(("consumed", "rank"), [(0, 2), (0, -1), (-1, 0)])
def test_a_rank_that_does_not_exist_is_refused(consumed: int, rank: int) -> None:
    with pytest.raises(ConfigError, match=f"no data-parallel rank {rank} of 2 after {consumed} samples"):
        step_micro_batches(consumed, global_batch_size=4, micro_batch_size=1, dp_rank=rank, dp_size=2)
