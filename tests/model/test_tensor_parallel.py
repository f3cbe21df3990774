"""The model cut over tp equals the whole one: initial values, loss, every gradient, logits."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor
from torch.distributed.tensor import DTensor

from megalite.comm import all_gather, all_gather_object
from megalite.grid import Grid, GridShape
from megalite.model import GPTStage
from megalite.tensor_parallel.parameter import named_parameter_info
from tests.model.helpers import GPT_STYLE, full_gradients, full_parameters, tiny_batch, tiny_config, tiny_stages
from tests.ranks import run_ranks

CASES = [  # (tp, sequence parallel, changes of the configuration)
    (2, True, {}),
    (2, False, {}),
    (2, True, dict(num_query_groups=1, add_qkv_bias=True)),
    (2, False, dict(num_query_groups=1, add_qkv_bias=True)),
    (2, True, GPT_STYLE),
    (2, False, GPT_STYLE),
    (2, True, dict(untie_embeddings_and_output_weights=False)),
    (4, True, dict(add_bias_linear=True)),  # 2 key/value heads on 4 ranks, biases cut alike
    (4, False, dict(num_query_groups=1)),
    (4, True, dict(**GPT_STYLE, num_query_groups=4, untie_embeddings_and_output_weights=False)),
]

ROUNDING = 5e-6
"""What is left of a gradient that is zero but for rounding: that of the key bias without rotation."""


def cut_model(tp: int, sequence_parallel: bool, changes: dict[str, Any]) -> dict[str, Any] | None:
    grid = Grid.build(GridShape(tp=tp))
    stage = tiny_stages(tiny_config(**changes), 1, grid.tp, sequence_parallel=sequence_parallel)[0]
    batch = tiny_batch()
    params = full_parameters(stage)
    with torch.no_grad():
        logits = all_gather(stage.logits(None, batch), grid.tp, dim=2)
    loss = stage(None, batch)
    loss.backward()
    check_replicas(stage)
    assert len(set(all_gather_object(loss.item(), grid.tp))) == 1
    result = dict(params=params, logits=logits, loss=loss.detach(), grads=full_gradients(stage))
    return result if grid.rank == 0 else None


def check_replicas(stage: GPTStage) -> None:
    """Gradients that are not marked as partial are equal where the parameter is whole on every rank."""
    for name, info in named_parameter_info(stage).items():
        grad = stage.get_parameter(name).grad
        assert isinstance(grad, DTensor)
        if grad.placements[0].is_replicate() and not info.partial_over_tp:
            copies = all_gather(grad.to_local()[None], stage.ctx.tp)
            torch.testing.assert_close(copies, copies[:1].expand_as(copies), rtol=1e-6, atol=1e-6)


@pytest.mark.parametrize(("tp", "sequence_parallel", "changes"), CASES)
def test_cut_model_equals_the_whole_one(tp: int, sequence_parallel: bool, changes: dict[str, Any]) -> None:
    cut = run_ranks(cut_model, tp, tp, sequence_parallel, changes)[0]
    whole, batch = tiny_stages(tiny_config(**changes))[0], tiny_batch()
    params = full_parameters(whole)
    assert cut["params"].keys() == params.keys()
    assert all(torch.equal(cut["params"][name], params[name]) for name in params)
    loss = whole(None, batch)
    loss.backward()
    torch.testing.assert_close(cut["loss"], loss.detach(), rtol=1e-6, atol=0)
    torch.testing.assert_close(cut["logits"], whole.logits(None, batch).detach(), rtol=1e-4, atol=1e-4)
    expected = full_gradients(whole)
    assert cut["grads"].keys() == expected.keys()
    for name, grad in expected.items():
        assert error(cut["grads"][name], grad) < 2e-5 * grad.norm().item() + ROUNDING, name


def error(value: Tensor, expected: Tensor) -> float:
    return (value - expected).norm().item()


def dropout_losses(sequence_parallel: bool) -> tuple[float, float]:
    """Losses of two micro-batches that differ in their sample number only."""
    grid = Grid.build(GridShape(tp=2))
    config = tiny_config(hidden_dropout=0.3)
    stage = tiny_stages(config, 1, grid.tp, sequence_parallel=sequence_parallel)[0]
    return stage(None, tiny_batch()).item(), stage(None, tiny_batch()).item()


def test_hidden_dropout_without_sequence_parallelism_is_that_of_one_rank() -> None:
    whole = tiny_stages(tiny_config(hidden_dropout=0.3))[0]
    expected = whole(None, tiny_batch()).item()
    for first, second in run_ranks(dropout_losses, 2, False):
        assert first == second == pytest.approx(expected, rel=1e-6)


def test_hidden_dropout_under_sequence_parallelism_repeats_itself() -> None:
    (first, again), other_rank = run_ranks(dropout_losses, 2, True)
    plain = tiny_stages(tiny_config())[0](None, tiny_batch()).item()
    assert (first, again) == other_rank
    assert first == again != pytest.approx(plain, rel=1e-3)


def last_seed(kind: str, sequence_parallel: bool) -> int:
    """What the last dropout of a forward pass seeded the generator with."""
    grid = Grid.build(GridShape(tp=2))
    stage = tiny_stages(tiny_config(**{kind: 0.3}), 1, grid.tp, sequence_parallel=sequence_parallel)[0]
    stage(None, tiny_batch())
    return torch.initial_seed()


@pytest.mark.parametrize("sequence_parallel", [False, True])
@pytest.mark.parametrize("kind", ["hidden_dropout", "attention_dropout"])
def test_ranks_draw_other_numbers_exactly_where_they_hold_other_things(kind: str, sequence_parallel: bool) -> None:
    first, second = run_ranks(last_seed, 2, kind, sequence_parallel)
    assert (first != second) == (kind == "attention_dropout" or sequence_parallel)
