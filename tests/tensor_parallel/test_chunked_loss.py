"""Head and loss in pieces against the plain formulas on whole logits in fp64."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from megalite import comm
from megalite.errors import DataError
from megalite.grid import Axis
from megalite.tensor_parallel import HeadLoss, LossSettings, ParallelContext, WeightGradQueue
from megalite.tensor_parallel.chunked_loss import _HeadLoss
from tests.ranks import run_ranks
from tests.tensor_parallel.helpers import assert_near, context, random, share

S, B, H, PADDED = 12, 3, 10, 48
TERMS = [(0.0, 0.0), (0.1, 0.0), (0.0, 0.03), (0.2, 0.01)]
"""(label smoothing, z-loss)"""


def some_loss(vocab: int = 37, ctx: ParallelContext | None = None, padded: int = PADDED, **settings: Any) -> HeadLoss:
    ctx = ctx or ParallelContext(Axis.single(), False)
    return HeadLoss(ctx=ctx, vocab_size=vocab, padded_vocab_size=padded, settings=LossSettings(**settings))


def some_inputs(vocab: int, dtype: torch.dtype = torch.float64) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """x, weight (its padding is anything but 0), targets, mask."""
    x, weight = random((S, B, H), dtype, 1), random((PADDED, H), dtype, 2)
    targets = torch.randint(vocab, (S, B), generator=torch.Generator().manual_seed(3))
    return x.requires_grad_(), weight.requires_grad_(), targets, (random((S, B), torch.float32, 4) < 0.5).float()


def plain(x: Tensor, weight: Tensor, targets: Tensor, mask: Tensor, vocab: int, smoothing: float, z_loss: float) -> tuple[Tensor, Tensor]:
    """Sum of what is minimised, sum of cross entropy; by torch, on whole logits."""
    logits, weights = F.linear(x, weight)[..., :vocab].flatten(0, 1), mask.flatten()
    smoothed = F.cross_entropy(logits, targets.flatten(), label_smoothing=smoothing, reduction="none")
    minimised = smoothed + z_loss * logits.logsumexp(-1).square()
    return (minimised * weights).sum(), (F.cross_entropy(logits, targets.flatten(), reduction="none") * weights).sum()


def expected_comms(tp: int, sequence_parallel: bool, chunks: int, has_grads: bool) -> list[str]:
    if tp == 1:
        return []
    gather, reduce = (["all_gather"], "reduce_scatter") if sequence_parallel else ([], "all_reduce")
    return gather + ["all_gather"] * chunks + [reduce] * has_grads


def check(ctx: ParallelContext, vocab: int, chunk: int | None, smoothing: float, z_loss: float) -> None:
    tp, scale, chunks = ctx.tp, 0.37, 1 if chunk is None else -(-S * B // chunk)
    x, weight, targets, mask = some_inputs(vocab)
    minimised, cross_entropy = plain(x, weight, targets, mask, vocab, smoothing, z_loss)
    (minimised * scale).backward()
    assert x.grad is not None and weight.grad is not None
    split = tp if ctx.sequence_parallel else Axis.single()
    own_x, own_weight = share(x, split), share(weight, tp)
    loss = some_loss(vocab, ctx, chunk_tokens=chunk, label_smoothing=smoothing, z_loss=z_loss)
    with comm.record_comms(tp) as records:
        found = loss(own_x, own_weight, targets, mask)
        (found[0] * scale).backward()
    assert [record.op for record in records] == expected_comms(tp.size, ctx.sequence_parallel, chunks, True)
    assert_near(found[0], minimised.detach(), "minimised")
    assert_near(found[1], cross_entropy.detach(), "cross entropy")
    assert not found[1].requires_grad
    assert_near(own_x.grad, share(x.grad, split), "dx")
    assert_near(own_weight.grad, share(weight.grad, tp), "dW")
    with torch.no_grad(), comm.record_comms(tp) as records:
        again = loss(own_x, own_weight, targets, mask)
    assert torch.equal(torch.stack(again), torch.stack(found).detach())
    assert [record.op for record in records] == expected_comms(tp.size, ctx.sequence_parallel, chunks, False)


def check_all(tp_size: int, sequence_parallel: bool) -> None:
    ctx = context(tp_size, sequence_parallel)
    for vocab, chunk in [(37, 7), (37, None), (11, 36), (48, 13)]:  # with 11, some ranks have nothing but padding
        check(ctx, vocab, chunk, 0.0, 0.0)
        check(ctx, vocab, chunk, 0.2, 0.01)


@pytest.mark.parametrize(("tp", "sequence_parallel"), [(1, False), (2, True), (2, False), (3, True), (4, True), (4, False)])
def test_equals_the_plain_loss(tp: int, sequence_parallel: bool) -> None:
    run_ranks(check_all, tp, tp, sequence_parallel)


def test_in_backward_nothing_is_sent() -> None:
    run_ranks(check_backward, 2)


def check_backward() -> None:
    ctx = context(2, True)
    x, weight, targets, mask = some_inputs(37)
    minimised, _ = some_loss(ctx=ctx)(share(x, ctx.tp), share(weight, ctx.tp), targets, mask)
    with comm.record_comms(ctx.tp) as records:
        minimised.backward()
    assert not records


@pytest.mark.parametrize(("smoothing", "z_loss"), TERMS)
def test_gradient_is_the_slope(smoothing: float, z_loss: float) -> None:
    x, weight, targets, mask = some_inputs(37)
    loss = some_loss(chunk_tokens=7, label_smoothing=smoothing, z_loss=z_loss)
    loss(x, weight, targets, mask)[0].backward()
    for tensor, seed in ((x, 5), (weight, 6)):
        direction, step, values = random(tuple(tensor.shape), torch.float64, seed), 1e-6, []
        for sign in (1, -1):
            with torch.no_grad():
                moved = [other + sign * step * direction if other is tensor else other for other in (x, weight)]
                values.append(loss(*moved, targets, mask)[0].item())
        assert tensor.grad is not None
        assert (values[0] - values[1]) / (2 * step) == pytest.approx((tensor.grad * direction).sum().item(), rel=1e-6)


@pytest.mark.parametrize("asks", ["x", "weight"])
def test_a_gradient_that_nobody_asks_for_is_not_made(asks: str) -> None:
    x, weight, targets, mask = some_inputs(37)
    some_loss()(x, weight, targets, mask)[0].backward()
    frozen, expected = (weight, x.grad) if asks == "x" else (x, weight.grad)
    assert expected is not None
    asking = x if asks == "x" else weight
    frozen.requires_grad_(False)
    (found,) = torch.autograd.grad(some_loss()(x, weight, targets, mask)[0], asking)
    assert torch.equal(found, expected)


class Largest(TorchDispatchMode):
    """The most elements of any tensor that is made inside."""

    numel = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        self.numel = max(self.numel, *(t.numel() for t in tree_leaves(out) if isinstance(t, Tensor)), 0)
        return out


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_logits_never_exist_at_once(dtype: torch.dtype) -> None:
    x, weight, targets, mask = some_inputs(37, dtype)
    with Largest() as largest:
        some_loss(chunk_tokens=9)(x, weight, targets, mask)[0].backward()
    assert largest.numel == max(9 * PADDED, H * PADDED, S * B * H) < S * B * PADDED


def relative_error(actual: Tensor | None, expected: Tensor | None) -> float:
    assert actual is not None and expected is not None
    return ((actual.double() - expected).norm() / expected.norm()).item()


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
def test_pieces_are_added_in_fp32(dtype: torch.dtype) -> None:
    exact = some_inputs(37)
    rounded = tuple(t.detach().to(dtype).requires_grad_() if t.requires_grad else t for t in exact)
    exact = tuple(t.detach().double().requires_grad_() if t.requires_grad else t for t in rounded)
    plain(*exact, 37, 0.1, 0.01)[0].backward()
    for chunk in (1, 36):
        x, weight, targets, mask = (t.detach().requires_grad_(t.requires_grad) for t in rounded)
        minimised, _ = some_loss(chunk_tokens=chunk, label_smoothing=0.1, z_loss=0.01)(x, weight, targets, mask)
        minimised.backward()
        assert minimised.dtype == torch.float32
        assert x.grad is not None and x.grad.dtype == dtype
        limit = 0.65 * torch.finfo(dtype).eps  # a dW that is added in the type itself is off by 0.75 and more
        assert relative_error(x.grad, exact[0].grad) < limit
        assert relative_error(weight.grad, exact[1].grad) < limit


def fp16_gradients(x: Tensor, weight: Tensor, targets: Tensor, scale: float) -> list[tuple[Tensor, Tensor]]:
    """(ours in fp16, exact) of dx and dW of the mean loss times a loss scale."""
    mask, exact = torch.ones(targets.shape), [t.double().requires_grad_() for t in (x, weight)]
    half = [t.half().requires_grad_() for t in (x, weight)]
    (plain(*exact, targets, mask, len(weight), 0.0, 0.0)[0] * scale).backward()
    (some_loss(len(weight), padded=len(weight))(*half, targets, mask)[0] * scale).backward()
    return [(a.grad, b.grad) for a, b in zip(half, exact, strict=True)]  # type: ignore[misc]


def test_fp16_keeps_small_probabilities_and_large_sums() -> None:
    weight = torch.zeros(64, 8)
    weight[:, 0] = -16.0  # probabilities of 1e-7, which fp16 hardly has; the loss scale alone would not bring them back
    weight[0, 0] = 0.0
    x = random((64, 4, 8), torch.float32, 1)
    x[..., 0] = 1.0
    _, (dw, expected) = fp16_gradients(x, weight, torch.zeros(64, 4, dtype=torch.int64), 2.0**12)
    assert relative_error(dw[1:], expected[1:]) < 0.05
    # one target for 2048 tokens of large hidden states: their sum, 2e5, is beyond fp16, the mean is not
    x = torch.full((512, 4, 8), 100.0)
    for found, exact in fp16_gradients(x, torch.zeros(64, 8), torch.full((512, 4), 5), 1 / 2048):
        assert found.isfinite().all()
        assert (found - exact).abs().max() <= 2e-3 * exact.abs().max()


def test_weight_gradients_wait_for_w() -> None:
    x, weight, targets, mask = some_inputs(37, torch.float32)
    queue = WeightGradQueue()
    loss = some_loss(ctx=ParallelContext(Axis.single(), False, weight_grads=queue), chunk_tokens=7)
    (loss(x, weight, targets, mask)[0] * 0.3).backward()
    whole = x.grad, weight.grad
    x.grad = weight.grad = None
    minimised, _ = loss(x, weight, targets, mask)
    with queue.collect() as deferred:
        (minimised * 0.3).backward()
    assert weight.grad is None and len(deferred) == 1
    deferred.run()
    assert all(a is not None and b is not None and torch.equal(a, b) for a, b in zip(whole, (x.grad, weight.grad), strict=True))


def test_a_second_backward_is_refused_and_not_wrong() -> None:
    minimised, _ = some_loss()(*some_inputs(37))
    minimised.backward(retain_graph=True)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        minimised.backward()


def test_bad_targets_are_refused_on_the_cpu_and_nan_elsewhere() -> None:
    x, weight, targets, mask = some_inputs(37)
    mask[1, 2] = 1.0
    targets[1, 2] = 37
    with pytest.raises(DataError, match="to 37, but the vocabulary has 37"):
        some_loss()(x, weight, targets, mask)
    minimised, _ = _HeadLoss.apply(x, weight, targets, mask, some_loss())  # type: ignore[misc]  # what other devices compute
    assert minimised.isnan()
    minimised.backward()
    assert x.grad is not None
    assert x.grad.isnan().any(-1).nonzero().tolist() == [[1, 2]]


def test_size_of_a_piece() -> None:
    assert LossSettings(chunk_tokens=7).most_tokens(8192, "cpu") == 7
    assert LossSettings().most_tokens(8192, "cpu") == 512
    assert LossSettings().most_tokens(8192, "cuda") == 8192
    assert LossSettings().most_tokens(10**6, "cpu") == 128


def test_a_gathered_weight_is_refused() -> None:
    x, weight, targets, mask = some_inputs(37)
    with pytest.raises(AssertionError, match="is not a share of 96 rows"):
        some_loss(padded=96)(x, weight, targets, mask)
