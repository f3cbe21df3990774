"""Parameter groups by role and by regular expression."""

from __future__ import annotations

import pytest
import torch

from megalite.config import OptimConfig
from megalite.config_multipliers import Multipliers
from megalite.errors import ConfigError
from megalite.optim import Optimizer
from tests.data_parallel import toy
from tests.optim.test_skip import set_grads
from tests.ranks import run_ranks


def test_requirement_59_roles_decide_before_wrapping_and_counts_say_so() -> None:
    """A slice of a bias that has two dimensions, or of a table that has one, changes nothing: roles are asked, not shapes."""
    whole, cut = run_ranks(counts_of, 1, {}, 0), run_ranks(counts_of, 6, {"dp_shard": 3, "tp": 2}, 3)
    assert set(map(str, cut)) == {str(whole[0])}
    decay, no_decay = whole[0]["decay"], whole[0]["no_decay"]
    assert (decay[0], no_decay[0]) == (3 * toy.NUM_LAYERS + 2, 3 * toy.NUM_LAYERS + 1)


def counts_of(sizes: dict[str, int], zero: int) -> dict[str, tuple[int, int]]:
    grid = toy.grid_of(**sizes)
    return Optimizer(toy.parameters_of(toy.build(grid, zero)), OptimConfig(), grid).group_counts


def test_the_last_match_counts_and_norms_that_are_matched_decay() -> None:
    config = OptimConfig(
        weight_decay=0.3,
        lr_multipliers=(r"^layers\.=0.5", r"up$=0", r"layers\.1\..*=2"),
        weight_decay_multipliers=("head=0", r"layers\.0\.scale=2"),
    )
    stage, plain = toy.build_plain(), toy.build_plain()
    optimizer, twin = (
        Optimizer(toy.collect_parameters([each]), each_config) for each, each_config in ((stage, config), (plain, OptimConfig()))
    )
    before = {name: value.detach().clone() for name, value in stage.named_parameters()}
    set_grads(stage, 0, 0.0)  # what is left of an update is the decay
    optimizer.step(0.1)
    for name, value in stage.named_parameters():
        rate = 0.1 * (2 if "layers.1." in name else 0 if name.endswith("up") else 0.5 if "layers." in name else 1)
        decay = 0.6 if name == "layers.0.scale" else 0.0 if "head" in name or name.endswith(("scale", "bias", "gain")) else 0.3
        torch.testing.assert_close(value.detach(), before[name] * (1 - rate * decay), msg=name)
    decayed, undecayed = optimizer.group_counts["decay"], optimizer.group_counts["no_decay"]
    assert (decayed[0], undecayed[0]) == (3 * toy.NUM_LAYERS + 2, 3 * toy.NUM_LAYERS + 1)  # the head left, a norm came
    assert sum(number for number, _ in optimizer.setting_counts.values()) == 6 * toy.NUM_LAYERS + 3
    assert optimizer.setting_counts["adam, lr x 0.5, weight decay 0.6"] == (1, toy.H)
    assert sum(size for _, size in optimizer.setting_counts.values()) == sum(size for _, size in twin.group_counts.values())


def test_an_expression_that_is_found_nowhere_is_named_with_names_near_it() -> None:
    config = OptimConfig(lr_multipliers=("up=2", "embeding.weight=2"), weight_decay_multipliers=("hed=1",))
    with pytest.raises(ConfigError) as caught:
        Optimizer(toy.collect_parameters([toy.build_plain()]), config)
    assert len(caught.value.violations) == 1
    assert "'embeding.weight'" in caught.value.violations[0]
    assert caught.value.violations[0].split("near it are ")[1].startswith("embedding.weight")


def names_over_pp() -> str:
    """Each pipeline rank has a part of the names; an expression for the head is not an error on the first one."""
    grid = toy.grid_of(pp=2)
    stages = toy.build(grid, 0, numbers=[grid.pp.rank], num_stages=2)
    optimizer = Optimizer(toy.parameters_of(stages), OptimConfig(lr_multipliers=("head=3",)), grid)
    return ", ".join(optimizer.setting_counts)


def test_names_are_those_of_the_whole_model() -> None:
    first, last = run_ranks(names_over_pp, 2)
    assert ("lr x 3" in first, "lr x 3" in last) == (False, True)


def test_entries_that_cannot_be_read_are_reported_together() -> None:
    with pytest.raises(ConfigError) as caught:
        Multipliers.parse(["a", "=2", "b=", "c=-1", "d=inf", "(=2", "e=f=2"], "lr_multipliers")
    assert len(caught.value.violations) == 6
    assert all("lr_multipliers" in violation for violation in caught.value.violations)
    assert Multipliers.parse(["e=f=2"], "x").factor_of("we=fg") == 2.0
