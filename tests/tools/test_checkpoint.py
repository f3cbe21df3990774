"""tools/checkpoint.py on small checkpoints: what it says, its last line of JSON, and its exit codes."""

from __future__ import annotations

import json
import shutil
from collections.abc import Mapping
from pathlib import Path

import pytest
import torch
from torch import Tensor

from megalite.checkpoint import Manifest, complete_checkpoints, load_tensors, read_manifest, save_checkpoint, step_directory
from megalite.checkpoint.store import describe
from megalite.checkpoint.whole_model import load_model
from megalite.errors import CheckpointError
from megalite.grid import Axis
from tests.generation.helpers import save_stage, tiny_run, tiny_stage
from tools.checkpoint import main

pytestmark = pytest.mark.filterwarnings("ignore:torch.distributed is disabled")
ONE = Axis.single("world")


def values(seed: int = 0) -> dict[str, Tensor]:
    generator = torch.Generator().manual_seed(seed)
    sizes = {"model.layers.2.w": (5, 3), "model.layers.10.w": (5, 3), "optimizer.layers.2.w.exp_avg": (5, 3)}
    return {name: torch.randn(shape, generator=generator) for name, shape in sizes.items()}


def save(folder: Path, step: int, tensors: Mapping[str, Tensor], **model: object) -> Path:
    named = {name: describe(tensor) for name, tensor in tensors.items()}
    config = {"model": {"hidden_size": 3, **model}}
    return save_checkpoint(folder, tensors, Manifest(step=step, consumed_samples=8 * step, config=config, tensors=named), ONE)


def run(capsys: pytest.CaptureFixture[str], *arguments: object) -> tuple[int, str, dict]:
    """Exit code, all output, and the last line's figures."""
    code = main([str(argument) for argument in arguments])
    out, err = capsys.readouterr()
    assert "Traceback" not in err
    return code, out + err, json.loads(out.splitlines()[-1]) if out else {}


