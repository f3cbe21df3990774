"""A run that stands still is ended, with the name of the rank that the others wait for."""

from __future__ import annotations

import os
import signal
import time
from collections import deque
from collections.abc import Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch.distributed as dist

from megalite.config import RunConfig
from megalite.config_io import assign
from megalite.grid import Progress
from megalite.testing.program import ProgramRanks
from megalite.training.blame import MOST_LINES, Entry, blame, table
from megalite.training.launch import FAILURES, Launch
from megalite.training.watchdog import PATIENCE, Watchdog, limit_s
from megalite.validate_training import output_violations
from tests.training.test_launcher import ENDLESS, ROOT, wait_until

STALE = 5.0


def entry(step: int = 7, quiet_s: float = 20.0, is_waiting: bool = True, is_finished: bool = False) -> Entry:
    return Entry(
        host="a",
        step=step,
        doing=f"step {step + 1}",
        comm="recv over pp",
        where="x.py:1 in f",
        is_waiting=is_waiting,
        quiet_s=quiet_s,
        limit_s=10.0,
        is_finished=is_finished,
    )


def blamed(entries: Sequence[Entry | None], ages: Sequence[float] | None = None) -> tuple[int, ...]:
    return blame(dict(enumerate(entries)), dict(enumerate(ages or [0.0] * len(entries))), STALE).ranks


def test_ranks_that_say_nothing_are_blamed_before_all_others() -> None:
    entries = [entry(), entry(step=3), entry(step=9), entry(is_waiting=False)]
    assert blamed(entries, [0.0, 1.0, 6.0, 0.0]) == (2,)
    assert blamed(entries, [7.0, 1.0, 6.0, 0.0]) == (0, 2)
    assert blamed(entries, [5.0, 0.0, 0.0, 0.0]) == (3,), "the age must be above the limit"
    assert blamed([entry(), None], [0.0, 6.0]) == (1,), "it has never said anything"


def test_a_rank_that_has_finished_is_never_blamed() -> None:
    assert blamed([entry(step=3, is_finished=True), entry(step=9)], [100.0, 0.0]) == (1,)


def test_a_rank_that_waits_for_nobody_is_blamed_before_one_that_is_behind() -> None:
    assert blamed([entry(step=3), entry(step=9, is_waiting=False), entry(step=9)]) == (1,)
    found = blame({0: entry(), 1: entry(is_waiting=False)}, {0: 0.0, 1: 0.0}, STALE)
    assert found.reason == "it waits for no other rank: step 8, at x.py:1 in f"


def test_of_ranks_that_all_wait_the_one_behind_is_blamed_then_the_quietest() -> None:
    assert blamed([entry(), entry(step=6, quiet_s=11.0), entry(quiet_s=50.0)]) == (1,)
    assert blamed([entry(), entry(quiet_s=20.5), entry(quiet_s=20.1)]) == (1,)
    assert blamed([entry(), entry()]) == (0,)


def test_the_table_begins_with_the_blamed_rank_and_ends_for_big_worlds() -> None:
    number = MOST_LINES + 4
    lines = table(dict.fromkeys(range(number), entry()), dict.fromkeys(range(number), 0.0), (17,)).splitlines()
    assert lines[0].startswith("  rank 17: a, 7 steps made, step 8, last collective recv over pp, waits, at x.py:1 in f")
    assert (len(lines), lines[-1]) == (MOST_LINES + 1, "  and 4 more ranks")


def test_entries_come_back_from_their_text() -> None:
    assert Entry.from_json(entry().to_json().encode()) == entry()


def test_the_limit_follows_the_median_step_and_long_work() -> None:
    assert limit_s(10.0, deque(), False) == 10.0
    assert limit_s(10.0, deque([1.0, 1.0, 100.0]), False) == 10.0
    assert limit_s(10.0, deque([4.0, 3.0, 100.0]), False) == 20.0
    assert limit_s(10.0, deque([4.0]), True) == PATIENCE * 20.0


@pytest.mark.parametrize(("name", "value"), [("watchdog_seconds", 0.0), ("watchdog_seconds", float("inf")), ("straggler_factor", 1.0)])
def test_settings_that_make_no_sense_are_refused(name: str, value: float) -> None:
    found = output_violations(assign(RunConfig(), {name: value}))
    assert len(found) == 1
    assert name in found[0]


def lone_watchdog(world_size: int = 1) -> tuple[Watchdog, Any, dist.Store]:
    run = SimpleNamespace(state=SimpleNamespace(step=0), grid=SimpleNamespace(progress=Progress()))
    store = dist.HashStore()
    return Watchdog(run, Launch(0, world_size, 0, store), 2.0), run, store  # type: ignore[arg-type]


