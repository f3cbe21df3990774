"""What a step sends: the dry run against real steps, and both against published formulas."""

from __future__ import annotations

from collections import Counter
from dataclasses import replace
from functools import cache
from typing import Any

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from megalite.comm import record_comms
from megalite.config import RunConfig
from megalite.config_numerics import MemoryConfig
from megalite.grid import Grid, GridShape
from megalite.model import GPTStage
from megalite.pipeline.partition import StageSpec
from megalite.planner.comm_volume import Traffic, block_bytes, messages, ring_bytes
from megalite.planner.rehearsal import BatchShape, rehearse
from megalite.tensor_parallel.deferral import WeightGradQueue
from megalite.tensor_parallel.parameter import ParallelContext
from megalite.testing.layouts import Layout
from megalite.testing.parity import build_in_this_world, tiny_config
from megalite.training.loop import train_step
from megalite.training.plan import plan_traffic
from megalite.training.setup import build_programs
from tests.ranks import run_ranks

KINDS = {"allreduce": "all_reduce", "allgather": "all_gather", "reduce_scatter": "reduce_scatter", "send": "send", "recv": "recv"}
S, B = 24, 3


class ProcessGroups(TorchDispatchMode):
    """Calls and bytes of everything that is handed to process groups, whoever does it, by operation."""

    def __init__(self) -> None:
        super().__init__()
        self.calls: Counter[str] = Counter()
        self.nbytes: Counter[str] = Counter()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func.namespace == "c10d":
            kind = next((kind for part, kind in KINDS.items() if part in func.__name__), func.__name__)
            tensor = args[1] if kind in ("all_gather", "reduce_scatter") else args[0]
            while isinstance(tensor, list):
                tensor = tensor[0]
            self.calls[kind] += 1
            self.nbytes[kind] += tensor.nbytes
        return func(*args, **(kwargs or {}))


def case(layout: Layout, **numerics: Any) -> RunConfig:
    config = tiny_config()
    config = replace(config, model=replace(config.model, num_layers=5))
    config = replace(config, train=replace(config.train, global_batch_size=4 * 2 * layout.dp))
    return replace(layout.apply(config), numerics=replace(config.numerics, **numerics)).resolve()


def real_step(config: RunConfig) -> tuple[int, int, dict[tuple[str, str], tuple[int, int]], dict[str, tuple[int, int]]]:
    """In a rank: its places in pp and dp_shard, (calls, bytes) that comm records by axis and operation, and torch by operation."""
    run = build_in_this_world(config)
    with record_comms(run.grid) as records, ProcessGroups() as seen:
        train_step(run)
    run.train_loader.close()
    calls, nbytes = Counter((r.axis, r.op) for r in records), Counter[tuple[str, str]]()
    for record in records:
        nbytes[record.axis, record.op] += record.nbytes
    recorded = {key: (calls[key], nbytes[key]) for key in calls}
    return run.grid.pp.rank, run.grid.dp_shard.rank, recorded, {op: (seen.calls[op], seen.nbytes[op]) for op in seen.calls}


@cache
def planned(config: RunConfig, world_size: int, place: int) -> list[Traffic]:
    programs, _ = build_programs(config, world_size)
    return plan_traffic(config, programs[config.num_microbatches(world_size)], world_size, place, "cpu")


CASES = [
    case(Layout(tp=2, pp=2, sequence_parallel=True, tied=True)),
    case(Layout(tp=4, sequence_parallel=False)),
    case(Layout(pp=3, schedule="zb-h1"), precision="bf16"),
    case(Layout(dp=3, zero=1), precision="bf16"),
    case(Layout(dp=4, zero=2, replicas=2, tied=True), precision="bf16", grad_reduce_in_bf16=True),
    case(Layout(tp=2, dp=2, zero=3, sequence_parallel=True)),
]
LAYOUTS = ["tp2-pp2-tied", "tp4-no-sp", "zb-h1-bf16", "zero1-bf16", "zero2-hsdp", "tp2-dp2-zero3"]


@pytest.mark.parametrize("config", CASES, ids=LAYOUTS)
def test_plan_equals_a_real_step(config: RunConfig) -> None:
    """By axis and operation what comm records, and by operation all that reaches torch's process groups, FSDP2's collectives included."""
    parallel = config.parallel
    world_size = parallel.tensor_model_parallel_size * parallel.pipeline_model_parallel_size
    world_size *= config.train.global_batch_size // 8  # type: ignore[operator]
    plans = [planned(config, world_size, place) for place in range(parallel.pipeline_model_parallel_size)]
    for place, dp_place, recorded, seen in run_ranks(real_step, world_size, config):
        if dp_place > 0:  # where rows do not divide evenly, the first rank has the most: it is planned
            continue
        through_comm = {(row.axis, row.op): (row.calls, row.nbytes) for row in plans[place] if (row.axis, row.op) in recorded}
        assert through_comm.keys() == recorded.keys()
        totals: dict[str, tuple[int, int]] = {}
        for row in plans[place]:
            calls, nbytes = totals.get(row.op, (0, 0))
            totals[row.op] = (calls + row.calls, nbytes + row.nbytes)
        assert totals == seen
        assert through_comm == recorded


