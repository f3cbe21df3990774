"""Requirements 71 and 88: a run that is killed inside a save, wholly or in one rank, ends, and resumes from the last announced checkpoint.

`tools/chaos.py` does this 60 times; these are its first kills, and what it would say of a run that breaks the promise.
"""

from __future__ import annotations

import json
import random
from pathlib import Path

from tools.chaos import STEPS, Chaos, read_losses, run, wrong_losses


def test_requirement_71_killed_runs_resume_without_losing_anything() -> None:
    figures = run(num_kills=2, seed=1)
    assert figures["problems"] == []
    assert (figures["in_save"], figures["one_rank"], figures["all_ranks"]) == (1, 1, 1)
    assert isinstance(figures["lives"], int) and figures["lives"] > 2, "two that were killed and one that ended"


def write_metrics(save: Path, losses: dict[int, float]) -> None:
    save.mkdir(parents=True, exist_ok=True)
    lines = [json.dumps({"step": step, "loss": loss}) for step, loss in losses.items()]
    (save / "metrics.jsonl").write_text("\n".join([*lines, '{"step": 9, "lo']))


def test_one_other_bit_of_a_loss_is_noticed_and_a_torn_line_is_not(tmp_path: Path) -> None:
    write_metrics(tmp_path, {1: 4.25, 2: 4.0})
    assert read_losses(tmp_path) == [(1, 4.25), (2, 4.0)]
    assert wrong_losses(tmp_path, {1: 4.25, 2: 4.0}) == []
    assert wrong_losses(tmp_path, {1: 4.25, 2: 4.000000000000001}) == ["losses of steps [2] are not the undisturbed run's"]
    assert read_losses(tmp_path / "nowhere") == []


class DeadRanks:
    """A run that has ended with the given output."""

    def __init__(self, text: str) -> None:
        self.text = text

    def output(self) -> str:
        return self.text


def test_a_lost_checkpoint_and_a_wrong_resume_are_problems(tmp_path: Path) -> None:
    losses = dict.fromkeys(range(1, STEPS + 1), 1.0)
    chaos = Chaos(tmp_path, losses, [], random.Random(0), duration=1.0, expected=3)
    assert chaos.end_life(DeadRanks("loaded /x/step-0000003: step 3\nsaved /x/step-0000006\n")) == [  # type: ignore[arg-type]
        "step 6 was announced, the newest complete checkpoint is 0"
    ]
    chaos.announced, chaos.expected = 0, 6
    assert chaos.end_life(DeadRanks("loaded /x/step-0000003: step 3\n")) == ["resumed at [3] instead of step 6"]  # type: ignore[arg-type]
    chaos.expected = 6
    text = "step 1/24 | 8 samples"
    assert chaos.end_life(DeadRanks(text)) == ["resumed at the beginning instead of step 6"]  # type: ignore[arg-type]
