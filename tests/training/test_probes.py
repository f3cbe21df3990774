"""Probes of two layouts agree tensor by tensor, and of a damaged run the first wrong tensor is named. Part of requirement 90."""

from __future__ import annotations

import json
import math
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from megalite.config import RunConfig
from megalite.errors import ConfigError
from megalite.testing.layouts import Layout
from megalite.testing.parity import build_in_this_world, tiny_config
from megalite.training.loop import train
from megalite.training.probes import Probes
from megalite.validate import violations
from tests.ranks import run_ranks
from tools import compare_runs

LAYOUTS = [
    Layout(tp=2, pp=2, schedule="zb-h1", sequence_parallel=True),
    Layout(dp=2, zero=3),
    Layout(pp=2, dp=2, zero=1, schedule="interleaved-1f1b"),
]


def config_with(folder: Path, micro_batch_size: int = 2) -> RunConfig:
    config = tiny_config()
    return replace(
        config,
        model=replace(config.model, num_layers=4),
        train=replace(config.train, micro_batch_size=micro_batch_size, global_batch_size=8, train_iters=2),
        output=replace(config.output, probe_dir=str(folder), probe_steps=(1, 2)),
    )


def enlarge(_module: torch.nn.Module, _args: Any, out: Any) -> Any:
    return out * 1.001


def probed(config: RunConfig, layout: Layout, damage: str | None = None) -> None:
    """Train with probes. damage: a layer whose mlp gives a thousandth too much."""
    run = build_in_this_world(layout.apply(config).resolve())
    for stage in run.stages.values():
        if damage is not None and damage in stage.layers:
            stage.layers[damage].get_submodule("mlp").register_forward_hook(enlarge)
    train(run)
    run.metrics.close()
    run.train_loader.close()


@pytest.fixture(scope="module")
def alone(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("alone")
    run_ranks(probed, 1, config_with(folder), Layout(), timeout=60)
    return folder


def figures(capsys: pytest.CaptureFixture[str], *arguments: Any) -> tuple[int, dict[str, Any], str]:
    code = compare_runs.main([str(argument) for argument in arguments])
    out = capsys.readouterr().out
    return code, json.loads(out.splitlines()[-1]), out


@pytest.mark.parametrize("layout", LAYOUTS, ids=str)
def test_layouts_compute_the_same_tensors(layout: Layout, alone: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    run_ranks(probed, layout.world_size, config_with(tmp_path, 1 if layout.dp == 2 else 2), layout, timeout=90)
    code, found, out = figures(capsys, alone, tmp_path)
    assert code == 0, out
    parts = 1 + 3 * 4
    parameters = 3 + 4 * 9
    assert found["equal"] + found["within_tolerance"] == 2 * (parts + 1 + parts + 2 * parameters)
    assert found["equal"] > 0


def test_the_first_wrong_tensor_is_named(alone: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    layout = Layout(tp=2, pp=2, sequence_parallel=True)
    run_ranks(probed, layout.world_size, config_with(tmp_path), layout, "2", timeout=90)
    code, found, out = figures(capsys, alone, tmp_path, "--tolerance", 1e-5)
    assert (code, found["first"]) == (1, "forward layers.2.mlp in step 1"), out
    assert out.splitlines()[1].split()[:2] == ["forward", "layers.2.mlp"]


def test_recomputed_and_equal_runs_give_the_same_files(alone: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    config = config_with(tmp_path)
    config = replace(config, memory=replace(config.memory, recompute_granularity="full"))
    run_ranks(probed, 1, config, Layout(), timeout=60)
    code, found, out = figures(capsys, alone, tmp_path, "--tolerance", 0)
    assert (code, found["different"], found["within_tolerance"]) == (0, 0, 0), out


def test_what_cannot_be_compared_is_said(alone: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert compare_runs.main([str(alone), str(tmp_path / "nowhere")]) == 2
    assert "is no folder" in capsys.readouterr().err
    assert compare_runs.main([str(alone), str(tmp_path)]) == 2
    assert "there is no common one" in capsys.readouterr().err
    with pytest.raises(Exception, match="holds probes of an earlier run"):
        run_ranks(probed, 1, config_with(alone), Layout(), timeout=60)
    step = tmp_path / "step-0000001"
    step.mkdir()
    (step / "rank-0000.safetensors").write_bytes(b"no tensors")
    assert compare_runs.main([str(alone), str(tmp_path)]) == 2
    assert "cannot be read" in capsys.readouterr().err


def test_tensors_come_in_the_order_of_the_computation() -> None:
    names = ["embedding", "layers.0.attention", "layers.0.mlp", "layers.0", "layers.10.attention", "loss"]
    assert compare_runs.in_order({f"forward/{name}" for name in names}) == [f"forward/{name}" for name in names]
    backward = [f"backward/{name}" for name in reversed(names[:-1])]
    assert compare_runs.in_order({*backward, "gradient/x"}) == [*backward, "gradient/x"]


def test_what_is_not_finite_on_one_side_differs_whatever_the_other_samples_are() -> None:
    one, nan, infinite = (torch.tensor([1.0, value]) for value in (1.0, math.nan, math.inf))
    for bad in (nan, infinite):
        found = compare_runs._difference("forward", "x", [("0", bad, one), ("1", one, one)])
        assert (found.relative, found.where) == (math.inf, "0")
        assert compare_runs._difference("forward", "x", [("0", bad, bad), ("1", one, one)]).relative == 0


def test_tensors_that_are_zero_but_for_rounding_agree_within_an_absolute_tolerance(capsys: pytest.CaptureFixture[str]) -> None:
    noise = compare_runs._difference("gradient", "x", [("all", torch.tensor([1e-9]), torch.tensor([-1e-9]))])
    assert compare_runs.report([noise], 1e-4, 0.0, 10) == [noise]
    assert compare_runs.report([noise], 1e-4, 1e-8, 10) == []
    missing = compare_runs.Compared("gradient", "x", math.inf, math.inf, "", "not in the second run")
    assert compare_runs.report([missing], math.inf, math.inf, 10) == [missing]


def test_a_run_that_restarts_itself_writes_its_steps_anew(tmp_path: Path) -> None:
    config = config_with(tmp_path)
    (tmp_path / "step-0000002").mkdir()
    (tmp_path / "step-0000002" / "rank-0007.safetensors").touch()
    grid = SimpleNamespace(world=SimpleNamespace(is_first=True))
    with pytest.raises(ConfigError, match="holds probes of an earlier run"):
        Probes(tmp_path, (2,), {}, grid)  # pyright: ignore[reportArgumentType]
    Probes(tmp_path, (2,), {}, grid, replaces=True)  # pyright: ignore[reportArgumentType]
    assert not (tmp_path / "step-0000002").exists()
    wrong = replace(config, output=replace(config.output, probe_steps=(2, 3)))
    assert any("probe_steps [3]" in line for line in violations(wrong.resolve(), 1))
    nowhere = replace(config, output=replace(config.output, probe_dir=None))
    assert any("no folder to write to" in line for line in violations(nowhere.resolve(), 1))