def block_traffic(tp: int, sequence_parallel: bool, memory: MemoryConfig | None = None) -> int:
    """Bytes that one more block sends over tp for a micro-batch in bf16."""
    model, grid = tiny_config().model, Grid.rehearsal(GridShape(tp=tp))
    shape = BatchShape(sequence=S, micro_batch=B, edge=(S // tp if sequence_parallel else S, B, model.hidden_size), dtype=torch.bfloat16)

    def sent(layers: int) -> int:
        spec = StageSpec(stage=1, first_layer=1, num_layers=layers, has_embedding=False, has_head=False)

        def build(queue: WeightGradQueue | None) -> GPTStage:
            context = ParallelContext(tp=grid.tp, sequence_parallel=sequence_parallel, device="meta", weight_grads=queue)
            return GPTStage(replace(model, init_method_std=0.02), spec, context, num_stages=3, seed=1, memory=memory)

        with record_comms(grid) as records:
            rehearse(build, shape, splits_backward=False)
        return sum(ring_bytes(record.op, record.nbytes, tp) for record in records)

    return sent(2) - sent(1)


@pytest.mark.parametrize(("tp", "sequence_parallel"), [(2, False), (2, True), (4, True), (8, False)])
def test_a_block_sends_what_the_formula_says(tp: int, sequence_parallel: bool) -> None:
    hidden = tiny_config().model.hidden_size
    shape = BatchShape(sequence=S, micro_batch=B, edge=(S, B, hidden), dtype=torch.bfloat16)
    expected = block_bytes(shape, hidden, tp, sequence_parallel, 2)
    assert block_traffic(tp, sequence_parallel) == expected
    assert expected == (10 if sequence_parallel else 8) * S * B * hidden * (tp - 1) / tp * 2


def test_recomputation_of_blocks_sends_their_forward_again() -> None:
    """Two gathers and a scatter more; the block's last scatter is not repeated."""
    tokens = S * B * tiny_config().model.hidden_size * 2 // 2
    full = block_traffic(2, True, MemoryConfig(recompute_granularity="full"))
    assert full - block_traffic(2, True) == 3 * tokens


@pytest.mark.parametrize(("schedule", "ranks"), [("1f1b", 4), ("zb-h1", 3), ("interleaved-1f1b", 2), ("zb-v", 2)])
def test_messages_of_a_pipeline(schedule: str, ranks: int) -> None:
    """2 m (p - 1) messages with one stage a rank, 2 m (p v - 1) round robin, 4 m (p - 1) in V shape."""
    layout = Layout(pp=ranks, schedule=schedule)
    config = case(layout)
    programs, _ = build_programs(config, ranks)
    program = programs[config.num_microbatches(ranks)]
    borders = {"1f1b": ranks - 1, "zb-h1": ranks - 1, "interleaved-1f1b": 2 * ranks - 1, "zb-v": 2 * (ranks - 1)}[schedule]
    counted = [Counter(op for row in planned(config, ranks, place) for op in [row.op] * row.calls) for place in range(ranks)]
    assert sum(count["send"] for count in counted) == 2 * program.schedule.num_microbatches * borders
    assert [(count["send"], count["recv"]) for count in counted] == [messages(program, rank) for rank in range(ranks)]
    edge = config.data.seq_length * config.train.micro_batch_size * config.model.hidden_size * 4
    assert all(row.nbytes == row.calls * edge for row in planned(config, ranks, 0) if row.op == "send")


@pytest.mark.parametrize(("zero", "factor"), [(0, 2), (1, 2), (2, 1 + 4), (3, 2 * 4 + 4)])
def test_data_parallelism_sends_multiples_of_the_parameters(zero: int, factor: int) -> None:
    """Per P parameters and 4 micro-batches: all-reduce, or gather and scatter (2 P), a scatter per micro-batch (ZeRO 2), two gathers more
    (ZeRO 3); times (N - 1) / N, and the padding of slices (Rajbhandari et al. 2020, arXiv:1910.02054, section 7)."""
    config, ranks = case(Layout(dp=4, zero=zero)), 4
    sent = sum(row.sent for row in planned(config, ranks, 0) if row.op != "all_reduce" or row.nbytes > 10_000)
    parameters = config.model.num_parameters()
    assert sent == pytest.approx(factor * parameters * 4 * (ranks - 1) / ranks, rel=0.04)
