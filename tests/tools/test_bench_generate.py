"""tools/bench_generate.py: the parts that need no transformers."""

from __future__ import annotations

import pytest

from tests.generation.helpers import tiny_run, tiny_stage
from tools.bench_generate import bench_steps, reading_speed


@pytest.mark.parametrize("int8", [False, True])
def test_steps_are_measured_against_the_reading_of_all_weights(int8: bool) -> None:
    stage = tiny_stage(tiny_run(max_position_embeddings=64)).eval()
    found = bench_steps(stage, 2, 5, 4, int8=int8, reading=1e9)
    num_bytes = sum(parameter.nbytes for parameter in stage.parameters())
    assert (found["batch"], found["weights"], found["cache"]) == (2, "float32", "int8" if int8 else "float32")
    assert found["of_limit"] == pytest.approx(num_bytes / 1e9 / (found["ms_per_step"] / 1e3), rel=0.1, abs=2e-3)
    assert found["tokens_per_s"] == pytest.approx(2e3 / found["ms_per_step"], rel=0.1)


def test_reading_speed_is_that_of_a_memory() -> None:
    assert 1e8 < reading_speed(4 * 2**20) < 1e13
