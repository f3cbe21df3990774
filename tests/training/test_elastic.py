"""Under `torchrun --max-restarts` a run that loses a rank goes on by itself from its newest checkpoint; the number of ranks is free."""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from megalite.cli import read_run_config
from megalite.testing.parity import build_in_this_world
from megalite.training.loop import train
from tests.ranks import run_ranks
from tests.training.test_launcher import children_of

ROOT = Path(__file__).resolve().parents[2]
STEPS = 24
SETTINGS = (
    "--mock-data --vocab-size 61 --num-layers 2 --hidden-size 32 --num-attention-heads 4 --seq-length 16 --micro-batch-size 2 "
    f"--global-batch-size 8 --lr 1e-3 --device cpu --log-interval 1 --save-interval 2 --train-iters {STEPS}"
).split()


def launch(save: Path, ranks: int, log: Path, *flags: str) -> subprocess.Popen[bytes]:
    launcher = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(ranks), "--max-restarts", "1"]
    command = [*launcher, "pretrain_gpt.py", *SETTINGS, "--save", str(save), "--load", str(save), *flags]
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT)}
    with log.open("wb") as output:
        return subprocess.Popen(command, cwd=ROOT, env=environment, stdout=output, stderr=output)


def losses_in(save: Path) -> dict[int, float]:
    """The last record of every step."""
    records = map(json.loads, (save / "metrics.jsonl").read_text().splitlines())
    return {record["step"]: record["loss"] for record in records if "loss" in record}


def losses_alone() -> dict[int, float]:
    """Of a rank that nobody disturbs."""
    flags = SETTINGS[: SETTINGS.index("--save-interval")]
    run = build_in_this_world(read_run_config([*flags, "--train-iters", str(STEPS)], "test", "").resolve())
    losses = train(run)
    run.metrics.close()
    run.train_loader.close()
    return dict(enumerate(losses, 1))


@pytest.mark.timeout(300)
def test_a_lost_rank_restarts_the_run_and_fewer_ranks_take_it_over(tmp_path: Path) -> None:
    save, log = tmp_path / "save", tmp_path / "log"
    with launch(save, 2, log) as launcher:
        try:
            deadline = time.monotonic() + 100
            while not re.search(r"saved \S*step-0000004", log.read_text()):
                assert launcher.poll() is None and time.monotonic() < deadline, log.read_text()
                time.sleep(0.02)
            os.kill(children_of(launcher.pid)[1], signal.SIGKILL)
            assert launcher.wait(timeout=120) == 0, log.read_text()
        finally:
            launcher.kill()
    text = log.read_text()
    resumed = [int(step) for step in re.findall(r"loaded \S*step-(\d+)", text)]
    assert len(resumed) == 1 and 4 <= resumed[0] < STEPS, text
    both = losses_in(save)
    assert sorted(both) == list(range(1, STEPS + 1))
    (alone,) = run_ranks(losses_alone, 1, timeout=100)
    assert both == pytest.approx(alone, rel=1e-5), "data-parallel ranks are another number, the data is the same"
    with launch(save, 1, log, "--train-iters", str(STEPS + 2)) as launcher:
        assert launcher.wait(timeout=100) == 0, log.read_text()
    assert f"step {STEPS}," in log.read_text() and sorted(losses_in(save)) == list(range(1, STEPS + 3))


OPTIONAL = "apex transformer_engine flash_attn torchao liger_kernel transformers peft tensorboard matplotlib tokenizers sentencepiece"


def test_requirement_89_no_optional_package_is_needed() -> None:
    code = (
        f"import runpy, sys; [sys.modules.__setitem__(name, None) for name in '{OPTIONAL}'.split()]; "
        "sys.argv = sys.argv[1:]; runpy.run_path(sys.argv[0], run_name='__main__')"
    )
    flags = [*SETTINGS, "--train-iters", "2", "--save-interval", "None"]
    command = [sys.executable, "-W", "error::DeprecationWarning", "-c", code, "pretrain_gpt.py", *flags]
    done = subprocess.run(command, cwd=ROOT, env={**os.environ, "OMP_NUM_THREADS": "1"}, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    assert "done: 2 steps" in done.stdout + done.stderr
