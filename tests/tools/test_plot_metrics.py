"""tools/plot_metrics.py on small files: what counts, what is drawn, what is refused."""

from __future__ import annotations

import json
import math
import os
import subprocess
import sys
from pathlib import Path

import pytest

from tools.plot_metrics import main, read_history, run_names, smoothed, text_curve

ROOT = Path(__file__).resolve().parents[2]


def write_run(path: Path, records: list[dict], tail: str = "") -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text("".join(json.dumps(record) + "\n" for record in records) + tail)
    return path


def falling(steps: int, start: float = 6.0) -> list[dict]:
    records: list[dict] = []
    for step in range(1, steps + 1):
        records.append({"step": step, "loss": start / step, "lr": 1e-3 / step, "grad_norm": 1.0})
        if step % 5 == 0:
            records.append({"step": step, "valid_loss": 1 + start / step})
    return records


def summary_of(capsys: pytest.CaptureFixture[str], *arguments: object) -> tuple[str, dict]:
    """What was printed before the last line, and the last line's object."""
    assert main([*map(str, arguments)]) == 0
    out, err = capsys.readouterr()
    assert err == ""
    lines = out.splitlines()
    return "\n".join(lines[:-1]), json.loads(lines[-1])


def test_the_last_record_of_a_step_counts(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """A run to step 6 that was resumed from step 4."""
    resumed = [{"step": 5, "loss": 0.5, "lr": 9.0}, {"step": 5, "valid_loss": 0.75}, {"step": 6, "loss": 0.25}]
    file = write_run(tmp_path / "metrics.jsonl", falling(6) + resumed)
    history = read_history(file, "x")
    assert history.loss == {1: 6.0, 2: 3.0, 3: 2.0, 4: 1.5, 5: 0.5, 6: 0.25}
    assert history.valid_loss == {5: 0.75}
    assert history.lr[5] == 9.0
    _, summary = summary_of(capsys, file)
    expected = {"run": tmp_path.name, "steps": 6, "train_loss": 0.25, "valid_loss": 0.75, "best_valid_loss": 0.75}
    assert summary == {"runs": [expected], "output": None}


def test_steps_are_sorted(tmp_path: Path) -> None:
    file = write_run(tmp_path / "a.jsonl", [{"step": step, "loss": float(step)} for step in (7, 9, 3)])
    assert list(read_history(file, "a").loss.items()) == [(3, 3.0), (7, 7.0), (9, 9.0)]


@pytest.mark.parametrize("suffix", ["png", "svg"])
def test_pictures_of_several_runs(suffix: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    files = [write_run(tmp_path / name / "metrics.jsonl", falling(12 + 5 * len(name))) for name in ("a", "bb")]
    picture = tmp_path / "new" / f"loss.{suffix}"
    _, summary = summary_of(capsys, *files, "--output", picture)
    assert [run["run"] for run in summary["runs"]] == ["a", "bb"]
    assert [run["steps"] for run in summary["runs"]] == [17, 22]
    content = picture.read_bytes()
    if suffix == "png":
        assert content.startswith(b"\x89PNG")
    else:
        text = content.decode()
        for words in ("a: training", "a: validation", "bb: training", "bb: validation", "learning rate"):
            assert f"<!-- {words} -->" in text


def test_the_same_file_gives_the_same_picture(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file = write_run(tmp_path / "metrics.jsonl", falling(9))
    for name in ("a.png", "b.png"):
        summary_of(capsys, file, "--output", tmp_path / name)
    assert (tmp_path / "a.png").read_bytes() == (tmp_path / "b.png").read_bytes()


def test_text(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    text, _ = summary_of(capsys, write_run(tmp_path / "r.jsonl", falling(10)), "--text")
    lines = text.splitlines()
    assert lines[0] == "r: training loss"
    assert lines[1].startswith("    6.000 │█")
    assert lines[8] == "    0.600 │█████▆▄▃▂▁"
    assert lines[10].split() == ["step", "1", "10"]
    assert lines[12] == "r: validation loss 2.200 █▁ 1.600 (steps 5 to 10)"


@pytest.mark.parametrize("values", [[2.0], [2.0, 2.0, 2.0], [3.0, math.nan, 1.0, math.inf], [1.0] * 500])
def test_text_curves_of_odd_series(values: list[float]) -> None:
    lines = text_curve(dict(enumerate(values)), width=20).splitlines()
    assert len(lines) == 10
    assert len({len(line) for line in lines[:8]}) == 1
    assert all(line.endswith(("█", "▁")) for line in lines[7:8])
    assert text_curve({1: math.nan}) == "(nothing finite)"


def test_columns_are_means_of_equal_shares() -> None:
    """Six steps in three columns: means 9, 5 and 1 of 9 to 1 are full, half and lowest."""
    series = dict(zip(range(6), [10.0, 8.0, 6.0, 4.0, 2.0, 0.0], strict=True))
    assert text_curve(series, width=3, height=1) == "9.000 █▅▁ 1.000 (steps 0 to 5)"


def test_smoothing() -> None:
    assert smoothed([5.0, 5.0, 5.0, 5.0], 3) == [5.0] * 4
    assert smoothed([9.0, 6.0, 3.0, 0.0, 3.0], 3) == [9.0, 6.0, 3.0, 2.0, 1.5]  # the start is not pulled down
    assert smoothed([4.0, math.nan, 2.0], 3) == [4.0, 3.0, 2.0]
    assert math.isnan(smoothed([math.nan, 1.0], 3)[0])
    assert smoothed([4.0, 1.0], 1) == [4.0, 1.0]


def test_losses_that_are_not_finite(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    records = [{"step": 1, "loss": 3.0, "lr": 0.1}, {"step": 2, "loss": math.nan, "lr": 0.1}]
    file = write_run(tmp_path / "r.jsonl", [*records, {"step": 2, "valid_loss": math.inf}])
    _, summary = summary_of(capsys, file, "--output", tmp_path / "p.png", "--text")
    assert summary["runs"][0]["train_loss"] is None
    assert summary["runs"][0]["valid_loss"] is None


def test_a_line_being_written_is_left_out(tmp_path: Path) -> None:
    file = write_run(tmp_path / "r.jsonl", falling(3), tail='{"step": 4, "lo')
    assert list(read_history(file, "r").loss) == [1, 2, 3]


def test_names_of_runs() -> None:
    paths = [Path("runs/a/metrics.jsonl"), Path("old.jsonl")]
    assert run_names(paths) == ["a", "old"]
    clash = [Path("x/a/metrics.jsonl"), Path("y/a/metrics.jsonl")]
    assert run_names(clash) == ["x/a", "y/a"]


def test_a_run_s_folder_means_its_metrics(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    write_run(tmp_path / "a" / "metrics.jsonl", falling(3))
    assert main([str(tmp_path / "a")]) == 0
    assert json.loads(capsys.readouterr().out)["runs"][0]["run"] == "a"


@pytest.mark.parametrize(
    ("content", "options", "words"),
    [
        (None, [], "cannot read"),
        ("", [], "records no loss"),
        ('{"step": 1, "loss": 2.0}\n{"step": 2, "loss"\n{"step": 3, "loss": 2.0}\n', [], "r.jsonl:2 is no record"),
        ('{"loss": 2.0}\n', [], "r.jsonl:1 is no record of a step: KeyError('step')"),
        ('{"step": 1.5, "loss": 2.0}\n', [], "step 1.5 is no whole number"),
        ('{"step": 1, "loss": "low"}\n', [], "r.jsonl:1 is no record"),
        ("[1]\n", [], "r.jsonl:1 is no record"),
        ('{"step": 1, "loss": 2.0}\n', ["--output", "loss.gif"], "must end in one of .png .svg .pdf"),
        ('{"step": 1, "loss": 2.0}\n', ["--smooth", "0"], "--smooth is 0"),
    ],
)
def test_errors(content: str | None, options: list[str], words: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file = tmp_path / "r.jsonl"
    if content is not None:
        file.write_text(content)
    assert main([str(file), *options]) == 1
    out, err = capsys.readouterr()
    assert out == ""
    assert err.startswith("error: ")
    assert err.count("\n") == 1
    assert words in err


def test_as_a_program_without_warnings(tmp_path: Path) -> None:
    file = write_run(tmp_path / "metrics.jsonl", falling(30))
    command = [sys.executable, "-W", "error", "tools/plot_metrics.py", file, "--output", tmp_path / "l.png", "--text"]
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    done = subprocess.run([*map(str, command)], cwd=ROOT, env=environment, capture_output=True, timeout=120, check=False)
    assert done.returncode == 0, done.stderr.decode()
    assert done.stderr == b""
    assert json.loads(done.stdout.decode().splitlines()[-1])["runs"][0]["train_loss"] == 0.2
