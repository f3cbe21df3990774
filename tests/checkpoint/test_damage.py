"""Whatever happens to the files of a checkpoint, loading it is refused in words, on every rank, or takes an older one."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

from megalite.checkpoint import Manifest, find_checkpoint, load_tensors, newest_checkpoint, read_manifest, save_checkpoint
from megalite.checkpoint.store import describe, step_directory
from megalite.errors import CheckpointError
from megalite.grid import Grid, GridShape
from tests.ranks import run_ranks

DATA = "__1_0.distcp"


def tensors(rank: int) -> dict[str, torch.Tensor]:
    """What a pipeline rank holds; 257 numbers make a file with a middle that is all values."""
    return {f"model.{rank}": torch.arange(257.0) + rank, f"optimizer.{rank}.exp_avg": torch.zeros(3)}


def save_two(folder: Path) -> None:
    """Steps 9999999 and 10000000, in a world of two pipeline ranks."""
    grid = Grid.build(GridShape(pp=2))
    named = {name: describe(tensor) for rank in range(2) for name, tensor in tensors(rank).items()}
    for step in (9_999_999, 10_000_000):
        save_checkpoint(folder, tensors(dist.get_rank()), Manifest(step=step, consumed_samples=8, config={}, tensors=named), grid.world)


def load_each(folders: list[Path]) -> list[str]:
    """What loading each checkpoint says; "loaded" where it says nothing. In every rank."""
    grid, said = Grid.build(GridShape(pp=2)), []
    for folder in folders:
        target = {name: torch.full_like(tensor, -1.0) for name, tensor in tensors(grid.rank).items()}
        try:
            load_tensors(find_checkpoint(folder, grid.world), target, pp=grid.pp, world=grid.world)
            assert all(torch.equal(target[name], tensor) for name, tensor in tensors(grid.rank).items())
            said.append("loaded")
        except CheckpointError as error:
            said.append(str(error))
    return said


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("saved")
    run_ranks(save_two, 2, folder)
    return folder


def cut(path: Path, size: int) -> None:
    path.write_bytes(path.read_bytes()[:size])


def flip_a_bit(path: Path) -> None:
    data = bytearray(path.read_bytes())
    data[len(data) // 2] ^= 4
    path.write_bytes(bytes(data))


def edit(**changes: Any) -> Callable[[Path], None]:
    def change(folder: Path) -> None:
        values = json.loads((folder / "manifest.json").read_text())
        (folder / "manifest.json").write_text(json.dumps({**values, **changes}))

    return change


DAMAGES: dict[str, tuple[Callable[[Path], object], str]] = {
    "data cut short": (lambda folder: cut(folder / DATA, 500), f"{DATA} has 500 bytes, "),
    "data empty": (lambda folder: cut(folder / DATA, 0), f"{DATA} has 0 bytes, "),
    "data missing": (lambda folder: (folder / DATA).unlink(), f"{DATA} is missing"),
    "data changed": (lambda folder: flip_a_bit(folder / DATA), f"the bytes of {DATA} are not the ones that were written"),
    "metadata cut short": (lambda folder: cut(folder / ".metadata", 100), ".metadata has 100 bytes, "),
    "metadata missing": (lambda folder: (folder / ".metadata").unlink(), ".metadata is missing"),
    "manifest cut short": (lambda folder: cut(folder / "manifest.json", 60), "manifest.json cannot be read"),
    "manifest no text": (lambda folder: (folder / "manifest.json").write_bytes(b"\xff\x00"), "manifest.json cannot be read"),
    "manifest missing": (lambda folder: (folder / "manifest.json").unlink(), "is not a complete checkpoint: it has no manifest.json"),
    "manifest of the future": (edit(format_version=2), "format version 2"),
    "unknown entry": (edit(colour=1), "'colour'"),
    "step as text": (edit(step="3"), "step is '3', a whole number"),
    "negative step": (edit(step=-1), "step is -1, a whole number"),
    "half a sample": (edit(consumed_samples=3.5), "consumed_samples is 3.5"),
    "tensors in a list": (edit(tensors=[]), "tensors is not a table"),
    "a number for a tensor": (edit(tensors={"model.0": 3}), "tensors: model.0 has not the entries dtype and shape"),
    "files without sizes": (edit(files={DATA: {}}), f"files: {DATA} has not the entries crc32 and size"),
    "no configuration": (edit(config=None), "config is not a table"),
    "fewer tensors": (edit(tensors={}), "model.0: missing from the checkpoint"),
}


def test_damage_is_refused_in_words_on_every_rank(saved: Path, tmp_path: Path) -> None:
    original = step_directory(saved, 10_000_000)
    folders = [tmp_path / str(number) for number in range(len(DAMAGES) + 1)]
    for folder, damage in zip(folders, [*(damage for damage, _ in DAMAGES.values()), lambda _: None], strict=True):
        shutil.copytree(original, folder)
        damage(folder)
    ranks = run_ranks(load_each, 2, folders)
    for name, (_, words), *said in zip(DAMAGES, DAMAGES.values(), *ranks, strict=False):
        for text in said:
            assert words in text, (name, text)
            assert "Traceback" not in text
            assert len(text) < 500, (name, text)
    assert [said[-1] for said in ranks] == ["loaded", "loaded"], "the copy without damage"


@pytest.mark.parametrize("name", ["data cut short", "metadata missing", "manifest missing", "step as text"])
def test_an_incomplete_newest_checkpoint_is_passed_over(saved: Path, tmp_path: Path, name: str) -> None:
    shutil.copytree(saved, tmp_path, dirs_exist_ok=True)
    assert newest_checkpoint(tmp_path).name == "step-10000000", "ten million is more than 9999999"
    DAMAGES[name][0](step_directory(tmp_path, 10_000_000))
    assert newest_checkpoint(tmp_path).name == "step-9999999"


@pytest.mark.parametrize("latest", [None, "step-0000001\n", ""])
def test_a_wrong_pointer_does_not_hide_a_checkpoint(saved: Path, tmp_path: Path, latest: str | None) -> None:
    shutil.copytree(saved, tmp_path, dirs_exist_ok=True)
    (tmp_path / "latest").unlink()
    if latest is not None:
        (tmp_path / "latest").write_text(latest)
    assert newest_checkpoint(tmp_path).name == "step-10000000"


def test_a_checkpoint_without_file_facts_still_loads(saved: Path, tmp_path: Path) -> None:
    """Those of before the manifest had them."""
    old = tmp_path / "old"
    shutil.copytree(step_directory(saved, 10_000_000), old)
    edit(files={})(old)
    assert read_manifest(old).files == {}
    assert run_ranks(load_each, 2, [old]) == [["loaded"], ["loaded"]]
