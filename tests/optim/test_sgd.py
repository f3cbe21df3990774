"""SGD: torch's, decay by role."""

from __future__ import annotations

import pytest
import torch

from megalite.config import OptimConfig
from megalite.optim import Optimizer
from tests.data_parallel import toy
from tests.optim.test_skip import set_grads


@pytest.mark.parametrize("momentum", [0.0, 0.8])
def test_equals_torch_sgd_with_coupled_decay_by_role(momentum: float) -> None:
    stage, twin = toy.build_plain(), toy.build_plain()
    config = OptimConfig(optimizer="sgd", sgd_momentum=momentum, weight_decay=0.3)
    optimizer = Optimizer(toy.collect_parameters([stage]), config)
    decayed = ("weight", "up", "down", "mix")
    groups = [{"params": [], "weight_decay": 0.3}, {"params": [], "weight_decay": 0.0}]
    for name, parameter in twin.named_parameters():
        groups[0 if name.split(".")[-1] in decayed else 1]["params"].append(parameter)
    reference = torch.optim.SGD(groups, lr=0.1, momentum=momentum)
    for step, lr in enumerate([0.01, 0.03, 0.02]):
        set_grads(stage, step)
        set_grads(twin, step)
        optimizer.step(lr)
        for group in reference.param_groups:
            group["lr"] = lr
        reference.step()
    for (name, found), expected in zip(stage.named_parameters(), twin.parameters(), strict=True):
        torch.testing.assert_close(found, expected, rtol=1e-6, atol=1e-7, msg=name)
    assert {key for moments in optimizer.named_state().values() for key in moments} == {"momentum_buffer"}
