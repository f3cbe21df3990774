"""tools/bench_startup.py: one launch, the phases, and what is read from `python -X importtime`."""

from __future__ import annotations

import pytest

from tools.bench_startup import _FLAGS, _RUN, PHASES, ROOT, dearest, import_times, launch, parse_import_times, phases, unneeded

TEXT = """import time: self [us] | cumulative | imported package
import time:       100 |        100 |     torch._C
import time:       250 |        350 |   torch
some other line
import time:        50 |        400 | megalite.training
"""


def test_a_launch_reports_every_phase() -> None:
    ends = launch(_RUN, 1, [str(ROOT), *_FLAGS], timeout=120)
    found = phases(ends)
    assert list(found) == [*PHASES, "second step"]
    assert all(seconds > 0 for seconds in found.values())
    assert sum(found.values()) == pytest.approx(ends[-1])


def test_import_times_are_read_and_summed() -> None:
    times = parse_import_times(TEXT)
    assert times == [("torch._C", 100, 100), ("torch", 250, 350), ("megalite.training", 50, 400)]
    assert dearest([(name, 1000 * own, 1000 * all_) for name, own, all_ in times], 2) == {
        "packages": {"torch": 0.35, "megalite": 0.05},
        "modules": {"megalite.training": 0.4, "torch": 0.35},
    }
    assert unneeded("pretrain_gpt.py --help", times) == ["torch"]


def test_help_imports_nothing_heavy() -> None:
    times = import_times(["pretrain_gpt.py", "--help"])
    assert len(times) > 50
    assert unneeded("pretrain_gpt.py --help", times) == []
