"""tools/build_index.py: the run finds its indices built, and what is wrong with its data is said beforehand."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from megalite.cli import read_run_config
from megalite.data import gpt_dataset
from megalite.data.corpora import Corpora
from megalite.data.indexed_writer import IndexedDatasetWriter
from tools.build_index import main

SETTINGS = "--vocab-size 50 --seq-length 4 --train-iters 6 --mbs 2 --eval-interval 3 --eval-iters 1 --split 8,2"


@pytest.fixture
def flags(tmp_path: Path) -> list[str]:
    for name, count in (("a", 20), ("b", 30)):
        with IndexedDatasetWriter(tmp_path / name, "uint16") as writer:
            for n in range(count):
                writer.add_document(range(1, 3 + n % 7))
    path = ["--data-path", "0.25", f"{tmp_path}/a", "0.75", f"{tmp_path}/b", "--data-cache-path", f"{tmp_path}/cache"]
    return [*SETTINGS.split(), *path]


def test_the_run_finds_the_indices_that_were_built(
    flags: list[str], tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Requirement 23: 3 ranks of 2 samples make 36 training samples; the run builds nothing any more."""
    assert main([*flags, "--world-size", "3"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert "train: 36 samples of 4 tokens" in lines
    assert any(line.split()[:2] == ["25.00%", "9"] and line.endswith("/a") for line in lines)
    result = json.loads(lines[-1])
    assert (result["samples"], result["datasets"]) == ({"train": 36, "valid": 7}, 2)  # shares of 6 are rounded up
    built = sorted((tmp_path / "cache").rglob("*"))

    def refuse(*_: object) -> None:
        raise AssertionError("built again")

    monkeypatch.setattr(gpt_dataset, "build_gpt_indices", refuse)
    corpora = Corpora(read_run_config(flags, "prog", ""))
    assert len(corpora.split("train", 36).dataset) == 36
    assert len(corpora.split("valid", 6).dataset) == 7
    assert sorted((tmp_path / "cache").rglob("*")) == built


def test_data_that_cannot_start_a_run_is_named(flags: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    assert main([*flags, "--data-path", "missing"]) == 1
    assert "no such file" in capsys.readouterr().err
    assert main([*flags, "--split", "99,1"]) == 1
    assert "2 of 2 datasets cannot be used" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("extra", "words"),
    [
        (["--world-size", "0"], "number of ranks"),
        (["--world-size"], "number of ranks"),
        (["--gbs", "3"], "not a multiple"),
        (["--split", "0,1"], "leaves no documents for training"),
    ],
)
def test_wrong_settings_are_refused(flags: list[str], extra: list[str], words: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main([*flags, *extra]) == 2
    assert words in capsys.readouterr().err


def test_data_without_files_has_no_indices(capsys: pytest.CaptureFixture[str]) -> None:
    assert main([*SETTINGS.split(), "--mock-data"]) == 2
    assert "no files to index" in capsys.readouterr().err
