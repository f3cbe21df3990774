"""Parameters: placements, records, meta device, and gradients that arrive without communication."""

from __future__ import annotations

import pytest
import torch
from torch import nn
from torch.distributed.tensor import DTensor, Replicate, Shard
from torch.distributed.tensor.debug import CommDebugMode

from megalite.errors import ConfigError
from megalite.grid import Axis
from megalite.tensor_parallel import (
    ParallelContext,
    ParameterInfo,
    add_parameter,
    logical_name,
    named_parameter_info,
    to_local,
)
from tests.ranks import run_ranks
from tests.tensor_parallel.helpers import tp_axis

INFO = ParameterInfo(role="linear", init="normal", std=0.02)


def three_parameters(tp: Axis, device: str) -> nn.Module:
    module = nn.Module()
    add_parameter(module, "rows", (6, 4), tp=tp, shard_dim=0, info=INFO, device=device)
    add_parameter(module, "columns", (6, 4), tp=tp, shard_dim=1, info=INFO, device=device)
    add_parameter(module, "whole", (5,), tp=tp, shard_dim=None, info=INFO, device=device, dtype=torch.bfloat16)
    return module


def check_placements(device: str) -> None:
    tp = tp_axis(2)
    module = three_parameters(tp, device)
    assert all(parameter.device.type == device for parameter in module.parameters())
    module.to_empty(device="cpu")
    expected = {"rows": (Shard(0), (3, 4)), "columns": (Shard(1), (6, 2)), "whole": (Replicate(), (5,))}
    for name, (placement, shape) in expected.items():
        parameter = getattr(module, name)
        assert isinstance(parameter, nn.Parameter)
        assert isinstance(parameter, DTensor)
        assert parameter.placements == (placement,)
        assert parameter.shape == ((5,) if name == "whole" else (6, 4))
        assert to_local(parameter).shape == shape
        assert to_local(parameter).device.type == "cpu"


@pytest.mark.parametrize("device", ["cpu", "meta"])
def test_placements_say_how_a_parameter_is_cut(device: str) -> None:
    run_ranks(check_placements, 2, device)


def check_gradients() -> None:
    module = three_parameters(tp_axis(2), "cpu")
    for parameter in module.parameters():
        with CommDebugMode() as mode:
            (to_local(parameter) * 2).sum().backward()
        assert mode.get_total_counts() == 0
        assert parameter.grad.placements == parameter.placements  # type: ignore[union-attr]
        local = to_local(parameter)
        assert torch.equal(parameter.grad.to_local(), torch.full_like(local, 2.0))  # type: ignore[union-attr]


def test_gradients_keep_the_placements_without_communication() -> None:
    run_ranks(check_gradients, 2)


def test_a_parameter_at_tp_1_is_a_plain_tensor() -> None:
    module = three_parameters(Axis.single(), "cpu")
    assert type(module.rows) is nn.Parameter
    assert to_local(module.rows) is module.rows
    assert module.whole.dtype == torch.bfloat16


def test_a_dimension_that_tp_does_not_divide_is_refused() -> None:
    five = Axis("tp", 5, 0, (0, 1, 2, 3, 4))
    with pytest.raises(ConfigError, match=r"dimension 1 of weight \(10, 7\) has 7 entries, which 5 tp ranks"):
        add_parameter(nn.Module(), "weight", (10, 7), tp=five, shard_dim=1, info=INFO, device="cpu")


def test_records_have_dotted_names_and_none_may_be_missing() -> None:
    model = nn.Module()
    model.inner = three_parameters(Axis.single(), "cpu")
    copy = ParameterInfo(role="head", init="normal", std=0.02, copy_of="embedding.word.weight")
    add_parameter(model, "weight", (3, 2), tp=Axis.single(), shard_dim=0, info=copy, device="cpu")
    infos = named_parameter_info(model)
    assert list(infos) == ["weight", "inner.rows", "inner.columns", "inner.whole"]
    assert logical_name("weight", infos["weight"]) == "embedding.word.weight"
    assert logical_name("inner.rows", infos["inner.rows"]) == "inner.rows"
    model.stray = nn.Linear(2, 2)
    with pytest.raises(AssertionError, match=r"stray\.weight.*stray\.bias"):
        named_parameter_info(model)


def test_sequence_parallel_needs_more_than_one_rank() -> None:
    with pytest.raises(AssertionError, match="one rank"):
        ParallelContext(Axis.single(), True)


def test_init_and_std_must_agree() -> None:
    with pytest.raises(AssertionError, match="zeros does not go with std"):
        ParameterInfo(role="bias", init="zeros", std=0.1)
    with pytest.raises(AssertionError, match="normal does not go with std"):
        ParameterInfo(role="linear", init="normal")