def look(watchdog: Watchdog, times: list[float]) -> str | None:
    """Let it look at these moments, as its threads would; the first verdict."""
    for now in times:
        watchdog._look(now)
        watchdog._board._exchange()
        watchdog._board.answered_at = now
        if watchdog._board.reading_since is not None:
            watchdog._board.reading_since = min(watchdog._board.reading_since, now - 100)
        verdict = watchdog._judge(now)
        if verdict is not None:
            return verdict
    return None


def moments(begin: float, seconds: float) -> list[float]:
    return [begin + 0.4 * number for number in range(1, int(seconds / 0.4) + 1)]


def test_what_counts_as_progress() -> None:
    watchdog, run, _ = lone_watchdog()
    now = time.monotonic()
    run.state.step = 1
    for change in ("doing", "last collective", "step"):
        assert look(watchdog, moments(now, 1.6)) is None
        now += 1.6
        run.grid.progress.doing += "." if change == "doing" else ""
        run.grid.progress.num_comms += change == "last collective"
        run.state.step += 100 * (change == "step")
    assert look(watchdog, moments(now, 1.6)) is None
    found = look(watchdog, moments(now + 1.6, 1.6))
    assert found is not None
    assert found.startswith("no progress for more than 2 s (--watchdog-seconds 2, median step")
    assert "the others wait for rank 0" in found


def test_first_steps_and_saves_may_take_long_and_a_stopped_process_knows_nothing() -> None:
    watchdog, run, _ = lone_watchdog()
    now = time.monotonic()
    assert look(watchdog, moments(now, 2 * (PATIENCE - 1))) is None, "the first step is not made yet"
    now += 2 * (PATIENCE - 1)
    run.state.step = 40
    with run.grid.progress.long_work():
        assert look(watchdog, moments(now, 8)) is None
    now += 8
    run.grid.progress.doing = "step 41"
    assert look(watchdog, moments(now, 1.6)) is None
    assert look(watchdog, moments(now + 100, 1.6)) is None, "this process was stopped: the others may have been too"
    assert look(watchdog, moments(now + 101.6, 1.6)) is not None


def test_a_failure_of_another_rank_ends_a_rank_that_does_not_notice() -> None:
    """Requirement 88: where collectives do not fail by themselves when a rank has gone."""
    watchdog, _, store = lone_watchdog(world_size=2)
    store.add(FAILURES, 1)
    now = time.monotonic()
    assert look(watchdog, moments(now, 9)) is None
    assert look(watchdog, moments(now + 9, 3)) == "another rank failed"


def start(program: Path, arguments: list[str], folder: Path) -> ProgramRanks:
    return ProgramRanks(program, [*arguments, *ENDLESS[1:], "--watchdog-seconds", "2"], 2, folder)


def test_a_stopped_rank_and_one_that_hangs_are_named_and_the_others_end(tmp_path: Path) -> None:
    """Requirement 88: a rank that neither fails nor goes on does not hold the others for ever; here rank 1, then rank 0 with the store."""
    ProgramRanks.warm_up()
    stopped = [start(ROOT / "pretrain_gpt.py", [], tmp_path / f"stop-{rank}") for rank in (0, 1)]
    hanging = start(ROOT / "tests/training/failing_run.py", ["1", "hang"], tmp_path / "hang")
    try:
        for rank, ranks in enumerate(stopped):
            wait_until(lambda ranks=ranks: "step 3/" in ranks.output() or ranks.has_ended, 60)
            os.kill(ranks.processes[rank].pid or 0, signal.SIGSTOP)
        for survivor in (stopped[0].processes[1], stopped[1].processes[0]):
            survivor.join(30)
            assert survivor.exitcode == 1
        assert hanging.wait(30) == [], "a rank that is not stopped ends by itself"
        assert hanging.exit_codes == [1, 1]
    finally:
        for ranks in (*stopped, hanging):
            ranks.wait(0)
    said = stopped[0].output(1)
    assert "error: rank 1: no progress for more than 2 s" in said
    assert "the others wait for rank 0: its rendezvous store does not answer" in said
    said = stopped[1].output(0)
    assert "the others wait for rank 1" in said
    assert "its process has not answered for" in said
    assert "[rank 0]" in said, "its stacks"
    both = hanging.output(0) + hanging.output(1)
    assert both.count("error: ") == 1, both
    assert "the others wait for rank 1" in both
    assert "it waits for no other rank: step 2, at training/failing_run.py" in both
    assert "time.sleep(1000)" in hanging.output(1), "each rank shows its own stacks"
    assert "last collective recv over pp" in hanging.output(0)
    assert "[rank 1] 1 steps made, step 2" in hanging.output(1)
