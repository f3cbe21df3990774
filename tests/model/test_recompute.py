"""What a block keeps: gradients bit for bit, bytes and collectives of every granularity, and the two halves of a split backward."""

from __future__ import annotations

import gc
import weakref
from collections import Counter
from dataclasses import replace

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor
from torch.autograd.graph import saved_tensors_hooks

from megalite.comm import count_comms, record_comms
from megalite.config import ModelConfig
from megalite.config_numerics import RECOMPUTE_MODULES, MemoryConfig
from megalite.grid import Axis, Grid, GridShape
from megalite.model import GPTStage, materialize
from megalite.model.block import Block, Pass
from megalite.model.recompute import BlockMemory, block_memory, droppable, forgetting, offloading
from megalite.model.rope import Rotary
from megalite.pipeline.partition import split_layers
from megalite.tensor_parallel import ParallelContext, WeightGradQueue
from megalite.tensor_parallel.deferral import DeferredGrads
from megalite.tensor_parallel.parameter import to_local
from tests.model.helpers import GPT_STYLE, SEED, tiny_batch, tiny_config
from tests.ranks import run_ranks

FULL = MemoryConfig(recompute_granularity="full")


def selective(*modules: str) -> MemoryConfig:
    return MemoryConfig(recompute_granularity="selective", recompute_modules=modules)


PLANS = {
    **{name: selective(name) for name in RECOMPUTE_MODULES},
    "norm, core_attn, mlp_act": selective("norm", "core_attn", "mlp_act"),
    "norm, attention, mlp": selective("norm", "attention", "mlp"),
    "two of three blocks, full": MemoryConfig(recompute_granularity="full", recompute_num_layers=2),
    "full": FULL,
}


def stage_for(
    config: ModelConfig,
    memory: MemoryConfig,
    tp: Axis | None = None,
    *,
    sequence_parallel: bool = False,
    queue: WeightGradQueue | None = None,
) -> GPTStage:
    ctx = ParallelContext(tp=tp or Axis.single(), sequence_parallel=sequence_parallel, device="meta", weight_grads=queue)
    stage = GPTStage(config, split_layers(config.num_layers, 1)[0], ctx, num_stages=1, seed=SEED, memory=memory)
    materialize(stage, "", "cpu", SEED)
    return stage


def gradients(stage: GPTStage, queue: WeightGradQueue | None = None) -> dict[str, Tensor]:
    """Of two micro-batches in flight; with a queue, backward passes are split and both I come before both W."""
    losses = [stage(None, tiny_batch(first_sample)) for first_sample in (0, 3)]
    halves = []
    for loss in losses:
        if queue is None:
            loss.backward()
        else:
            with queue.collect() as deferred:
                loss.backward()
            halves.append(deferred)
    for half in halves:
        half.run()
    found = {}
    for name, parameter in stage.named_parameters():
        assert parameter.grad is not None, name
        found[name] = parameter.grad.clone()
        parameter.grad = None
    return found


def differing(a: dict[str, Tensor], b: dict[str, Tensor]) -> list[str]:
    assert a.keys() == b.keys()
    return [name for name in a if not torch.equal(to_local(a[name]), to_local(b[name]))]


def same_bits(found: list[Tensor | None], expected: list[Tensor | None]) -> bool:
    return all(a is not None and b is not None and torch.equal(a, b) for a, b in zip(found, expected, strict=True))


LLAMA = tiny_config(num_layers=3, hidden_dropout=0.2, attention_dropout=0.1, untie_embeddings_and_output_weights=False)
GPT = tiny_config(num_layers=3, hidden_dropout=0.2, **GPT_STYLE)


@pytest.mark.parametrize("plan", PLANS)
@pytest.mark.parametrize("config", [LLAMA, GPT], ids=["llama, tied", "gpt"])
def test_gradients_have_the_same_bits(config: ModelConfig, plan: str) -> None:
    reference = gradients(stage_for(config, MemoryConfig()))
    assert differing(gradients(stage_for(config, PLANS[plan])), reference) == []
    queue = WeightGradQueue()
    assert differing(gradients(stage_for(config, PLANS[plan], queue=queue), queue), reference) == []


def gradients_over_tp(sequence_parallel: bool) -> list[str]:
    grid = Grid.build(GridShape(tp=2), "cpu")
    config = replace(LLAMA, num_query_groups=1, num_layers=2)  # fewer key/value heads than ranks: targets are slices of their parameters
    reference = gradients(stage_for(config, MemoryConfig(), grid.tp, sequence_parallel=sequence_parallel))
    wrong = []
    for plan in ("norm, core_attn, mlp_act", "norm, attention, mlp", "full"):
        memory, queue = PLANS[plan], WeightGradQueue()
        for kept in (None, queue):
            stage = stage_for(config, memory, grid.tp, sequence_parallel=sequence_parallel, queue=kept)
            wrong += [f"{plan}, {name}" for name in differing(gradients(stage, kept), reference)]
    return wrong


