"""Schedules that a user wrote: what is read back, what is refused and where the message points."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from megalite.errors import ScheduleError
from megalite.pipeline.schedules import (
    Action,
    CostModel,
    Kind,
    build_schedule,
    dualpipe_v,
    one_f_one_b,
    schedule_from_cells,
    schedule_violations,
    write_schedule,
    zb_v,
)
from megalite.pipeline.simulate import simulate
from megalite.pipeline.verify import verify

EXAMPLE = Path(__file__).parents[2] / "examples" / "my_schedule.py"
FINE = "0F0,0F1,0B0,0B1\n# the second rank waits first\n,1F0,1B0,1F1,1B1\n"


def write(tmp_path: Path, name: str, text: str) -> str:
    path = tmp_path / name
    path.write_text(text)
    return str(path)


@pytest.mark.parametrize("schedule", [one_f_one_b(3, 4), zb_v(2, 5), dualpipe_v(2, 4)], ids=lambda schedule: schedule.name)
def test_csv_gives_the_schedule_back(tmp_path: Path, schedule) -> None:
    source = write(tmp_path, "orders.csv", write_schedule(schedule))
    read = build_schedule(source, schedule.num_ranks, schedule.num_microbatches, schedule.num_chunks)
    assert read.name == source
    assert (read.orders, read.placement, read.overlapped) == (schedule.orders, schedule.placement, schedule.overlapped)


def test_csv_and_json_are_the_same(tmp_path: Path) -> None:
    from_csv = build_schedule(write(tmp_path, "a.csv", FINE), 2, 2, 1)
    ranks = [["0F0", "0F1", "0B0", "0B1"], ["1F0", "1B0", "1F1", "1B1"]]
    from_json = build_schedule(write(tmp_path, "a.json", json.dumps({"name": "mine", "ranks": ranks})), 2, 2, 1)
    assert from_csv.orders == from_json.orders == schedule_from_cells("x", ranks).orders
    assert from_csv.orders[1][1] == Action(Kind.BACKWARD, 1, 0)
    verify(from_csv)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("0F0,0B0\n1F0,1X0\n", r"a.csv: line 2, cell 2: '1X0' is not an action.*such as 3F0"),
        ("0F0,0B0\n\n1F0,1B0,F1\n", r"a.csv: line 3, cell 3: 'F1'"),
        ("0F0,0B0\n1F0,0B1\n", r"line 2, cell 2: '0B1' is on stage 0, which rank 0 has too"),
        ("0F0,0B0\n2F0,2B0\n", r"stage 1 is on no rank, although there is a stage 2"),
        ("0F0,0B0\n,,\n", r"line 2: rank 1 has no action"),
        ("0F0,1F0,0B0,1B0\n2F0,2B0\n", r"ranks have 2, 1 stages"),
        ("", r"has no ranks"),
        ("0F0,0B0\n", r"is for 1 pipeline ranks, 1 micro-batches and 1 model chunks per rank; the run has 2, 1 and 1"),
    ],
)
def test_wrong_tables(tmp_path: Path, text: str, message: str) -> None:
    source = write(tmp_path, "a.csv", text)
    with pytest.raises(ScheduleError, match=message):
        build_schedule(source, 2, 1, 1)
    assert len(schedule_violations(source, 2, 1, 1)) == 1


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ('{"ranks": [["0F0", "0B0"],\n ["1F0" "1B0"]]}', r"a.json: line 2, column 9: not JSON"),
        ('{"ranks": [["0F0", "0B0"], ["1F0", 7]]}', r"rank 1, cell 2: 7 is not an action"),
        ('{"ranks": ["0F0", "1F0"]}', r"rank 0 is '0F0', not a list of cells"),
        ('[["0F0"]]', r'a schedule is \{"ranks"'),
        ('{"ranks": [], "rows": 1}', r'a schedule is \{"ranks"'),
    ],
)
def test_wrong_json(tmp_path: Path, text: str, message: str) -> None:
    with pytest.raises(ScheduleError, match=message):
        build_schedule(write(tmp_path, "a.json", text), 2, 1, 1)


def test_missing_files(tmp_path: Path) -> None:
    for name in ("none.csv", "none.json", "none.py:f"):
        with pytest.raises(ScheduleError, match=r"cannot read schedule .*none\."):
            build_schedule(str(tmp_path / name), 2, 1, 1)


def test_the_proof_points_into_the_table(tmp_path: Path) -> None:
    source = write(tmp_path, "a.csv", "0F0,0F1,0B1,0B0\n1F0,1B0,1F1,1B1\n")
    with pytest.raises(ScheduleError, match=r"rank 0, action 3 \(B0\)") as caught:
        verify(build_schedule(source, 2, 2, 1))
    assert "rank 0: 0 F0 | 1 F1 | 2 B1 | [3 B0] | 4 end" in str(caught.value)


def test_the_example_is_right_and_hides_latency() -> None:
    source = f"{EXAMPLE}:eager_1f1b"
    eager = build_schedule(source, 4, 8, 1)
    assert verify(eager).peaks == (7, 5, 3, 1)
    slow = CostModel(latency=0.5)
    assert simulate(one_f_one_b(4, 8), slow).makespan == 41  # the two numbers of its docstring
    assert simulate(eager, slow).makespan == 36
    assert "41 time units" in EXAMPLE.read_text()
    assert "become 36" in EXAMPLE.read_text()
    assert schedule_violations(source, 4, 8, 2) == [
        f"pipeline schedule {source}: schedule {source} failed with ValueError: eager 1F1B has one model chunk per rank, got 2"
    ]


def test_a_python_function_may_return_a_schedule_or_fail(tmp_path: Path) -> None:
    text = """
from dataclasses import dataclass
from megalite.pipeline.schedules import gpipe

@dataclass
class Settings:
    m: int

def mine(p, m, v):
    return gpipe(p, Settings(m).m)

def wrong(p, m, v):
    return gpipe(p, m + 1)

def nothing(p, m, v):
    return None
"""
    path = write(tmp_path, "mine.py", text)
    assert build_schedule(f"{path}:mine", 2, 3, 1).name == "gpipe"
    for function, message in (
        ("wrong", "is for 2 pipeline ranks, 4 micro-batches"),
        ("nothing", "one list of cells per rank, got NoneType"),
        ("absent", "has no function absent"),
    ):
        with pytest.raises(ScheduleError, match=message):
            build_schedule(f"{path}:{function}", 2, 3, 1)


def test_a_python_file_needs_its_function() -> None:
    assert "unknown pipeline schedule 'mine.py'" in schedule_violations("mine.py", 2, 2, 1)[0]
