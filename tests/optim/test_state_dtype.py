"""State in bf16 and on the host: one arithmetic, and checkpoints that load into either format."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
import torch
import torch.distributed.checkpoint as dcp
from torch.distributed.tensor import DTensor

from megalite.config import OptimConfig, RunConfig
from megalite.optim import Optimizer, groups
from megalite.optim.optimizer import _on_host
from megalite.testing.layouts import Layout
from megalite.testing.parity import build_in_this_world, tiny_config
from megalite.training.checkpoints import load_run, save_run
from megalite.training.loop import train_step
from tests.data_parallel import toy
from tests.optim.test_skip import set_grads
from tests.ranks import run_ranks

RATES = [0.01, 0.03, 0.02]


@pytest.mark.parametrize(("first", "second"), [("bf16", "fp32"), ("fp32", "bf16"), ("bf16", "bf16")])
def test_arithmetic_is_fp32_and_only_the_kept_moments_are_rounded(first: str, second: str) -> None:
    """Bit for bit torch's AdamW whose moments are rounded to bf16 and back after each step."""
    stage, twin = toy.build_plain(), toy.build_plain()
    config = OptimConfig(exp_avg_dtype=first, exp_avg_sq_dtype=second, weight_decay=0.0)
    optimizer = Optimizer(toy.collect_parameters([stage]), config)
    reference = torch.optim.AdamW(twin.parameters(), betas=(0.9, 0.95), weight_decay=0.0, fused=True)
    for step, lr in enumerate(RATES):
        set_grads(stage, step)
        set_grads(twin, step)
        optimizer.step(lr)
        reference.param_groups[0]["lr"] = lr
        reference.step()
        for moments in reference.state.values():
            for name, dtype in (("exp_avg", first), ("exp_avg_sq", second)):
                moments[name].copy_(moments[name].to(groups.DTYPES[dtype]))
    assert all(found.equal(expected) for found, expected in zip(stage.parameters(), twin.parameters(), strict=True))
    for moments in optimizer.named_state().values():
        assert (moments["exp_avg"].dtype, moments["exp_avg_sq"].dtype) == (groups.DTYPES[first], groups.DTYPES[second])


@pytest.mark.parametrize("optimizer", ["adam", "sgd", "muon"])
def test_state_goes_through_the_device_in_pieces_with_the_same_bits(optimizer: str, monkeypatch: pytest.MonkeyPatch) -> None:
    results = []
    for piece in (10**9, 100):
        monkeypatch.setattr(groups, "STREAMED", piece)
        stage = toy.build_plain()
        optim = Optimizer(toy.collect_parameters([stage]), OptimConfig(optimizer=optimizer, exp_avg_dtype="bf16"))  # type: ignore[arg-type]
        for step, lr in enumerate(RATES):
            set_grads(stage, step)
            optim.step(lr)
        results.append([parameter.detach().clone() for parameter in stage.parameters()])
    assert all(a.equal(b) for a, b in zip(*results, strict=True))


def test_offload_has_no_effect_on_a_cpu() -> None:
    results = []
    for offload in (False, True):
        stage = toy.build_plain()
        optimizer = Optimizer(toy.collect_parameters([stage]), OptimConfig(optimizer_cpu_offload=offload))
        set_grads(stage, 0)
        optimizer.step(0.1)
        results.append([parameter.detach().clone() for parameter in stage.parameters()])
        assert all(entry.state[name] is used for entry, used, name in handed_out(optimizer))
    assert all(a.equal(b) for a, b in zip(*results, strict=True))


def handed_out(optimizer: Optimizer):
    """(entry, moment that an update works on, name) of every moment."""
    for entries, moments in groups.streamed(optimizer._entries, ("exp_avg", "exp_avg_sq")):
        for name, tensors in moments.items():
            yield from ((entry, used, name) for entry, used in zip(entries, tensors, strict=True))


def host_state(folder: str) -> list[bool]:
    """State on another device than the mesh: named tensors that share its storage, and save and load like others."""
    parameters = toy.parameters_of(toy.build(toy.grid_of(dp_shard=2, tp=2), 3))
    parameter = next(p for p in parameters if p.name == "layers.0.down")
    assert isinstance(parameter.parameter, DTensor)
    kept, again = (torch.full(parameter.local.shape, value, dtype=torch.bfloat16) for value in (3.0, 0.0))
    saved, loaded = _on_host(parameter.parameter, kept), _on_host(parameter.parameter, again)
    dcp.save({"x": saved}, checkpoint_id=folder)
    dcp.load({"x": loaded}, checkpoint_id=folder)
    same = saved.shape == parameter.parameter.shape and saved.placements == parameter.parameter.placements
    return [same, saved.dtype == torch.bfloat16, saved.to_local().data_ptr() == kept.data_ptr(), again.equal(kept)]


def test_state_on_another_device_keeps_its_placements(tmp_path: Path) -> None:
    assert run_ranks(host_state, 4, str(tmp_path / "x")) == [[True] * 4] * 4


def with_state(dtype: str, folder: str) -> RunConfig:
    config = tiny_config()
    return replace(
        config,
        model=replace(config.model, num_layers=1),
        optim=replace(config.optim, optimizer="muon", exp_avg_dtype=dtype, exp_avg_sq_dtype=dtype),
        output=replace(config.output, save=folder),
    ).resolve()


def save_and_load(folder: str, first: str, second: str, layouts: tuple[Layout, Layout]) -> bool:
    """Train two steps with one format, go on with another in another layout; whether the moments are the saved ones."""
    run = build_in_this_world(layouts[0].apply(with_state(first, folder)))
    for _ in range(2):
        train_step(run)
    save_run(run)
    run.train_loader.close()
    other = build_in_this_world(layouts[1].apply(with_state(second, folder)))
    load_run(other, Path(folder))
    found, expected = other.optimizer.named_state(), run.optimizer.named_state()
    same = all(
        toy.full(tensor).equal(toy.full(expected[name][key]).to(tensor.dtype)) and bool(toy.full(tensor).any())
        for name, moments in found.items()
        for key, tensor in moments.items()
    )
    train_step(other)
    other.train_loader.close()
    return same


@pytest.mark.parametrize(("first", "second"), [("bf16", "bf16"), ("fp32", "bf16"), ("bf16", "fp32")])
def test_checkpoints_keep_the_format_and_load_into_the_configured_one(tmp_path: Path, first: str, second: str) -> None:
    layouts = (Layout(dp=2, zero=3), Layout(dp=2, zero=3) if first != second else Layout(tp=2))
    assert run_ranks(save_and_load, 2, str(tmp_path), first, second, layouts) == [True, True]
