"""pretrain_gpt.py as a user starts it: under torchrun and alone; what it says, how it fails, how it starts again."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
import time
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
SMALL = (
    "--mock-data --vocab-size 131 --num-layers 2 --hidden-size 40 --num-attention-heads 4 --seq-length 16 --mbs 2 --gbs 8 "
    "--train-iters 4 --log-interval 2 --eval-interval 4 --eval-iters 2 --lr 1e-3 --device cpu"
).split()


def start(*command: str, timeout: float = 120) -> subprocess.CompletedProcess[str]:
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT)}
    return subprocess.run([sys.executable, *command], cwd=ROOT, env=environment, capture_output=True, text=True, timeout=timeout)


def torchrun(num_ranks: int, *command: str) -> subprocess.CompletedProcess[str]:
    return start("-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(num_ranks), *command)


def before_the_launchers_report(text: str) -> str:
    """What the ranks wrote: torchrun's own report begins with its first log line."""
    return re.split(r"(?m)^[WE]\d{4} ", text)[0]


def records(path: Path) -> list[dict]:
    return [json.loads(line) for line in path.read_text().splitlines()]


@pytest.fixture(scope="module")
def parallel_run(tmp_path_factory: pytest.TempPathFactory) -> tuple[subprocess.CompletedProcess[str], Path]:
    save = tmp_path_factory.mktemp("run")
    return torchrun(4, "pretrain_gpt.py", *SMALL, "--tp", "2", "--pp", "2", "--save", str(save)), save


def test_the_log_shows_the_real_loss_from_one_rank_and_no_warning(parallel_run) -> None:
    result, save = parallel_run
    assert result.returncode == 0, result.stderr
    lines = [line for line in result.stderr.splitlines() if "| loss" in line]
    assert [re.search(r"step (\d+)/4", line).group(1) for line in lines] == ["2", "4"]
    losses = [record["loss"] for record in records(save / "metrics.jsonl") if "loss" in record]
    assert len(losses) == 4
    assert f"loss {sum(losses[2:]) / 2:.4f}" in lines[-1]
    assert 4.5 < losses[0] < 5.2, "an untrained model is near log(131) = 4.88"
    assert losses[-1] < losses[0]
    assert result.stderr.count("validation loss") == 1
    assert not re.search(r"warn", result.stdout + result.stderr, re.IGNORECASE), result.stderr


def test_one_rank_without_torchrun_gives_the_same_losses(parallel_run, tmp_path: Path) -> None:
    save = ["--save", str(tmp_path / "new"), "--load", str(tmp_path / "new")]  # the command of the first start is that of a restart
    result = start("pretrain_gpt.py", *SMALL, *save, "--metrics-file", str(tmp_path / "m.jsonl"))
    assert result.returncode == 0, result.stderr
    assert f"{tmp_path / 'new'} holds no checkpoint yet: starting from step 0" in result.stderr
    again = start("pretrain_gpt.py", *SMALL, *save)
    assert again.returncode == 0, again.stderr
    assert "nothing to do: the checkpoint is at step 4 and train_iters is 4" in again.stderr
    expected = records(parallel_run[1] / "metrics.jsonl")
    for mine, other in zip(records(tmp_path / "m.jsonl"), expected, strict=True):
        for key in {"loss", "valid_loss"} & other.keys():
            assert mine[key] == pytest.approx(other[key], rel=1e-5)


def test_the_saved_configuration_starts_the_run_again(parallel_run, tmp_path: Path) -> None:
    result = torchrun(4, "pretrain_gpt.py", "--config", str(parallel_run[1] / "config.toml"), "--save", str(tmp_path / "again"))
    assert result.returncode == 0, result.stderr
    first, again = (records(path / "metrics.jsonl") for path in (parallel_run[1], tmp_path / "again"))
    assert [r.get("loss") for r in first] == [r.get("loss") for r in again]


@pytest.mark.parametrize(("kind", "rank"), [("python", 3), ("user", 0)])
def test_one_ranks_error_ends_all_ranks_at_once_and_is_shown_once(kind: str, rank: int) -> None:
    """Requirement 88: one rank's exception ends all ranks, with the first error."""
    begin = time.monotonic()
    layout = ["--tp", "2", "--pp", "2", "--train-iters", "1000"]
    result = torchrun(4, "tests/training/failing_run.py", str(rank), kind, *SMALL, *layout)
    assert result.returncode != 0
    assert time.monotonic() - begin < 60, "the collective time-out is 10 minutes; the run must not wait for it"
    ours = before_the_launchers_report(result.stderr)
    shown = {"python": "ZeroDivisionError: injected failure", "user": "error: rank 0: injected failure"}[kind]
    assert ours.count(shown) == 1, result.stderr
    assert ours.count("Traceback (most recent call last)") == (1 if kind == "python" else 0), result.stderr
    assert f"rank {rank}" in ours
    assert "step 2" in ours, "the message says what the run was doing"


def test_wrong_settings_are_listed_together_before_any_process_group() -> None:
    result = torchrun(2, "pretrain_gpt.py", *SMALL, "--tp", "3", "--num-query-groups", "3", "--mbs", "3")
    assert result.returncode != 0
    ours = before_the_launchers_report(result.stderr)
    assert ours.count("settings are wrong") == 1, "one rank speaks"
    assert "world size 2" in ours
    assert "num_attention_heads 4" in ours
    assert "global_batch_size 8" in ours or "num_query_groups 3" in ours
    assert "Traceback" not in ours


def test_unknown_flag_is_an_error_with_a_suggestion() -> None:
    result = start("pretrain_gpt.py", "--tensor-model-paralel-size", "2")
    assert result.returncode == 2
    assert "--tensor-model-parallel-size" in result.stderr
    assert "Traceback" not in result.stderr
