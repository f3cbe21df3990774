"""Which checkpoints are deleted, and that an interrupted deletion leaves nothing that looks whole."""

from __future__ import annotations

from pathlib import Path

import pytest

from megalite.checkpoint import Manifest, complete_checkpoints, expendable, prune, step_directory, step_of


def checkpoints(folder: Path, steps: list[int]) -> None:
    for step in steps:
        step_directory(folder, step).mkdir(parents=True)
        text = Manifest(step=step, consumed_samples=1, config={}, tensors={}).to_json()
        (step_directory(folder, step) / "manifest.json").write_text(text)


@pytest.mark.parametrize(
    ("keep_last", "keep_every", "gone"),
    [(1, None, [10, 20, 30, 40]), (3, None, [10, 20]), (2, 20, [10, 30]), (1, 7, [10, 20, 30, 40]), (9, None, [])],
)
def test_the_newest_and_the_multiples_stay(tmp_path: Path, keep_last: int, keep_every: int | None, gone: list[int]) -> None:
    checkpoints(tmp_path, [10, 20, 30, 40, 50])
    assert [step_of(path) for path in expendable(tmp_path, keep_last, keep_every)] == gone
    assert [step_of(path) for path in prune(tmp_path, keep_last, keep_every)] == gone
    left = sorted({10, 20, 30, 40, 50} - set(gone))
    assert sorted(path.name for path in tmp_path.iterdir()) == [step_directory(tmp_path, step).name for step in left]


def test_incomplete_checkpoints_do_not_count(tmp_path: Path) -> None:
    checkpoints(tmp_path, [1, 2, 3])
    (step_directory(tmp_path, 3) / "manifest.json").unlink()
    assert [step_of(path) for path in prune(tmp_path, 1)] == [1]
    assert [step_of(path) for path in complete_checkpoints(tmp_path)] == [2]
    assert step_directory(tmp_path, 3).exists()


def test_a_deletion_that_was_interrupted_is_invisible_and_is_made_up_for(tmp_path: Path) -> None:
    checkpoints(tmp_path, [1, 2])
    half = tmp_path / ".step-0000001.deleted"
    half.mkdir()
    (half / "manifest.json").write_text("{}")
    assert [step_of(path) for path in complete_checkpoints(tmp_path)] == [2, 1]
    prune(tmp_path, 1)
    assert [path.name for path in tmp_path.iterdir()] == ["step-0000002"]
