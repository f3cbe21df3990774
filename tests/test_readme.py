"""Every command in the README and in the examples is run here, or named with the reason why not.

examples/finetune.sh: takes a minute; its commands are those of the README's section on fine-tuning.
"""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[1]
BIN = Path(sys.executable).parent
ELSEWHERE = {
    "make test": "is what runs this",
    "make lint": "test_lint_is_clean runs its commands",
    "make demo": "test_demo_trains_and_writes runs examples/demo.sh for fewer steps",
    "make bench": "test_benchmark_runs runs it with a model of no size",
}


def readme_commands() -> list[str]:
    blocks = re.findall(r"```bash\n(.*?)```", (ROOT / "README.md").read_text(), re.DOTALL)
    lines = [line.split("  #")[0].strip() for block in blocks for line in block.splitlines()]
    return [line for line in lines if line]


def run(command: str | list[str], folder: Path, timeout: float = 580) -> subprocess.CompletedProcess[str]:
    environment = {**os.environ, "PATH": f"{BIN}:{os.environ['PATH']}", "OMP_NUM_THREADS": "1"}
    shell = isinstance(command, str)
    result = subprocess.run(command, cwd=folder, env=environment, shell=shell, capture_output=True, text=True, timeout=timeout)
    assert result.returncode == 0, f"{command}\n{result.stdout}\n{result.stderr}"
    return result


@pytest.fixture(scope="module")
def checkout(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder that looks like the project, for commands that write below it."""
    folder = tmp_path_factory.mktemp("checkout")
    for name in ("tools", "examples", "tests", "pretrain_gpt.py"):
        (folder / name).symlink_to(ROOT / name)
    return folder


@pytest.mark.parametrize("command", [command for command in readme_commands() if command not in ELSEWHERE])
def test_readme_command_runs(command: str, checkout: Path) -> None:
    """In the order of the README, in one folder: later commands use what earlier ones wrote."""
    output = run(command, checkout)
    assert not re.search(r"warning", output.stdout + output.stderr, re.IGNORECASE), output.stderr


def test_the_readmes_run_was_saved(checkout: Path) -> None:
    assert (checkout / "runs/small/loss.png").stat().st_size > 0
    assert (checkout / "runs/small/latest").read_text().strip() == "step-0000030"


def test_exceptions_are_in_the_readme() -> None:
    assert set(ELSEWHERE) <= set(readme_commands())


def test_lint_is_clean() -> None:
    makefile = (ROOT / "Makefile").read_text()
    lint = makefile.split("\nlint: venv\n")[1].split("\n\n")[0]
    commands = [line.strip().removeprefix("@").replace("$(BIN)", str(BIN)) for line in lint.splitlines()]
    assert len(commands) == 3
    for command in commands:
        run(command, ROOT)


def test_demo_trains_and_writes(tmp_path: Path) -> None:
    out = tmp_path / "demo"
    result = run(
        [
            str(ROOT / "examples/demo.sh"),
            str(out),
            "--train-iters",
            "6",
            "--lr-warmup-iters",
            "2",
            "--eval-interval",
            "3",
            "--eval-iters",
            "1",
        ],
        ROOT,
    )
    assert (out / "loss.png").stat().st_size > 0
    assert "HAMLET." in result.stdout
    assert "validation loss" in result.stderr
    assert not re.search(r"warning", result.stdout + result.stderr, re.IGNORECASE), result.stderr


def test_char_gpt_example_runs(tmp_path: Path) -> None:
    out = tmp_path / "char"
    result = run([str(ROOT / "examples/char_gpt.sh"), str(out), "--train-iters", "4", "--lr-warmup-iters", "1", "--eval-iters", "2"], ROOT)
    assert "validation loss" in result.stderr


def test_benchmark_runs(checkout: Path) -> None:
    result = run("python tools/bench_train.py --rounds 1 --steps 1 --tiny", checkout)
    assert '"speed_ratio"' in result.stdout.splitlines()[-1]


def test_pipeline_benchmark_runs(checkout: Path) -> None:
    result = run("python tools/bench_pipeline.py --schedules zb-v --rounds 1 --tiny", checkout)
    assert '"makespan_over_predicted"' in result.stdout.splitlines()[-1]
