"""Hostile corpora and sudden deaths, a few of each; the programs in tests/ run thousands."""

from __future__ import annotations

import os
from contextlib import nullcontext
from dataclasses import replace
from pathlib import Path

import pytest

from megalite.data.dataset_meta import read_meta
from megalite.data.indexed import IndexedDataset
from megalite.data.indexed_writer import IndexedDatasetWriter
from megalite.data.inspection import verify
from megalite.data.preprocess import PreprocessOptions, preprocess
from megalite.data.tokenizer import TokenizerSpec
from tests.fuzz_preprocess import judge, run_cases
from tests.kill_preprocess import run


def test_hostile_corpora() -> None:
    """Requirements 1 to 8: the right dataset or one clear error (`tests/fuzz_preprocess.py --cases 10000` runs more)."""
    counts = run_cases(300, seed=1_000_000)
    assert counts["dataset"] > 50
    assert counts["error"] > 50


def test_the_judge_knows_right_from_wrong() -> None:
    corpus = (
        b'\xef\xbb\xbf{"text": "a\xe2\x80\xa8b"}\r\n\n{"text": ["", "c"]}\n{"text": 1}\n{"text": "\\ud800"}\n{"x": 1e999}\n{"a": "b"} {}'
    )
    expected = judge(corpus, ("text",))
    assert expected.documents == [[["a\u2028b"]], [["c"]]]
    assert expected.bad_lines == [4, 5, 6, 7]


class Killed(BaseException):
    """Ends a run like a signal that nobody can handle: nothing is cleaned up (`abort` is switched off with it)."""


@pytest.mark.parametrize("had_old", [False, True])
def test_death_between_any_two_renames(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, had_old: bool) -> None:
    """With two keys, files get their names in six steps; after any of them each dataset is complete, or it is absent."""
    (tmp_path / "in.jsonl").write_text('{"text": "new text", "b": "new b"}\n')
    (tmp_path / "old.jsonl").write_text('{"text": "old", "b": "o"}\n')
    options = PreprocessOptions((str(tmp_path / "in.jsonl"),), str(tmp_path / "x"), TokenizerSpec("bytes"), ("text", "b"))
    rename = os.replace
    complete = []
    for step in range(7):
        if had_old:
            preprocess(replace(options, inputs=(str(tmp_path / "old.jsonl"),)))
        steps = iter([rename] * step)

        def rename_or_die(source, target, steps=steps):
            return next(steps, die)(source, target)

        with monkeypatch.context() as patch:
            patch.setattr(os, "replace", rename_or_die)
            patch.setattr(IndexedDatasetWriter, "abort", lambda _: None)
            with pytest.raises(Killed) if step < 6 else nullcontext():
                preprocess(options)
        found = list(tmp_path.glob("x_*.idx"))
        complete.append(len(found))
        for path in found:
            prefix = path.with_suffix("")
            assert verify(IndexedDataset(prefix), read_meta(prefix)).problems == []
            path.unlink()
        preprocess(options)  # meets the left-overs
        assert not list(tmp_path.glob("*.tmp.*"))
        for path in tmp_path.glob("x_*"):
            path.unlink()
    assert complete == ([1, 1, 1, 1, 1, 1, 2] if had_old else [0, 0, 0, 1, 1, 1, 2])


def die(*_: object) -> None:
    raise Killed


@pytest.mark.timeout(120)
def test_killed_runs_leave_complete_datasets_or_none() -> None:
    """Requirement 10, for the run itself (`tests/kill_preprocess.py --kills 50` kills more often)."""
    figures = run(num_kills=3, seed=5, num_lines=800)
    assert figures["problems"] == []
    assert figures["running"]
