"""Keyed dropout: which masks agree and which differ."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from torch import Tensor
from torch.utils.checkpoint import checkpoint

from megalite.grid import Axis
from megalite.tensor_parallel import DropoutKey, dropout, seed_dropout
from tests.ranks import run_ranks
from tests.tensor_parallel.helpers import tp_axis

KEY = DropoutKey(seed=1, first_sample=64, layer=3)
X = torch.ones(40, 3, 20)


def drop(key: DropoutKey = KEY, site: str = "mlp", split_over: Axis | None = None, p: float = 0.25) -> Tensor:
    return dropout(X, p, key, site, training=True, split_over=split_over)


def masks_of_rank() -> tuple[Tensor, Tensor]:
    tp = tp_axis(2)
    torch.manual_seed(tp.rank)  # what ran before does not matter
    return drop(), drop(split_over=tp)


def test_masks_agree_where_x_is_whole_and_differ_where_it_is_split() -> None:
    (whole_0, split_0), (whole_1, split_1) = run_ranks(masks_of_rank, 2)
    assert torch.equal(whole_0, whole_1)
    assert torch.equal(whole_0, drop())
    assert not torch.equal(split_0, split_1)


def test_the_same_key_draws_the_same_mask() -> None:
    first = drop()
    torch.rand(5)
    assert torch.equal(drop(), first)
    assert torch.equal(drop(split_over=Axis.single()), first)  # one rank splits nothing
    others = [
        drop(replace(KEY, seed=2)),
        drop(replace(KEY, first_sample=65)),
        drop(replace(KEY, layer=-1)),
        drop(site="attention"),
    ]
    for number, mask in enumerate(others):
        assert all(not torch.equal(mask, other) for other in (first, *others[:number]))


def test_a_quarter_is_dropped_and_the_rest_is_scaled() -> None:
    y = drop()
    assert y.unique().tolist() == pytest.approx([0.0, 4 / 3])
    assert abs(float((y == 0).float().mean()) - 0.25) < 0.03


def test_nothing_is_drawn_without_dropout() -> None:
    torch.manual_seed(5)
    before = torch.get_rng_state()
    assert dropout(X, 0.0, KEY, "mlp", training=True, split_over=None) is X
    assert dropout(X, 0.5, KEY, "mlp", training=False, split_over=None) is X
    assert torch.equal(torch.get_rng_state(), before)
    drop()
    assert not torch.equal(torch.get_rng_state(), before)


def test_recomputation_draws_the_same_mask() -> None:
    def run(recompute: bool) -> Tensor:
        x = X.clone().requires_grad_()
        y = checkpoint(twice, x, use_reentrant=False, preserve_rng_state=False) if recompute else twice(x)
        torch.rand(7)
        y.sum().backward()
        assert x.grad is not None
        return x.grad

    assert torch.equal(run(recompute=True), run(recompute=False))


def twice(x: Tensor) -> Tensor:
    y = dropout(x, 0.25, KEY, "attention", training=True, split_over=None).exp()
    return dropout(y, 0.25, KEY, "mlp", training=True, split_over=None)


def test_seeding_serves_functions_with_their_own_dropout() -> None:
    seed_dropout(KEY, "mlp", torch.device("cpu"), None)
    assert torch.equal(torch.nn.functional.dropout(X, 0.25), drop())
    seed_dropout(KEY, "mlp", torch.device("cpu"), 1)
    assert not torch.equal(torch.nn.functional.dropout(X, 0.25), drop())