def test_inspect_says_what_a_checkpoint_holds(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = save(tmp_path, 3, values())
    code, text, figures = run(capsys, "inspect", tmp_path, "--values")
    assert code == 0
    assert figures == {"checkpoint": str(path), "step": 3, "consumed_samples": 24, "tensors": 3, "weights": 30, "made_of": []}
    assert "hidden_size 3" in text and read_manifest(path).tensors["model.layers.2.w"]["hash"] in text and "rms" in text


def test_diff_of_equal_checkpoints_reads_nothing(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    a, b = save(tmp_path / "a", 3, values()), save(tmp_path / "b", 4, values())
    assert run(capsys, "diff", a, b, "--read-all")[0] == 0
    monkeypatch.setattr("megalite.checkpoint.reading.dcp.load", None)
    code, text, figures = run(capsys, "diff", a, b)
    assert (code, figures["equal"]) == (0, True) and "all tensors are equal" in text


def test_diff_names_every_kind_of_difference_with_its_size(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    tensors = values()
    a = save(tmp_path / "a", 3, {**tensors, "model.only_a": torch.ones(2), "model.cut": torch.ones(4), "model.type": torch.ones(4)})
    changed = tensors["model.layers.10.w"].clone()
    changed[4, 2] += 0.5
    others = {"model.only_b": torch.ones(2), "model.cut": torch.ones(5), "model.type": torch.ones(4, dtype=torch.bfloat16)}
    b = save(tmp_path / "b", 3, {**tensors, **others, "model.layers.10.w": changed})
    code, text, figures = run(capsys, "diff", a, b)
    assert code == 1
    assert {key: figures[key] for key in ("missing", "extra", "shape", "dtype", "content")} == dict.fromkeys(
        ("missing", "extra", "shape", "dtype", "content"), 1
    )
    assert figures["max_abs"] == pytest.approx(0.5)
    largest = max(float(changed.abs().max()), float(tensors["model.layers.10.w"].abs().max()))
    assert figures["max_relative"] == pytest.approx(0.5 / largest, rel=1e-5)
    assert "1 elements" in text and "[4] and [5]" in text and "float32 and bfloat16" in text
    assert "model.layers.2.w" not in text


def test_diff_works_on_checkpoints_of_before_there_were_hashes(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    tensors = values()
    tensors["model.layers.2.w"][0, 0] = torch.nan
    a, b = save(tmp_path / "a", 3, tensors), save(tmp_path / "b", 3, tensors)
    manifest = json.loads((a / "manifest.json").read_text())
    for facts in manifest["tensors"].values():
        del facts["hash"]
    (a / "manifest.json").write_text(json.dumps(manifest))
    assert run(capsys, "diff", a, b)[0] == 0, "a NaN equals itself"
    tensors["model.layers.2.w"][0, 0] = 1.0
    code, _, figures = run(capsys, "diff", a, save(tmp_path / "c", 3, tensors))
    assert (code, figures["content"], figures["max_abs"]) == (1, 1, None), "and is infinitely far from a number"
    assert run(capsys, "verify", a)[2] == {"checkpoints": 1, "damaged": 0, "hashes_compared": 0}


def test_verify_names_files_and_tensors_that_are_not_as_written(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    good, bad, wrong = (save(tmp_path, step, values(step)) for step in (1, 2, 3))
    assert run(capsys, "verify", tmp_path)[2] == {"checkpoints": 3, "damaged": 0, "hashes_compared": 9}
    file = next(bad.glob("*.distcp"))
    data = bytearray(file.read_bytes())
    data[len(data) // 2] ^= 1
    file.write_bytes(data)
    manifest = json.loads((wrong / "manifest.json").read_text())
    manifest["tensors"]["model.layers.2.w"]["hash"] = "0" * 16
    (wrong / "manifest.json").write_text(json.dumps(manifest))
    code, text, figures = run(capsys, "verify", tmp_path)
    assert (code, figures["damaged"]) == (1, 2)
    assert f"the bytes of {file.name} are not the ones that were written" in text
    assert "model.layers.2.w has the content hash" in text
    assert f"{good}: as written (3 tensors, 3 of them compared with a hash)" in text
    assert run(capsys, "verify", wrong, "--files-only")[0] == 0


def test_every_lost_file_is_noticed(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = save(tmp_path / "whole", 1, values())
    for number, name in enumerate(sorted(file.name for file in path.iterdir())):
        copy = tmp_path / str(number) / path.name
        shutil.copytree(path, copy)
        (copy / name).unlink()
        code, text, _ = run(capsys, "verify", copy.parent)
        assert code == 1 and name in text


def test_average_is_the_mean_of_the_weights_and_loads(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    config = tiny_run()
    stages = [tiny_stage(config, seed) for seed in (1, 2, 3)]
    sources = []
    for number, stage in enumerate(stages):
        made = save_stage(tmp_path / "made", stage, config)
        sources.append(step_directory(tmp_path / "run", number + 7))
        shutil.copytree(made, sources[-1])
        manifest = json.loads((sources[-1] / "manifest.json").read_text())
        (sources[-1] / "manifest.json").write_text(json.dumps({**manifest, "step": number + 7}))
    code, text, figures = run(capsys, "average", tmp_path / "run", "--last", 2, "--out", tmp_path / "out")
    assert code == 0 and "--load-weights-only" in text
    assert figures["made_of"] == [str(path) for path in sources[1:]]
    loaded, stored = load_model(tmp_path / "out")
    assert stored == config
    for name, mean in loaded.named_parameters():
        first, second = (dict(stage.named_parameters())[name] for stage in stages[1:])
        assert torch.equal(mean, (first + second) / 2), name
    assert run(capsys, "verify", tmp_path / "out")[2] == {
        "checkpoints": 1,
        "damaged": 0,
        "hashes_compared": len(list(loaded.parameters())),
    }
    assert run(capsys, "average", *sources, "--out", tmp_path / "all")[2]["made_of"] == [str(path) for path in sources]


def load_everything(path: Path) -> str:
    try:
        load_tensors(path, values(), pp=Axis.single("pp"), world=ONE)
    except CheckpointError as error:
        return str(error)
    return "loaded"


def test_an_average_resumed_as_a_run_says_what_to_do(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    a, b = save(tmp_path, 1, values(1)), save(tmp_path, 2, values(2))
    written = Path(run(capsys, "average", a, b, "--out", tmp_path / "out")[2]["checkpoint"])
    assert "optimizer.layers.2.w.exp_avg" not in read_manifest(written).tensors
    assert load_everything(written).endswith(
        "holds no optimizer state: --load-weights-only takes the weights and starts with a fresh optimizer"
    )


def test_average_refuses_before_it_writes(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    a, other = save(tmp_path / "run", 1, values(1)), save(tmp_path / "other", 2, values(2), hidden_size=4)
    b = save(tmp_path / "run", 2, values(2))
    damaged = save(tmp_path / "damaged", 3, values(3))
    file = next(damaged.glob("*.distcp"))
    file.write_bytes(b"\0" + file.read_bytes()[1:])
    out = tmp_path / "out"
    for arguments, words in (
        ((a, "--out", out), "two different checkpoints or more"),
        ((a, a, "--out", out), "two different checkpoints or more"),
        ((a, other, "--out", out), "model setting hidden_size is 3 and 4"),
        ((a, damaged, "--out", out), "are not the ones that were written"),
        ((tmp_path / "run", "--last", 3, "--out", out), "holds 2 complete checkpoints, --last asks for 3"),
        ((tmp_path / "run", "--last", 1, "--out", out), "K at least 2"),
        ((a, b, "--out", tmp_path / "run"), "give --out another path"),
        ((a, tmp_path / "nowhere", "--out", out), "not a directory"),
    ):
        code, text, _ = run(capsys, "average", *arguments)
        assert code == 2 and words in text, words
        assert not out.exists()


def test_prune_only_says_what_it_would_do_until_it_is_told_yes(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for step in range(1, 7):
        save(tmp_path, step, values(step))
    (tmp_path / "step-0000006" / "manifest.json").unlink()  # incomplete: neither counted nor deleted
    arguments = ("prune", tmp_path, "--keep-last", 1, "--keep-every", 3)
    code, text, figures = run(capsys, *arguments)
    assert (code, figures["deleted"]) == (0, False) and "--yes" in text
    assert figures["expendable"] == ["step-0000001", "step-0000002", "step-0000004"]
    assert len(complete_checkpoints(tmp_path)) == 5
    assert run(capsys, *arguments, "--yes")[2]["deleted"] is True
    assert sorted(path.name for path in tmp_path.glob("step-*")) == ["step-0000003", "step-0000005", "step-0000006"]
    code, text, _ = run(capsys, "prune", tmp_path, "--keep-last", 0, "--keep-every", -1)
    assert code == 2 and "--keep-last is 0" in text and "--keep-every is -1" in text


def test_reshard_says_that_it_is_not_needed(capsys: pytest.CaptureFixture[str]) -> None:
    code, text, figures = run(capsys, "reshard", "somewhere", "--tp", 2)
    assert (code, figures) == (0, {"needed": False}) and "--load" in text


@pytest.mark.parametrize("command", ["inspect", "verify", "diff", "prune"])
def test_what_is_no_checkpoint_is_an_error_in_words(command: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    more = {"diff": [tmp_path], "prune": ["--keep-last", 1]}.get(command, [])
    for place in (tmp_path, tmp_path / "nothing"):
        code, text, figures = run(capsys, command, place, *more)
        assert code == 2 and text.startswith("error: ") and figures == {}
