"""Cross entropy and argmax on cut logits against the plain functions on the valid columns."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from megalite import comm
from megalite.errors import DataError
from megalite.grid import Axis
from megalite.tensor_parallel import vocab_parallel_argmax, vocab_parallel_cross_entropy
from megalite.tensor_parallel.cross_entropy import _CrossEntropy
from tests.ranks import run_ranks
from tests.tensor_parallel.helpers import assert_near, random, share, tp_axis

S, B, PADDED = 5, 3, 48


def padded_logits(vocab: int, scale: float, dtype: torch.dtype, padding: float) -> Tensor:
    logits = random((S, B, PADDED), dtype, 1) * scale
    logits[..., vocab:] = padding
    return logits.requires_grad_()


def some_targets(vocab: int) -> Tensor:
    return torch.randint(vocab, (B, S), generator=torch.Generator().manual_seed(2)).t()


def check_loss(tp_size: int, vocab: int, scale: float, dtype: torch.dtype, padding: float) -> None:
    tp = tp_axis(tp_size)
    logits, targets, dloss = padded_logits(vocab, scale, dtype, padding), some_targets(vocab), random((S, B), dtype, 3)
    wide = torch.promote_types(dtype, torch.float32)
    plain = F.cross_entropy(logits[..., :vocab].to(wide).movedim(-1, 1), targets, reduction="none")
    (plain * dloss).sum().backward()
    assert logits.grad is not None

    local = share(logits, tp, -1)
    with comm.record_comms(tp) as records:
        loss = vocab_parallel_cross_entropy(local, targets, vocab_size=vocab, padded_vocab_size=PADDED, tp=tp)
        forward = len(records)
        (loss * dloss).sum().backward()
    assert forward == len(records) == (0 if tp_size == 1 else 2)
    assert {record.op for record in records} <= {"all_reduce"}
    assert loss.dtype == wide
    assert_near(loss, plain.detach(), "loss")
    assert local.grad is not None
    assert_near(local.grad, share(logits.grad, tp, -1), "gradient")
    num_valid = max(0, vocab - tp.rank * local.shape[-1])
    assert not local.grad[..., num_valid:].any(), "padding has a gradient"


CASES = [(37, 1.0, 0.0), (37, 1.0, float("nan")), (37, 1e4, 3e4), (11, 1.0, float("inf")), (48, 1.0, 0.0)]


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16], ids=str)
@pytest.mark.parametrize("tp", [1, 2, 4])
@pytest.mark.parametrize(("vocab", "scale", "padding"), CASES)
def test_loss_equals_the_plain_one(tp: int, vocab: int, scale: float, padding: float, dtype: torch.dtype) -> None:
    run_ranks(check_loss, tp, tp, vocab, scale, dtype, padding)


def check_input_is_kept() -> None:
    tp = tp_axis(2)
    local = share(padded_logits(37, 1.0, torch.float32, 0.0), tp, -1)
    before, targets = local.detach().clone(), some_targets(37)
    loss = vocab_parallel_cross_entropy(local, targets, vocab_size=37, padded_vocab_size=PADDED, tp=tp).sum()
    loss.backward(retain_graph=True)
    assert torch.equal(local.detach(), before)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):  # and not a wrong gradient
        loss.backward()


def test_logits_are_not_changed_and_a_second_backward_is_refused() -> None:
    run_ranks(check_input_is_kept, 2)


def test_bad_targets_are_refused_on_the_cpu_and_nan_elsewhere() -> None:
    logits, targets = padded_logits(37, 1.0, torch.float32, 0.0), some_targets(37)
    targets[1, 2] = 37
    with pytest.raises(DataError, match="to 37, but the vocabulary has 37"):
        vocab_parallel_cross_entropy(logits, targets, vocab_size=37, padded_vocab_size=PADDED, tp=Axis.single())
    targets[2, 0] = -1
    loss = _CrossEntropy.apply(logits, targets, 37, Axis.single())  # what other devices compute
    assert loss.isnan().nonzero().tolist() == [[1, 2], [2, 0]]  # type: ignore[union-attr]
    loss.sum().backward()  # type: ignore[union-attr]
    assert logits.grad is not None
    assert logits.grad.isnan().any(-1).nonzero().tolist() == [[1, 2], [2, 0]]


def check_gathered_logits() -> None:
    tp = tp_axis(2)
    gathered, targets = padded_logits(37, 1.0, torch.float32, 0.0), some_targets(37)
    with pytest.raises(AssertionError, match="width 48 on 2 tp ranks are not the shares of 48 columns"):
        vocab_parallel_cross_entropy(gathered, targets, vocab_size=37, padded_vocab_size=PADDED, tp=tp)
    with pytest.raises(AssertionError, match="gathered"):
        vocab_parallel_argmax(gathered, vocab_size=37, padded_vocab_size=PADDED, tp=tp)


def test_gathered_logits_are_refused() -> None:
    run_ranks(check_gathered_logits, 2)


def check_argmax(tp_size: int, vocab: int, dtype: torch.dtype) -> None:
    tp = tp_axis(tp_size)
    logits = padded_logits(vocab, 1.0, dtype, 100.0).detach()
    logits[0, 0, :vocab] = 7.0  # all equal: the first
    logits[1, 1, 5] = logits[1, 1, vocab - 1] = 50.0
    logits[2, 2, :vocab] = float("-inf")
    logits[2, 2, vocab - 1] = -3.0
    with comm.record_comms(tp) as records:
        best = vocab_parallel_argmax(share(logits, tp, -1), vocab_size=vocab, padded_vocab_size=PADDED, tp=tp)
    assert len(records) == (0 if tp_size == 1 else 2)
    # bf16 logits collide: "the lowest of the greatest" in words that do not depend on how argmax breaks ties
    valid = logits[..., :vocab]
    columns = torch.arange(vocab).expand_as(valid)
    expected = columns.masked_fill(valid != valid.amax(-1, keepdim=True), vocab).amin(-1)
    assert best.dtype == torch.int64
    assert torch.equal(best, expected)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("vocab", [37, 11])
@pytest.mark.parametrize("tp", [1, 2, 4])
def test_argmax_is_the_lowest_valid_column(tp: int, vocab: int, dtype: torch.dtype) -> None:
    run_ranks(check_argmax, tp, tp, vocab, dtype)
