"""Layout strings and the split by cost."""

from __future__ import annotations

from itertools import product

import pytest

from megalite.errors import ConfigError
from megalite.pipeline.balance import StageCosts, balanced_split, layout_string_violations, layout_violations, parse_layout
from megalite.pipeline.schedules import round_robin, v_placement


@pytest.mark.parametrize(
    ("layout", "expected"),
    [
        ("EtttL", (3,)),
        ("Et*3|(tt|)*29,L", (3, *[2] * 29, 0)),
        ("E|(t|)*3,|L", (0, 1, 1, 1, 0, 0)),
        ("E t t | t L", (2, 1)),
        ("E(t|t)*2|L", (1, 2, 1, 0)),
        ("Et|*3tL", (1, 0, 0, 1)),
    ],
)
def test_layouts(layout: str, expected: tuple[int, ...]) -> None:
    assert parse_layout(layout) == expected


@pytest.mark.parametrize(
    ("layout", "message"),
    [
        ("Et*3|(tt|)*29,m|L", r"multi-token prediction layers \(m\), which megalite does not have"),
        ("Ett|tL|t", "needs the head L exactly once, in the last stage"),
        ("Ett|t", "needs the head L exactly once, in the last stage; it has it 0 times"),
        ("Et|EtL", "needs the embedding E exactly once, in the first stage; it has it 2 times"),
        ("tE|L", "layers before the embedding E"),
        ("Et|Lt", "layers behind the head L"),
        ("E(t(t|)*2)*2L", r"has a '\(' that belongs to no repetition"),
        ("Et*|L", r"has a '\*' that belongs to no repetition"),
        ("Etx|L", "has 'x': use E, t, L"),
        ("Et*9999999999|L", "stands for more than 100000 symbols"),
        ("E(t*9999|)*9999L", "stands for more than 100000 symbols"),
    ],
)
def test_wrong_layouts(layout: str, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        parse_layout(layout)
    assert len(layout_violations(layout)) == 1


def test_layout_for_another_number_of_chunks() -> None:
    assert layout_string_violations("Et|t|t|tL", 2, 2) == []
    assert "use --vpp 2" in layout_string_violations("Et|t|t|tL", 2, 1)[0]


def load(counts: tuple[int, ...], placement: tuple[int, ...], costs: StageCosts) -> float:
    """Cost of the busiest rank, counted by hand."""
    totals = dict.fromkeys(placement, 0.0)
    for stage, rank in enumerate(placement):
        totals[rank] += counts[stage] * costs.layer
    totals[placement[0]] += costs.embedding
    totals[placement[-1]] += costs.head
    return max(totals.values())


@pytest.mark.parametrize("placement", [(0, 1, 2), round_robin(2, 2), v_placement(2)], ids=["one chunk", "round robin", "V"])
def test_balanced_is_optimal(placement: tuple[int, ...]) -> None:
    for num_layers in (4, 7, 8):
        for costs in (StageCosts(), StageCosts(head=1.5), StageCosts(head=3.2, embedding=0.4), StageCosts(layer=2, head=1)):
            found = balanced_split(num_layers, placement, costs)
            assert sum(found) == num_layers
            assert all(found[:-1])
            every = (
                counts for counts in product(range(num_layers + 1), repeat=len(placement)) if sum(counts) == num_layers and all(counts[:-1])
            )
            assert load(found, placement, costs) == min(load(counts, placement, costs) for counts in every)


def test_balanced_examples() -> None:
    assert balanced_split(16, (0, 1, 2, 3), StageCosts()) == (4, 4, 4, 4)
    assert balanced_split(16, (0, 1, 2, 3), StageCosts(head=1.5)) == (5, 4, 4, 3)
    # on the V, rank 0 has the head: both of its stages give layers away
    assert balanced_split(16, v_placement(4), StageCosts(head=3)) == (2, 3, 3, 2, 2, 2, 2, 0)
    assert balanced_split(3, (0, 1, 2, 3), StageCosts(head=9)) == (1, 1, 1, 0)
    assert balanced_split(5, (0,), StageCosts(head=2)) == (5,)


def test_balanced_refuses() -> None:
    with pytest.raises(ConfigError, match=r"2 layers cannot be balanced over 4 pipeline stages: use at most 3 stages"):
        balanced_split(2, (0, 1, 2, 3), StageCosts())
    with pytest.raises(ConfigError, match="must be positive"):
        balanced_split(2, (0, 1), StageCosts(layer=0))
