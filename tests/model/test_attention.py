"""Attention beyond what the whole model's tests show: kernels' choice, heads that cannot be split."""

from __future__ import annotations

import pytest
import torch

from megalite.errors import ConfigError
from megalite.grid import Axis
from megalite.model import attention
from megalite.model.attention import Attention, needs_repeated_heads
from megalite.tensor_parallel.parameter import ParallelContext
from tests.model.helpers import full_gradients, tiny_batch, tiny_config, tiny_stages


def test_only_fp32_on_gpus_repeats_heads() -> None:
    cpu, cuda = torch.device("cpu"), torch.device("cuda")
    assert needs_repeated_heads(cuda, torch.float32)
    assert not needs_repeated_heads(cuda, torch.bfloat16)
    assert not needs_repeated_heads(cpu, torch.float32)


def test_repeated_heads_give_the_same_numbers(monkeypatch: pytest.MonkeyPatch) -> None:
    stages = [tiny_stages(tiny_config())[0] for _ in range(2)]
    losses = [stages[0](None, tiny_batch())]
    monkeypatch.setattr(attention, "needs_repeated_heads", lambda device, dtype: True)
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