@pytest.mark.parametrize("sequence_parallel", [False, True])
def test_gradients_have_the_same_bits_over_tp(sequence_parallel: bool) -> None:
    assert run_ranks(gradients_over_tp, 2, sequence_parallel) == [[], []]


def one_block(
    memory: MemoryConfig, tp: Axis | None = None, dropout: float = 0.0, queue: WeightGradQueue | None = None
) -> tuple[Block, Tensor, Pass]:
    """A block, its input [S_local, B, H] and what it shares with other blocks."""
    config = tiny_config(hidden_dropout=dropout)
    ctx = ParallelContext(tp=tp or Axis.single(), sequence_parallel=tp is not None, device="meta", weight_grads=queue)
    block = Block(config, 0, ctx, block_memory(memory, 0))
    materialize(block, "layers.0.", "cpu", SEED)
    batch = tiny_batch()
    shared = Pass(Rotary(config.rotary_dim, config.rotary_base)(batch.position_ids), SEED, 0)
    length = 12 // ctx.tp.size
    x = torch.randn(length, 3, config.hidden_size, generator=torch.Generator().manual_seed(1)).requires_grad_()
    return block, x, shared


def saved_bytes(memory: MemoryConfig, dropout: float) -> int:
    """Of distinct memory that a block keeps for its backward pass; parameters and the rotation are there anyway."""
    block, x, shared = one_block(memory, dropout=dropout)
    assert shared.rotation is not None
    there = {tensor.untyped_storage().data_ptr() for tensor in [*block.parameters(), *shared.rotation]}
    kept: dict[int, Tensor] = {}

    def pack(tensor: Tensor) -> Tensor:
        if tensor.untyped_storage().data_ptr() not in there:
            kept[tensor.untyped_storage().data_ptr()] = tensor  # alive, so that no address is used twice
        return tensor

    with saved_tensors_hooks(pack, lambda tensor: tensor):
        block(x, shared)
    return sum(tensor.untyped_storage().nbytes() for tensor in kept.values())


@pytest.mark.parametrize("dropout", [0.0, 0.1])
def test_each_granularity_keeps_less_than_the_one_before(dropout: float) -> None:
    plans = [MemoryConfig(), selective("core_attn"), selective("core_attn", "norm"), selective("core_attn", "norm", "mlp_act")]
    plans += [selective("core_attn", "norm", "mlp"), selective("norm", "attention", "mlp"), FULL]
    figures = [saved_bytes(plan, dropout) for plan in plans]
    assert figures[-1] == 4 * 12 * 3 * 40  # the block's input alone
    if dropout == 0.0:
        assert figures[-2] == 2 * figures[-1]  # the inputs of both branches
    assert figures == sorted(set(figures), reverse=True), figures


def collectives(memory: MemoryConfig, dropout: float) -> tuple[Counter, Counter]:
    grid = Grid.build(GridShape(tp=2), "cpu")
    block, x, shared = one_block(memory, grid.tp, dropout)
    with record_comms(grid.tp) as forward:
        y = block(x, shared)
    with record_comms(grid.tp) as backward:
        y.sum().backward()
    return Counter(count_comms(forward)), Counter(count_comms(backward))


@pytest.mark.parametrize(
    ("memory", "dropout", "gathers", "sums"),
    [
        (selective("core_attn", "norm", "mlp_act"), 0.1, 0, 0),
        (selective("attention"), 0.1, 1, 0),
        (selective("norm", "attention", "mlp"), 0.1, 2, 0),
        (FULL, 0.0, 2, 1),
        (FULL, 0.1, 2, 2),
    ],
)
def test_collectives_that_run_again(memory: MemoryConfig, dropout: float, gathers: int, sums: int) -> None:
    forward, backward = run_ranks(collectives, 2, memory, dropout)[0]
    assert forward == {("all_gather", "tp"): 2, ("reduce_scatter", "tp"): 2}
    assert backward == {("all_gather", "tp"): 4 + gathers, ("reduce_scatter", "tp"): 2 + sums}


