"""Attention beyond what the whole model's tests show: kernels' choice, heads that cannot be split."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from megalite.errors import ConfigError
from megalite.grid import Axis, Grid, GridShape
from megalite.model import attention
from megalite.model.attention import Attention, attention_mask, needs_repeated_heads
from megalite.tensor_parallel.parameter import ParallelContext
from tests.model.helpers import full_gradients, full_parameters, tiny_batch, tiny_config, tiny_documents, tiny_stages
from tests.model.reference import reference_loss_sum
from tests.ranks import run_ranks


def test_only_fp32_on_gpus_repeats_heads() -> None:
    cpu, cuda = torch.device("cpu"), torch.device("cuda")
    assert needs_repeated_heads(cuda, torch.float32)
    assert not needs_repeated_heads(cuda, torch.bfloat16)
    assert not needs_repeated_heads(cpu, torch.float32)


def test_repeated_heads_give_the_same_numbers(monkeypatch: pytest.MonkeyPatch) -> None:
    stages = [tiny_stages(tiny_config())[0] for _ in range(2)]
    losses = [stages[0](None, tiny_batch())]
    monkeypatch.setattr(attention, "needs_repeated_heads", lambda device, dtype, masked: True)
    losses.append(stages[1](None, tiny_batch()))
    torch.testing.assert_close(losses[0], losses[1], rtol=1e-6, atol=0)
    for loss in losses:
        loss.backward()
    grads = [full_gradients(stage) for stage in stages]
    for name, grad in grads[0].items():
        torch.testing.assert_close(grad, grads[1][name], atol=1e-4, rtol=1e-4)


def test_no_token_sees_a_later_one() -> None:
    stage, batch = tiny_stages(tiny_config())[0], tiny_batch()
    logits = stage.logits(None, batch)
    batch.tokens[:, 7] = (batch.tokens[:, 7] + 1) % 131
    changed = stage.logits(None, batch)
    assert torch.equal(logits[:7], changed[:7])
    assert (logits[7:] != changed[7:]).any(dim=-1).all()


@pytest.mark.parametrize(
    ("heads", "kv_heads", "tp", "match"),
    [
        (8, 3, 1, "8 query heads cannot share 3"),
        (6, 2, 4, "6 query heads cannot be split over 4"),
        (12, 4, 6, "one must"),
    ],
)
def test_heads_that_cannot_be_split_are_refused(heads: int, kv_heads: int, tp: int, match: str) -> None:
    config = tiny_config(num_attention_heads=heads, num_query_groups=kv_heads)
    axis = Axis("tp", tp, 0, tuple(range(tp)))
    with pytest.raises(ConfigError, match=match):
        Attention(config, ParallelContext(tp=axis, sequence_parallel=False, device="meta"))


def documents_loss(tp: Axis, sequence_parallel: bool, num_stages: int = 1) -> tuple[Tensor, dict[str, Tensor], dict[str, Tensor]]:
    """Loss, whole gradients and whole parameters of the model on tp ranks, with documents in the batch."""
    stages = tiny_stages(tiny_config(), num_stages, tp, sequence_parallel=sequence_parallel)
    batch, hidden = tiny_documents(tiny_batch()), None
    for stage in stages:
        hidden = stage(hidden, batch)
    assert hidden is not None
    hidden.backward()
    grads = {name: grad for stage in stages for name, grad in full_gradients(stage).items()}
    return hidden.detach(), grads, {name: value for stage in stages for name, value in full_parameters(stage).items()}


def check_documents_loss(found: tuple[Tensor, dict[str, Tensor], dict[str, Tensor]]) -> None:
    """Equal to the formulas with a mask made token by token, and not to those without one."""
    loss, grads, params = found
    for value in params.values():
        value.requires_grad_()
    batch = tiny_documents(tiny_batch())
    expected = reference_loss_sum(params, tiny_config(), batch)
    expected.backward()
    torch.testing.assert_close(loss, expected.detach(), atol=0, rtol=1e-6)
    assert abs(reference_loss_sum(params, tiny_config(), tiny_batch()) - expected) > 0.1
    assert grads.keys() == params.keys()
    for name, grad in grads.items():
        torch.testing.assert_close(grad, params[name].grad, atol=1e-4, rtol=1e-3, msg=lambda text, name=name: f"{name}: {text}")


@pytest.mark.parametrize("num_stages", [1, 3])
def test_tokens_attend_within_their_document(num_stages: int) -> None:
    check_documents_loss(documents_loss(Axis.single(), False, num_stages))


def documents_on_ranks(sequence_parallel: bool) -> tuple[Tensor, dict[str, Tensor], dict[str, Tensor]] | None:
    grid = Grid.build(GridShape(tp=2))
    result = documents_loss(grid.tp, sequence_parallel)
    return result if grid.rank == 0 else None


@pytest.mark.parametrize("sequence_parallel", [True, False])
def test_tokens_attend_within_their_document_on_tp_ranks(sequence_parallel: bool) -> None:
    check_documents_loss(run_ranks(documents_on_ranks, 2, sequence_parallel)[0])


def test_a_document_is_computed_as_if_it_were_alone() -> None:
    """What stands before it changes nothing, and its first token sees only itself."""
    stage, batch = tiny_stages(tiny_config())[0], tiny_documents(tiny_batch())
    mask = attention_mask(batch.tokens.shape[1], batch.document_ids, None, torch.device("cpu"))
    assert mask.shape == (3, 1, 12, 12)
    assert mask[0, 0, 5].nonzero().flatten().tolist() == [5]
    assert mask[0, 0, 10].nonzero().flatten().tolist() == [5, 6, 7, 8, 9, 10]
    logits = stage.logits(None, batch)
    batch.tokens[0, :5] = (batch.tokens[0, :5] + 1) % 131
    changed = stage.logits(None, batch)
    assert torch.equal(logits[5:], changed[5:])
    assert not torch.equal(logits[:5, 0], changed[:5, 0])


def test_a_mask_on_gpus_repeats_heads() -> None:
    assert needs_repeated_heads(torch.device("cuda"), torch.bfloat16, masked=True)
    assert not needs_repeated_heads(torch.device("cpu"), torch.float32, masked=True)


def test_a_window_reaches_so_many_tokens_back_itself_included() -> None:
    mask = attention_mask(7, None, 3, torch.device("cpu"))
    assert mask is not None
    seen = [[int(j) for j in mask[0, 0, i].nonzero().flatten()] for i in range(7)]
    assert seen == [[0], [0, 1], [0, 1, 2], [1, 2, 3], [2, 3, 4], [3, 4, 5], [4, 5, 6]]
    assert attention_mask(7, None, 7, torch.device("cpu")) is None


def test_a_window_ends_at_the_border_of_a_document() -> None:
    mask = attention_mask(5, torch.tensor([[0, 0, 0, 1, 1]]), 2, torch.device("cpu"))
    assert mask is not None
    assert [[int(j) for j in mask[0, 0, i].nonzero().flatten()] for i in range(5)] == [[0], [0, 1], [1, 2], [3], [3, 4]]
