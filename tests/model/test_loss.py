"""The loss of the head's stage: pieces, label smoothing and z-loss, training and evaluation."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from megalite.grid import Axis
from megalite.model import GPTStage, materialize
from megalite.pipeline.partition import StageSpec
from megalite.tensor_parallel import LossSettings, ParallelContext
from tests.model.helpers import SEED, full_gradients, full_parameters, tiny_batch, tiny_config, tiny_stages
from tests.model.reference import reference_logits


def stage_with(loss: LossSettings, **changes: Any) -> GPTStage:
    config, ctx = tiny_config(num_layers=1, **changes), ParallelContext(Axis.single(), False, device="meta")
    stage = GPTStage(config, StageSpec(0, 0, 1, True, True), ctx, num_stages=1, seed=SEED, loss=loss)
    materialize(stage, "", "cpu", SEED)
    return stage


def gradients(stage: GPTStage) -> tuple[Tensor, dict[str, Tensor]]:
    loss = stage(None, tiny_batch())
    loss.backward()
    return loss.detach(), full_gradients(stage)


@pytest.mark.parametrize("tied", [False, True])
def test_shown_is_cross_entropy_and_minimised_is_more(tied: bool) -> None:
    changes, batch = dict(untie_embeddings_and_output_weights=not tied), tiny_batch()
    stage = stage_with(LossSettings(chunk_tokens=10, label_smoothing=0.2, z_loss=0.05), **changes)
    shown, grads = gradients(stage)
    plain, plain_grads = gradients(stage_with(LossSettings(), **changes))
    torch.testing.assert_close(shown, plain, rtol=1e-6, atol=0)
    assert all(torch.isfinite(grad).all() for grad in plain_grads.values())

    params = {name: value.requires_grad_() for name, value in full_parameters(stage).items()}
    logits = reference_logits(params, stage.config, batch.tokens, batch.position_ids).flatten(0, 1)
    losses = F.cross_entropy(logits, batch.labels.flatten(), label_smoothing=0.2, reduction="none")
    ((losses + 0.05 * logits.logsumexp(-1).square()) * batch.loss_mask.flatten()).sum().backward()
    for name, grad in grads.items():
        expected = params[name].grad
        assert expected is not None
        torch.testing.assert_close(grad, expected, atol=1e-4, rtol=1e-3, msg=lambda text, name=name: f"{name}: {text}")
        assert not torch.allclose(grad, plain_grads[name], rtol=1e-2), f"{name} does not see the terms"

    stage.eval()
    with torch.no_grad():
        assert torch.equal(stage(None, batch), shown)


@pytest.mark.parametrize("tied", [False, True])
def test_pieces_change_rounding_only(tied: bool) -> None:
    changes = dict(untie_embeddings_and_output_weights=not tied)
    whole, expected = gradients(stage_with(LossSettings(chunk_tokens=10**6), **changes))
    loss, grads = gradients(stage_with(LossSettings(chunk_tokens=5), **changes))
    torch.testing.assert_close(loss, whole, rtol=1e-6, atol=0)
    for name, grad in grads.items():
        assert (grad - expected[name]).norm() <= 1e-6 * expected[name].norm() + 1e-7, name


def test_default_is_the_same_function_as_plain_logits() -> None:
    stage, batch = tiny_stages(tiny_config())[0], tiny_batch()
    logits = stage.logits(None, batch)[..., :131].transpose(0, 1).flatten(0, 1)
    expected = (F.cross_entropy(logits, batch.labels.flatten(), reduction="none") * batch.loss_mask.flatten()).sum()
    torch.testing.assert_close(stage(None, batch), expected, rtol=1e-6, atol=0)