def test_a_region_runs_again_once_and_its_result_is_gone_in_between() -> None:
    weights = [torch.randn(4, 4, requires_grad=True) for _ in range(3)]
    x, calls, results = torch.randn(5, 4, requires_grad=True), [], []

    def square(x: Tensor) -> Tensor:
        calls.append(torch.is_grad_enabled())
        y = torch.tanh(x) ** 2
        results.append(weakref.ref(y.untyped_storage()))
        return y

    y = droppable(square, x)
    with forgetting(y):
        z = sum((F.linear(y, weight) for weight in weights), torch.zeros(()))
    del y
    gc.collect()
    assert results[0]() is None
    z.square().sum().backward()
    assert len(calls) == 2
    leaves = [tensor.detach().clone().requires_grad_() for tensor in (x, *weights)]
    plain = torch.tanh(leaves[0]) ** 2
    sum((F.linear(plain, weight) for weight in leaves[1:]), torch.zeros(())).square().sum().backward()
    reference = [leaf.grad for leaf in leaves]
    assert same_bits([tensor.grad for tensor in (x, *weights)], reference)
    assert all(result() is None for result in results)


@pytest.mark.parametrize("memory", [selective("norm", "mlp_act"), selective("attention", "mlp"), FULL])
def test_an_input_gradient_pass_leaves_only_what_weight_gradients_need(memory: MemoryConfig) -> None:
    """Neither the block's input nor the recomputed graph waits for W, and what does is as many bytes as without recomputation."""
    waiting = []
    for plan in (MemoryConfig(), memory):
        queue = WeightGradQueue()
        block, x, shared = one_block(plan, dropout=0.1, queue=queue)
        hidden = x * 1.0
        gone, y = weakref.ref(hidden.untyped_storage()), block(hidden, shared)
        del hidden
        with queue.collect() as deferred:
            y.square().sum().backward()
        del y
        assert gone() is None
        waiting.append(_bytes_behind(deferred))
        deferred.run()
    assert waiting[0] == waiting[1] > 0


def _bytes_behind(deferred: DeferredGrads) -> int:
    """Of the distinct memory that the closures of W hold."""
    storages, cells = {}, [cell.cell_contents for _, compute in deferred._entries for cell in compute.__closure__ or ()]
    while cells:
        value = cells.pop()
        if isinstance(value, tuple | list):
            cells += value
        elif isinstance(value, Tensor):
            storages[value.untyped_storage().data_ptr()] = value.untyped_storage().nbytes()
    return sum(storages.values())


def test_without_gradients_nothing_is_wrapped() -> None:
    block, x, shared = one_block(selective("norm", "mlp_act"))
    plain, _, _ = one_block(MemoryConfig())
    with torch.no_grad():
        assert torch.equal(block(x, shared), plain(x, shared))


@pytest.mark.parametrize("memory", [MemoryConfig(), selective("core_attn", "norm", "mlp_act"), FULL], ids=["none", "selective", "full"])
def test_offloaded_activations_give_the_same_bits(memory: MemoryConfig) -> None:
    """On a CPU the block does not offload, so the hooks are put around it here."""
    block, x, shared = one_block(memory, dropout=0.1)
    assert shared.rotation is not None
    block(x, shared).square().sum().backward()
    expected = [x.grad, *(parameter.grad for parameter in block.parameters())]
    for tensor in (x, *block.parameters()):
        tensor.grad = None
    with offloading([*block.parameters(), *shared.rotation]):
        hidden = x * 1.0
        gone = weakref.ref(hidden.untyped_storage())
        y = block(hidden, shared)
    del hidden
    gc.collect()
    assert gone() is None, "the original of an offloaded tensor outlives the block"
    y.square().sum().backward()
    assert same_bits([x.grad, *(parameter.grad for parameter in block.parameters())], expected)


def test_offloading_copies_a_tensor_once_and_leaves_parameters() -> None:
    weight, x = torch.randn(4, 4, requires_grad=True), torch.randn(5, 4, requires_grad=True)
    with offloading([weight]) as hooks:
        y = F.linear(x, weight) + F.linear(x, weight.t()) * x
        assert {key[0] for key in hooks.copies} & {weight.untyped_storage()._cdata} == set()
        assert sum(key[0] == x.untyped_storage()._cdata for key in hooks.copies) == 1
    assert not hooks.copies
    y.sum().backward()


def test_the_first_blocks_of_a_stage_are_recomputed() -> None:
    memory = MemoryConfig(recompute_granularity="full", recompute_num_layers=2, cpu_offloading=True)
    assert [block_memory(memory, position).whole_block for position in range(3)] == [True, True, False]
    assert block_memory(memory, 2) == BlockMemory(offload=True)
    assert block_memory(MemoryConfig(recompute_granularity="selective"), 0).modules == {"core_attn"}
    assert block_memory(selective(*RECOMPUTE_MODULES), 0).modules == {"norm", "attention", "mlp"}
