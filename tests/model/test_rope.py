"""Rotary positions: golden frequencies, exact far positions, out of reach of casts."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from megalite.data_parallel.shard import shard_stage
from megalite.grid import Grid, GridShape
from megalite.model.block import Pass
from megalite.model.rope import Rotary, Rotation, rotate
from megalite.model.rope_scaling import RopeScaling
from tests.model.helpers import tiny_batch, tiny_config, tiny_stages
from tests.ranks import run_ranks

GOLDEN = Path(__file__).parents[1] / "golden"


CASES = list(json.loads((GOLDEN / "rope_inv_freq.json").read_text()))


@pytest.mark.parametrize("case", CASES, ids=lambda case: case["key"] + " " + case["rope_parameters"]["rope_type"])
def test_requirement_78_scaled_frequencies_are_the_reference_implementation_s(case: dict[str, Any]) -> None:
    settings = dict(case["rope_parameters"])
    kind, base = settings.pop("rope_type"), settings.pop("rope_theta")
    length = settings.pop("original_max_position_embeddings", case["max_position_embeddings"])
    scaling = RopeScaling(kind=kind, factor=settings.pop("factor"), length=length, **settings)
    frequencies = scaling.frequencies(case["head_dim"], base, case["seq_len"] or 1)
    np.testing.assert_allclose(frequencies.numpy(), np.load(GOLDEN / "rope_inv_freq.npz")[case["key"]], rtol=1e-6, atol=0)
    assert scaling.amplitude == pytest.approx(case["attention_factor"], rel=1e-12)


def test_dynamic_scaling_waits_for_long_sequences() -> None:
    rotary = Rotary(8, 10000.0, RopeScaling(kind="dynamic", factor=2.0, length=6))
    plain = Rotary(8, 10000.0)
    short, long = torch.arange(6)[None], torch.arange(9)[None]
    assert torch.equal(rotary(short)[0], plain(short)[0])
    assert not torch.equal(rotary(long)[0], plain(long)[0])
    assert torch.equal(rotary(short, length=9)[0], rotary(long)[0][:6])


@pytest.mark.parametrize("position", [256, 257, 4097, 131071])
def test_far_positions_are_exact(position: int) -> None:
    cos, sin = Rotary(6, 10000.0)(torch.tensor([[position, 1]]))
    assert cos.dtype == sin.dtype == torch.float32
    assert cos.shape == (2, 1, 1, 3)
    for channel in range(3):
        angle = np.float32(position) * (1 / np.float32(10000.0) ** np.float32(channel / 3))
        assert abs(cos[0, 0, 0, channel].item() - np.cos(np.float64(angle))) < 1e-7 * max(1.0, angle)
        assert abs(sin[0, 0, 0, channel].item() - np.sin(np.float64(angle))) < 1e-7 * max(1.0, angle)


def test_rotation_turns_pairs_and_keeps_the_rest() -> None:
    x = torch.randn(4, 2, 3, 10, generator=torch.Generator().manual_seed(1))
    rotation = Rotary(6, 100.0)(torch.tensor([[0, 1, 2, 3], [0, 0, 5, 9]]))
    turned = rotate(x, rotation)
    assert turned.shape == x.shape
    assert torch.equal(turned[..., 6:], x[..., 6:])
    assert torch.equal(turned[0], x[0])  # position 0
    assert torch.equal(turned[1, 1], x[1, 1])
    norms = [y[..., :3].square() + y[..., 3:6].square() for y in (x, turned)]
    torch.testing.assert_close(norms[0], norms[1])
    assert not torch.allclose(turned[3, 1, :, :6], x[3, 1, :, :6])


def test_scores_depend_on_distance_only() -> None:
    generator = torch.Generator().manual_seed(2)
    q, k = torch.randn(1, 1, 1, 8, generator=generator), torch.randn(1, 1, 1, 8, generator=generator)
    rotary = Rotary(8, 10000.0)

    def score(query: int, key: int) -> float:
        turned = rotate(q, rotary(torch.tensor([[query]]))), rotate(k, rotary(torch.tensor([[key]])))
        return (turned[0] * turned[1]).sum().item()

    assert score(7, 3) == pytest.approx(score(307, 303), abs=1e-4)
    assert score(7, 3) != pytest.approx(score(7, 4), abs=1e-4)


def seen_rotations(stage: torch.nn.Module) -> list[tuple[torch.dtype, Rotation]]:
    """Type of the hidden states and rotation of every block, filled as the stage runs."""
    seen: list[tuple[torch.dtype, Rotation]] = []

    def record(_module: torch.nn.Module, args: tuple[torch.Tensor, Pass]) -> None:
        x, shared = args
        assert shared.rotation is not None
        seen.append((x.dtype, shared.rotation))

    for block in stage.get_submodule("layers").children():
        block.register_forward_pre_hook(record)
    return seen


def test_requirement_63_a_bf16_cast_of_the_module_does_not_reach_the_angles() -> None:
    stage, batch = tiny_stages(tiny_config())[0], tiny_batch()
    expected = Rotary(6, 10000.0)(batch.position_ids)
    stage(None, batch)  # fills whatever it may keep
    stage.to(torch.bfloat16)
    assert not list(stage.buffers())
    seen = seen_rotations(stage)
    stage(None, batch)
    assert len(seen) == 5
    for dtype, rotation in seen:
        assert dtype == torch.bfloat16
        assert all(torch.equal(a, b) for a, b in zip(rotation, expected, strict=True))


def rotations_under_fsdp() -> tuple[list[tuple[torch.dtype, Rotation]], torch.dtype]:
    grid = Grid.build(GridShape(dp_shard=torch.distributed.get_world_size()))
    stage = tiny_stages(tiny_config())[0]
    shard_stage(stage, stage.units(), grid, zero=3, compute_dtype=torch.bfloat16, materialize=lambda _prefix, _module: None)
    seen = seen_rotations(stage)
    loss = stage(None, tiny_batch())
    return seen, loss.dtype


def test_requirement_63_mixed_precision_does_not_reach_the_angles() -> None:
    expected = Rotary(6, 10000.0)(tiny_batch().position_ids)
    for seen, loss_dtype in run_ranks(rotations_under_fsdp, 2):
        assert loss_dtype == torch.float32
        assert len(seen) == 5
        for dtype, rotation in seen:
            assert dtype == torch.bfloat16
            assert all(torch.equal(a, b) for a, b in zip(rotation, expected, strict=True))
