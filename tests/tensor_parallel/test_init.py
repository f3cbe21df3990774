"""Initial values: the same whole model for every tp, and a function of seed, name and index."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn

from megalite import comm
from megalite.grid import Axis
from megalite.tensor_parallel import (
    ParameterInfo,
    add_parameter,
    init_module_,
    init_parameter_,
    to_local,
)
from tests.ranks import run_ranks
from tests.tensor_parallel.helpers import tp_axis

ROWS, COLUMNS, VALID = 148, 604, 141  # shares of 4 ranks begin and end inside tiles, in both dimensions
NORMAL = ParameterInfo(role="embedding", init="normal", std=0.02, valid_rows=VALID)


def made(shape: tuple[int, ...], tp: Axis, shard_dim: int | None, info: ParameterInfo, name: str, seed: int) -> Tensor:
    module = nn.Module()
    add_parameter(module, "weight", shape, tp=tp, shard_dim=shard_dim, info=info, device="cpu")
    init_parameter_(name, module.weight, info, seed)
    return to_local(module.weight).detach()


def plain(shape: tuple[int, ...] = (ROWS, COLUMNS), name: str = "a", seed: int = 1, **fields) -> Tensor:
    info = ParameterInfo(role="linear", init="normal", std=fields.pop("std", 0.02), **fields)
    return made(shape, Axis.single(), None, info, name, seed)


def gathered(tp_size: int, shard_dim: int | None) -> Tensor:
    tp = tp_axis(tp_size)
    local = made((ROWS, COLUMNS), tp, shard_dim, NORMAL, "a", 1)
    assert local.numel() * (1 if shard_dim is None else tp_size) == ROWS * COLUMNS
    return local if shard_dim is None else comm.all_gather(local, tp, shard_dim)


@pytest.mark.parametrize("shard_dim", [0, 1, None])
@pytest.mark.parametrize("tp", [1, 2, 4])
def test_every_tp_makes_the_same_matrix(tp: int, shard_dim: int | None) -> None:
    expected = plain(valid_rows=VALID)
    for full in run_ranks(gathered, tp, tp, shard_dim):
        assert torch.equal(full, expected)


def test_values_are_normal_with_the_given_std_and_padding_rows_are_zero() -> None:
    full = plain(valid_rows=VALID)
    assert not full[VALID:].any()
    values = full[:VALID] / 0.02
    assert abs(float(values.mean())) < 0.02
    assert abs(float(values.std()) - 1) < 0.01
    assert abs(float((values.abs() < 1).float().mean()) - 0.6827) < 0.01
    assert values.unique().numel() > 0.99 * values.numel()  # no tile repeats another


def test_values_depend_on_seed_name_and_index_only() -> None:
    full = plain()
    assert torch.equal(full, plain())
    assert torch.equal(full[:, :300], plain((ROWS, 300)))  # not on the size of the matrix
    assert torch.equal(full[:70], plain((70, COLUMNS)))
    assert torch.equal(full * 2, plain(std=0.04))
    for other in (plain(name="b"), plain(seed=2)):
        assert not torch.isclose(full, other).float().mean() > 0.01
        assert abs(float(torch.corrcoef(torch.stack((full.flatten(), other.flatten())))[0, 1])) < 0.02


def test_neighbouring_seeds_and_names_do_not_run_together() -> None:
    # "1:2x" must not be read as seed 12, name "x" or the like
    assert not torch.equal(plain(seed=1, name="1:x"), plain(seed=11, name=":x"))


def test_the_initial_model_of_a_seed_stays_what_it_was() -> None:
    # a change here means that every initial model of every user changes: say so in the release notes
    values = plain((70, 300), name="layers.0.mlp.up_proj.weight", seed=1234)
    picked = values[[0, 0, 63, 64, 69], [0, 255, 256, 1, 299]]
    expected = [
        -0.014744775369763374,
        0.006687217392027378,
        -0.0006901879678480327,
        0.029554933309555054,
        -0.011161208152770996,
    ]
    assert torch.equal(picked, torch.tensor(expected))


def test_a_module_is_initialised_by_logical_names() -> None:
    def block(prefix_of_copy: str | None) -> nn.Module:
        module = nn.Module()
        module.inner = nn.Module()
        tp = Axis.single()
        normal = ParameterInfo(role="linear", init="normal", std=0.5, copy_of=prefix_of_copy)
        add_parameter(module.inner, "weight", (7, 3), tp=tp, shard_dim=0, info=normal, device="meta")
        ones, zeros = ParameterInfo(role="norm", init="ones"), ParameterInfo(role="bias", init="zeros")
        add_parameter(module, "scale", (3,), tp=tp, shard_dim=None, info=ones, device="meta")
        add_parameter(module, "shift", (3,), tp=tp, shard_dim=None, info=zeros, device="meta")
        module.to_empty(device="cpu")
        return module

    first = block(None)
    init_module_(first, "layers.3.", 1)
    assert torch.equal(first.inner.weight, plain((7, 3), name="layers.3.inner.weight", std=0.5))
    assert torch.equal(first.scale, torch.ones(3))
    assert torch.equal(first.shift, torch.zeros(3))
    copy = block("layers.3.inner.weight")
    init_module_(copy, "head.", 1)
    assert torch.equal(copy.inner.weight, first.inner.weight)
    other = block(None)
    init_module_(other, "", 1)
    assert torch.equal(other.inner.weight, plain((7, 3), name="inner.weight", std=0.5))


def test_bf16_parameters_are_the_rounded_fp32_values() -> None:
    info = ParameterInfo(role="linear", init="normal", std=0.02)
    half = nn.Parameter(torch.empty(70, 300, dtype=torch.bfloat16))
    init_parameter_("a", half, info, 1)
    assert torch.equal(half, plain((70, 300)).bfloat16())


def test_parameters_without_storage_are_refused() -> None:
    with pytest.raises(AssertionError, match="a has no storage"):
        init_parameter_("a", torch.empty(2, 2, device="meta"), NORMAL, 1)
