"""Layers are split over stages evenly, the last stage never gets more, and nothing is dropped."""

from __future__ import annotations

import pytest

from megalite.errors import ConfigError
from megalite.pipeline.partition import StageSpec, partition_violations, split_layers


def counts(num_layers: int, num_stages: int, layout: list[int] | None = None) -> list[int]:
    return [spec.num_layers for spec in split_layers(num_layers, num_stages, layout)]


@pytest.mark.parametrize(
    ("num_layers", "num_stages", "expected"),
    [
        (7, 4, [2, 2, 2, 1]),
        (6, 4, [1, 2, 2, 1]),
        (5, 4, [1, 2, 1, 1]),
        (8, 4, [2, 2, 2, 2]),
        (3, 2, [2, 1]),
        (5, 1, [5]),
        (5, 5, [1, 1, 1, 1, 1]),
    ],
)
def test_default_split(num_layers: int, num_stages: int, expected: list[int]) -> None:
    assert counts(num_layers, num_stages) == expected


def test_specs_of_seven_layers_over_four_stages() -> None:
    assert split_layers(7, 4) == [
        StageSpec(0, first_layer=0, num_layers=2, has_embedding=True, has_head=False),
        StageSpec(1, first_layer=2, num_layers=2, has_embedding=False, has_head=False),
        StageSpec(2, first_layer=4, num_layers=2, has_embedding=False, has_head=False),
        StageSpec(3, first_layer=6, num_layers=1, has_embedding=False, has_head=True),
    ]


def test_one_stage_has_both_ends() -> None:
    assert split_layers(3, 1) == [StageSpec(0, 0, 3, has_embedding=True, has_head=True)]


def test_every_split_is_even_complete_and_light_at_the_end() -> None:
    for num_layers in range(1, 30):
        for num_stages in range(1, num_layers + 1):
            specs = split_layers(num_layers, num_stages)
            sizes = [spec.num_layers for spec in specs]
            assert [layer for spec in specs for layer in spec.layers] == list(range(num_layers))
            assert max(sizes) - min(sizes) <= 1
            assert sizes[-1] == min(sizes)
            assert [spec.has_embedding for spec in specs] == [stage == 0 for stage in range(num_stages)]
            assert [spec.has_head for spec in specs] == [stage == num_stages - 1 for stage in range(num_stages)]


def test_explicit_layout_may_have_empty_stages() -> None:
    specs = split_layers(7, 4, [0, 4, 3, 0])
    assert [spec.num_layers for spec in specs] == [0, 4, 3, 0]
    assert [spec.first_layer for spec in specs] == [0, 0, 4, 7]
    assert specs[0].has_embedding
    assert specs[3].has_head


def test_more_stages_than_layers_need_an_explicit_layout() -> None:
    with pytest.raises(ConfigError, match=r"3 layers cannot fill 4 pipeline stages.*at most 3 stages"):
        split_layers(3, 4)
    assert counts(3, 4, [1, 1, 1, 0]) == [1, 1, 1, 0]


@pytest.mark.parametrize(
    ("layout", "message"),
    [
        ([2, 2, 2], r"2,2,2 names 3 stages, the pipeline has 4"),
        ([2, 2, 2, 2], r"places 8 layers, the model has 7: take away 1"),
        ([2, 2, 1, 1], r"places 6 layers, the model has 7: add 1"),
        ([4, -1, 2, 2], r"negative"),
    ],
)
def test_wrong_layouts(layout: list[int], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        split_layers(7, 4, layout)


def test_all_violations_at_once() -> None:
    assert len(partition_violations(7, 4, [5, 5, -1])) == 3
    assert len(partition_violations(0, 0)) == 2
    assert partition_violations(7, 4) == []
    with pytest.raises(ConfigError) as caught:
        split_layers(0, 0)
    assert len(caught.value.violations) == 2
