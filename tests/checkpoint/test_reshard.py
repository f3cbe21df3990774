"""Requirement 68: every layout loads what every layout saved, weights and moments bit for bit, and trains on as if nothing had happened.

All 64 pairs are loaded here; trained on is in the next layout of the list and, with few ranks, in the same one (`test_resume` does that for
others). `tools/verify_reshard.py` trains on from all pairs.
"""

from __future__ import annotations

import math
from pathlib import Path

import pytest

from megalite.testing.layouts import Layout
from megalite.testing.reshard import LAYOUTS, SAVED_AT, STEPS, Loaded, load_and_train_on, problems, reshard_config, train_and_save
from tests.ranks import run_ranks

Saved = dict[Layout, tuple[Path, list[float]]]


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> Saved:
    """{layout: (folder, losses of the steps after the checkpoint)}."""
    found: Saved = {}
    for number, layout in enumerate(LAYOUTS):
        folder = tmp_path_factory.mktemp(f"layout-{number}")
        found[layout] = folder, run_ranks(train_and_save, layout.world_size, reshard_config(), layout, folder, timeout=120)[0]
    return found


@pytest.mark.parametrize("layout", LAYOUTS, ids=str)
def test_requirement_68_all_checkpoints_load_in_this_layout(saved: Saved, layout: Layout) -> None:
    neighbour = LAYOUTS[LAYOUTS.index(layout) - 1]
    is_trained_on = {other: other == neighbour or (other == layout and layout.world_size < 3) for other in saved}
    folders = {folder: is_trained_on[other] for other, (folder, _) in saved.items()}
    for found in run_ranks(load_and_train_on, layout.world_size, reshard_config(), layout, folders, timeout=120):
        for (other, (_, straight)), result in zip(saved.items(), found, strict=True):
            assert problems(other, layout, result, straight) == [], str(other)
        assert [len(result.losses) for result in found] == [(STEPS - SAVED_AT) * trained for trained in is_trained_on.values()]


def test_what_is_not_equal_is_a_problem() -> None:
    one, other, losses = Layout(), Layout(pp=2), [4.0, 3.0]
    assert problems(one, one, Loaded(unequal=[], losses=losses), losses) == []
    assert "2 tensors differ after loading: a, b" in problems(one, other, Loaded(unequal=["a", "b"], losses=[]), losses)
    near = Loaded(unequal=[], losses=[4.0, 3.0 * (1 + 2e-6)])
    assert problems(one, other, near, losses) == []
    assert problems(one, one, near, losses) == ["losses in the same layout are not equal bit for bit"]
    assert "losses differ by 2.0e-05" in problems(one, other, Loaded(unequal=[], losses=[4.0, 3.0 * (1 + 2e-5)]), losses)[0]
    assert "losses differ by inf" in problems(one, other, Loaded(unequal=[], losses=[4.0, math.nan]), losses)[0]
