"""Label smoothing, z-loss and pieces of the loss are the same in every layout."""

from __future__ import annotations

from dataclasses import replace

import pytest

from megalite.config import RunConfig
from megalite.testing.layouts import Layout
from megalite.testing.parity import Tolerance, bitwise_differences, compare, tiny_config, train_case
from tests.ranks import run_ranks


def small() -> RunConfig:
    tiny = tiny_config()
    return replace(tiny, model=replace(tiny.model, num_layers=3), train=replace(tiny.train, train_iters=2, global_batch_size=8))


def config() -> RunConfig:
    tiny = tiny_config()
    return replace(
        small(),
        numerics=replace(tiny.numerics, label_smoothing=0.1, z_loss=1e-2),
        memory=replace(tiny.memory, loss_chunk_tokens=7),
    )


@pytest.mark.parametrize(
    ("layout", "other"),
    [
        (Layout(tp=2, sequence_parallel=True), Layout(tp=2, pp=2, schedule="zb-h1", sequence_parallel=True)),
        (Layout(dp=2, zero=3), Layout(dp=2, zero=3, pp=2)),
    ],
    ids=str,
)
def test_terms_and_pieces_in_every_layout(layout: Layout, other: Layout) -> None:
    case, same = (run_ranks(train_case, which.world_size, config(), which, timeout=60)[0] for which in (layout, other))
    assert bitwise_differences(case, same) == []
    alone = Layout(tied=layout.tied)
    reference = run_ranks(train_case, 1, config(), alone, timeout=60)[0]
    assert compare(case, reference).within(Tolerance())
    (plain,) = run_ranks(train_case, 1, small(), alone, timeout=60)
    assert plain.losses[0] == pytest.approx(reference.losses[0], rel=1e-6)  # the loss that is shown
    assert plain.losses[1] != reference.losses[1]
