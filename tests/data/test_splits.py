"""Split strings and sample counts: Megatron's cuts, and no string that is read as something else."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from megalite.data.splits import SPLIT_NAMES, num_samples_per_split, parse_split, split_ranges
from megalite.errors import DataError

GOLDEN = json.loads((Path(__file__).parents[1] / "golden" / "splits_and_sizes.json").read_text())["splits"]
REFUSED_HERE = {"8:1:1"}  # Megatron reads any text between numbers as a separator; here only comma, slash and space


@pytest.mark.parametrize("case", [case for case in GOLDEN if case["split"] not in REFUSED_HERE], ids=lambda case: case["split"])
def test_ranges_equal_megatron(case: dict[str, Any]) -> None:
    assert list(parse_split(case["split"])) == case["vector"]
    for num_sequences, expected in case["ranges"].items():
        ranges = split_ranges(case["split"], int(num_sequences))
        found = [ranges[name] for name in SPLIT_NAMES]
        assert found == [bounds and tuple(bounds) for bounds in expected], num_sequences


def test_the_separators() -> None:
    """Requirement 27: these and no others; what is refused stands below."""
    wanted = {"train": (0, 90), "valid": (90, 95), "test": (95, 100)}
    for split in ("90,5,5", "90, 5, 5", "90/5/5", "90 5 5", " 90 , 5 /5 ", "0.9,.05,.05", "90.,5.,5."):
        assert split_ranges(split, 100) == wanted, split


def test_a_share_that_rounds_to_nothing_is_an_empty_range_and_not_none() -> None:
    assert split_ranges("969,30,1", 10) == {"train": (0, 10), "valid": (10, 10), "test": (10, 10)}
    assert split_ranges("1,0,0", 10) == {"train": (0, 10), "valid": None, "test": None}


@pytest.mark.parametrize(
    "split",
    [
        "",
        " ",
        "-1,1,0",
        "90,abc5,5",
        "90;5;5",
        "8:1:1",
        "1,2,3,4",
        "1,,2",
        "1,",
        ",1",
        "nan",
        "1e3,1",
        "1.2.3",
        ".",
        "inf,1",
        "90,5,5%",
        "0x1",
        "1\n,-2",
        "９,1",
    ],
)
def test_anything_else_is_refused(split: str) -> None:
    with pytest.raises(DataError, match="969,30,1"):
        split_ranges(split, 10)


@pytest.mark.parametrize("split", ["0", "0,0,0", "0.0 0"])
def test_all_zero_is_refused(split: str) -> None:
    with pytest.raises(DataError, match="at least one number"):
        split_ranges(split, 10)


def test_samples_of_a_run() -> None:
    run = {"global_batch_size": 8, "eval_interval": 30, "eval_steps": 5}
    assert num_samples_per_split(train_steps=100, **run) == (800, 4 * 5 * 8, 5 * 8)
    assert num_samples_per_split(train_steps=29, **run).valid == 5 * 8
    assert num_samples_per_split(train_steps=90, **run).valid == 4 * 5 * 8
    assert num_samples_per_split(train_steps=100, train_samples=777, **run).train == 777
    assert num_samples_per_split(train_steps=7, global_batch_size=3, eval_interval=2, eval_steps=0) == (21, 0, 0)


def test_bad_counts_are_all_named() -> None:
    with pytest.raises(DataError, match=r"train_steps is -1.*eval_interval is 0"):
        num_samples_per_split(train_steps=-1, global_batch_size=8, eval_interval=0, eval_steps=5)
