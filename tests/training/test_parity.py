"""Requirement 90. Every layout trains the same model: a part of the matrix (all of it: `python tools/parity.py --max-ranks 8`)."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from megalite.testing.layouts import Layout, factorisations, layouts
from megalite.testing.parity import (
    Tolerance,
    TrainedCase,
    bitwise_differences,
    compare,
    problems,
    tiny_config,
    train_case,
)
from tests.ranks import run_ranks

# Each group does the same arithmetic, so its members are equal bit for bit.
GROUPS = {
    "pp and schedule alone": [
        Layout(pp=1),
        Layout(pp=2, schedule="gpipe"),
        Layout(pp=4, schedule="1f1b"),
        Layout(pp=4, schedule="interleaved-1f1b"),
        Layout(pp=2, schedule="zb-h1"),
        Layout(pp=4, schedule="zb-v"),
    ],
    "tp 2, sequence parallel": [
        Layout(tp=2, sequence_parallel=True),
        Layout(tp=2, pp=2, schedule="interleaved-1f1b", sequence_parallel=True),
    ],
    "tp 4, more ranks than kv heads": [Layout(tp=4), Layout(tp=4, pp=2, schedule="1f1b")],
    "dp 2, zero 3": [
        Layout(dp=2, zero=3),
        Layout(dp=2, zero=3, pp=2, schedule="1f1b"),
        Layout(dp=2, zero=3, pp=2, schedule="dualpipe-v"),
    ],
    "all axes": [
        Layout(tp=2, dp=2, zero=3, sequence_parallel=True),
        Layout(tp=2, pp=2, dp=2, zero=3, schedule="1f1b", sequence_parallel=True),
        Layout(tp=2, pp=2, dp=2, zero=3, schedule="interleaved-1f1b", sequence_parallel=True),
    ],
    "dp 4, zero 0, odd sizes": [Layout(dp=4, zero=0)],
    "zero 1 and 2": [Layout(dp=2, zero=1), Layout(dp=2, zero=1, pp=2, schedule="gpipe")],
    "zero 2": [Layout(dp=2, zero=2), Layout(dp=2, zero=2, pp=2, schedule="gpipe")],
}
TIED = [
    Layout(tied=True, pp=2, schedule="zb-v"),
    Layout(tied=True, pp=1, schedule="interleaved-1f1b"),
    Layout(tied=True, pp=4, schedule="gpipe"),
    Layout(tied=True, tp=2, pp=2, schedule="interleaved-1f1b", sequence_parallel=True),
    Layout(tied=True, tp=2, pp=2, dp=2, zero=3, schedule="1f1b"),
    Layout(tied=True, dp=2, zero=3),
]


def train(layout: Layout, config=None) -> TrainedCase:
    return run_ranks(train_case, layout.world_size, config or tiny_config(), layout, timeout=120)[0]


@pytest.fixture(scope="module")
def one_rank() -> TrainedCase:
    return train(Layout())


@pytest.mark.parametrize("group", GROUPS.values(), ids=GROUPS.keys())
def test_layouts_train_the_model_of_one_rank(group: list[Layout], one_rank: TrainedCase) -> None:
    cases = [train(layout) for layout in group]
    for layout, case in zip(group, cases, strict=True):
        difference = compare(case, one_rank)
        assert difference.within(Tolerance()), (str(layout), difference)
        assert bitwise_differences(case, cases[0]) == [], str(layout)


def test_a_tied_head_trains_the_same_model_wherever_its_copy_is() -> None:
    reference = train(Layout(tied=True))
    for layout in TIED:
        difference = compare(train(layout), reference)
        assert difference.within(Tolerance()), (str(layout), difference)
        if layout.tp == layout.dp == 1:
            assert max(difference.loss, difference.grad_norm, difference.weights) <= Tolerance().tied


def test_gpt2_style_model_with_biases_and_learned_positions() -> None:
    config = tiny_config()
    model = replace(
        config.model,
        normalization="LayerNorm",
        activation="gelu_tanh",
        add_bias_linear=True,
        position_embedding_type="learned_absolute",
        num_query_groups=None,
    )
    config = replace(config, model=model)
    reference = train(Layout(tied=True), config)
    layout = Layout(tied=True, tp=2, pp=2, schedule="1f1b", sequence_parallel=True)
    assert compare(train(layout, config), reference).within(Tolerance())


def test_normalised_heads_a_window_and_stretched_positions() -> None:
    """The weight of a head's norm is whole on every tp rank and sees that rank's heads only; with tp 4 two ranks share a key head."""
    config = tiny_config()
    model = replace(
        config.model,
        num_layers=4,
        qk_layernorm=True,
        sliding_window=5,
        add_qkv_bias=True,
        add_attention_output_bias=True,
        rope_scaling="yarn",
        rope_scaling_factor=4.0,
        rope_scaling_original_length=8,
    )
    config = replace(config, model=model)
    reference = train(Layout(), config)
    for layout in (Layout(tp=4), Layout(tp=2, pp=2, sequence_parallel=True), Layout(tp=2, dp=2, zero=3)):
        difference = compare(train(layout, config), reference)
        assert difference.within(Tolerance()), (str(layout), difference)


def test_micro_batch_size_does_not_change_the_numbers(one_rank: TrainedCase) -> None:
    config = replace(tiny_config(), train=replace(tiny_config().train, micro_batch_size=8))
    assert compare(train(Layout(), config), one_rank).within(Tolerance())


def test_differences_are_seen(one_rank: TrainedCase) -> None:
    """The comparison itself: another seed, one changed bit, a changed loss."""
    other = train(Layout(), replace(tiny_config(), train=replace(tiny_config().train, seed=4321)))
    assert compare(other, one_rank).initial
    assert not compare(other, one_rank).within(Tolerance())
    name = next(iter(one_rank.weights))
    changed = one_rank.weights[name].copy()
    changed.reshape(-1)[0] = np.nextafter(changed.reshape(-1)[0], np.float32(np.inf))
    assert bitwise_differences(replace(one_rank, weights={**one_rank.weights, name: changed}), one_rank) == [name]
    wrong = replace(one_rank, losses=[one_rank.losses[0] * 1.001, *one_rank.losses[1:]])
    assert not compare(wrong, one_rank).within(Tolerance())


def test_matrix_covers_every_factorisation() -> None:
    for size in (1, 2, 4, 8):
        found = {(layout.tp, layout.pp, layout.dp) for layout in layouts(size)}
        assert found == set(factorisations(size))
        assert len(set(layouts(size))) == len(list(layouts(size)))
    impossible = [str(layout) for size in (1, 2, 4, 8) for layout in layouts(size) if problems(tiny_config(), layout)]
    # 9 layers cannot fill 16 virtual stages: the only rows that the built-in model cannot have.
    assert impossible == ["pp8"] or all("pp8" in name and "interleaved" in name for name in impossible), impossible
