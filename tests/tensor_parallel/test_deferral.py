"""Split backward passes: the bits of a whole one, in two halves."""

from __future__ import annotations

import gc
import weakref

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from megalite.comm import count_comms, record_comms
from megalite.grid import Axis, Grid, GridShape
from megalite.tensor_parallel import (
    ColumnParallelLinear,
    ParallelContext,
    RowParallelLinear,
    VocabParallelEmbedding,
    WeightGradQueue,
    column_parallel_layers,
    init_module_,
)
from megalite.tensor_parallel.deferral import add_later
from tests.ranks import run_ranks

S, B, H, OUT, V = 8, 3, 10, 12, 20


class Toy(nn.Module):
    """Embedding, q/k-like pair with a kv head fewer than ranks, a row-parallel layer, a norm vector, the embedding again as head."""

    def __init__(self, ctx: ParallelContext) -> None:
        super().__init__()
        self.ctx = ctx
        self.embedding = VocabParallelEmbedding(V, H, ctx, std=1.0, valid_rows=V - 1)
        self.q = ColumnParallelLinear(H, OUT, ctx, bias=True, std=0.5)
        self.k = ColumnParallelLinear(H, 6, ctx, bias=False, std=0.5, num_shards=1)
        self.down = RowParallelLinear(OUT, H, ctx, bias=True, std=0.5)
        self.scale = nn.Parameter(torch.ones(H))

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.embedding(tokens)
        x = F.rms_norm(x, (H,), add_later(self.scale, self.ctx.weight_grads))
        q, k = column_parallel_layers(x, [self.q, self.k])
        x = self.down(torch.tanh(q) * k.mean())
        again = self.embedding(tokens.flip(0))
        return (x * again).sum()


def toy(tp: Axis, sequence_parallel: bool, queue: WeightGradQueue | None) -> Toy:
    model = Toy(ParallelContext(tp=tp, sequence_parallel=sequence_parallel, weight_grads=queue))
    init_module_(model.embedding, "embedding.", 1)
    for name in ("q", "k", "down"):
        init_module_(getattr(model, name), f"{name}.", 1)
    return model


def tokens(step: int) -> Tensor:
    return torch.randint(0, V - 1, (S, B), generator=torch.Generator().manual_seed(step))


def local_grads(model: Toy) -> dict[str, Tensor]:
    found = {name: parameter.grad for name, parameter in model.named_parameters()}
    assert all(grad is not None for grad in found.values())
    return {name: (grad.to_local() if hasattr(grad, "to_local") else grad) for name, grad in found.items()}  # type: ignore[union-attr]


def split_and_whole(tp_size: int, sequence_parallel: bool) -> list[str]:
    """Names whose gradients differ in any bit after three micro-batches of which two are in flight."""
    tp = Grid.build(GridShape(tp=tp_size)).tp
    whole = toy(tp, sequence_parallel, None)
    queue = WeightGradQueue()
    split = toy(tp, sequence_parallel, queue)
    waiting = []
    for step in range(3):
        whole(tokens(step)).backward()
        with queue.collect() as deferred:
            split(tokens(step)).backward()
        waiting.append(deferred)
        if step:
            waiting.pop(0).run()
    assert len(waiting[0]) > 0
    waiting.pop().run()
    expected = local_grads(whole)
    return [name for name, grad in local_grads(split).items() if not torch.equal(grad, expected[name])]


@pytest.mark.parametrize(("tp_size", "sequence_parallel"), [(1, False), (2, False), (2, True)])
def test_split_gradients_have_the_bits_of_whole_ones(tp_size: int, sequence_parallel: bool) -> None:
    assert run_ranks(split_and_whole, tp_size, tp_size, sequence_parallel) == [[]] * tp_size


def test_nothing_is_added_before_w_and_everything_after() -> None:
    queue = WeightGradQueue()
    model = toy(Axis.single(), False, queue)
    with queue.collect() as deferred:
        model(tokens(0)).backward()
    assert all(parameter.grad is None for parameter in model.parameters())
    deferred.run()
    assert all(parameter.grad is not None for parameter in model.parameters())
    assert len(deferred) == 0


def test_frozen_parameters_stay_without_gradients() -> None:
    queue = WeightGradQueue()
    model = toy(Axis.single(), False, queue)
    model.q.requires_grad_(False)
    with queue.collect() as deferred:
        model(tokens(0)).backward()
    deferred.run()
    assert model.q.weight.grad is None
    assert model.k.weight.grad is not None


def test_an_open_queue_changes_no_whole_backward_outside() -> None:
    queue = WeightGradQueue()
    model, whole = toy(Axis.single(), False, queue), toy(Axis.single(), False, None)
    model(tokens(0)).backward()
    whole(tokens(0)).backward()
    expected = local_grads(whole)
    assert all(torch.equal(grad, expected[name]) for name, grad in local_grads(model).items())


def test_input_gradient_pass_frees_what_no_weight_gradient_needs() -> None:
    queue = WeightGradQueue()
    ctx = ParallelContext(tp=Axis.single(), sequence_parallel=False, weight_grads=queue)
    layer = ColumnParallelLinear(H, OUT, ctx, bias=False, std=1.0)
    init_module_(layer, "q.", 1)
    x = torch.randn(S, B, H, requires_grad=True)
    activation = torch.exp(layer(x))  # exp keeps its result for the backward, no weight gradient needs it
    freed, kept = weakref.ref(activation), weakref.ref(x)
    with queue.collect() as deferred:
        activation.sum().backward()
    del activation, x
    gc.collect()
    assert freed() is None
    assert kept() is not None
    deferred.run()
    gc.collect()
    assert kept() is None


def collectives_of_halves(sequence_parallel: bool) -> tuple[dict, dict]:
    grid = Grid.build(GridShape(tp=2))
    queue = WeightGradQueue()
    model = toy(grid.tp, sequence_parallel, queue)
    loss = model(tokens(0))
    with record_comms(grid.tp) as in_input_grad, queue.collect() as deferred:
        loss.backward()
    with record_comms(grid.tp) as in_weight_grad:
        deferred.run()
    return count_comms(in_input_grad), count_comms(in_weight_grad)


def test_only_the_shared_input_is_gathered_for_weight_gradients() -> None:
    plain, sequence = run_ranks(collectives_of_halves, 2, False)[0], run_ranks(collectives_of_halves, 2, True)[0]
    assert plain == ({("all_reduce", "tp"): 1}, {})
    assert sequence == ({("reduce_scatter", "tp"): 1, ("all_gather", "tp"): 3}, {("all_gather", "tp"): 1})
