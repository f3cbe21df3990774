"""How well the pipeline runs on this machine's CPU: two ranks, one thread each.

    python tools/bench_pipeline.py                      five schedules, 5 rounds
    python tools/bench_pipeline.py --schedules 1f1b zb-v --rounds 3

For every schedule, in one run: the measured makespan of a step against the simulator that was fed with the measured times of its
actions, and the time of a step against torch.distributed.pipelining with the same stages, schedule and micro-batches (medians of paired
steps; a schedule that torch does not have is compared with the simulator alone). Then the host's work per action, with stages that do
nothing. The last line is JSON; exits with 1 when a makespan is more than 15 % off its prediction or a step is slower than torch's
(--tolerance, --slack). Nothing else should run meanwhile.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
import tempfile
import time
from collections.abc import Callable
from dataclasses import replace
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed import pipelining

from megalite import comm
from megalite.config import DataConfig, ModelConfig, RunConfig, TrainConfig
from megalite.data.batch import MicroBatch
from megalite.grid import Axis, Grid, GridShape
from megalite.model import GPTStage
from megalite.pipeline.lowering import lower
from megalite.pipeline.measured import compare
from megalite.pipeline.p2p import Edge
from megalite.pipeline.runtime import PipelineRuntime
from megalite.pipeline.schedules import Schedule, build_schedule
from megalite.tensor_parallel import vocab_parallel_cross_entropy
from megalite.testing.layouts import Layout
from megalite.testing.parity import build_in_this_world
from megalite.testing.rank_pool import RankPool
from megalite.training.pipeline_trace import PipelineTrace
from megalite.training.setup import Run

CONFIG = RunConfig(
    model=ModelConfig(vocab_size=2048, num_layers=8, hidden_size=256, num_attention_heads=8, num_query_groups=4, ffn_hidden_size=688),
    data=DataConfig(mock_data=True, seq_length=256),
    train=TrainConfig(micro_batch_size=2, global_batch_size=16, train_iters=1000, device="cpu", eval_interval=None),
)
RANKS = 2
TORCH: dict[str, Callable[..., Any]] = {
    "gpipe": lambda stages, m, loss: pipelining.ScheduleGPipe(stages[0], m, loss_fn=loss, scale_grads=False),
    "1f1b": lambda stages, m, loss: pipelining.Schedule1F1B(stages[0], m, loss_fn=loss, scale_grads=False),
    "interleaved-1f1b": lambda stages, m, loss: pipelining.ScheduleInterleaved1F1B(stages, m, loss_fn=loss, scale_grads=False),
    "zb-h1": lambda stages, m, loss: pipelining.ScheduleInterleavedZeroBubble(stages, m, loss_fn=loss, scale_grads=False),
    "zb-v": lambda stages, m, loss: pipelining.ScheduleZBVZeroBubble(stages, m, loss_fn=loss, scale_grads=False),
}


class TorchStage(nn.Module):
    """A stage as torch.distributed.pipelining wants it: tensors in, tensors out."""

    def __init__(self, stage: GPTStage, length: int, micro: int) -> None:
        super().__init__()
        self.stage = stage
        positions = torch.arange(length).expand(micro, length)
        self.batch = MicroBatch(
            tokens=positions, labels=positions, loss_mask=torch.ones(micro, length), position_ids=positions, first_sample=0
        )

    def forward(self, x: Tensor) -> Tensor:
        batch = replace(self.batch, tokens=x) if self.stage.embedding is not None else self.batch
        hidden = None if self.stage.embedding is not None else x
        return self.stage.logits(hidden, batch) if self.stage.head is not None else self.stage(hidden, batch)


def bench_schedule(config: RunConfig, name: str, rounds: int, trace_file: str) -> dict[str, float]:
    """Medians over rounds of one step of ours and one of torch's, in turn. In every rank."""
    torch.set_num_threads(1)
    run = build_in_this_world(Layout(pp=RANKS, schedule=name).apply(config).resolve(), timeout_s=300)
    grid = run.grid
    microbatches: list[MicroBatch] = list(run.train_loader.next_step())
    run.train_loader.close()
    (program,) = run.train_programs.values()
    trace = PipelineTrace.start(grid, program.schedule, trace_file)
    assert trace is not None
    tokens = torch.tensor(float(config.train.global_batch_size * config.data.seq_length))
    contenders: dict[str, Callable[[], object]] = {"ours": lambda: run.runtime.train_step(program, microbatches, tokens)}
    if name in TORCH:
        contenders["torch"] = _torch_step(run, program.schedule, microbatches, tokens)
    seconds: dict[str, list[float]] = {who: [] for who in contenders}
    for number in range(rounds + 1):  # the first one warms up
        for who, step in contenders.items():
            run.optimizer.zero_grad()
            run.runtime.clock = trace.clock if number and who == "ours" else None
            comm.barrier(grid.world)
            begin = time.perf_counter()
            step()
            comm.barrier(grid.world)
            if number:
                seconds[who].append(time.perf_counter() - begin)
    trace.close()
    return {who: statistics.median(values) for who, values in seconds.items()}


def _torch_step(run: Run, schedule: Schedule, microbatches: list[MicroBatch], tokens: Tensor) -> Callable[[], object]:
    config = run.config
    length, micro = config.data.seq_length, config.train.micro_batch_size
    stages = [
        pipelining.PipelineStage(
            TorchStage(stage, length, micro), number, schedule.num_stages, torch.device("cpu"), group=run.grid.pp.group
        )
        for number, stage in run.stages.items()
    ]
    model, axis = config.model, Axis.single()

    def loss(logits: Tensor, labels: Tensor) -> Tensor:
        sizes = {"vocab_size": model.known_vocab_size, "padded_vocab_size": model.padded_vocab_size}
        return vocab_parallel_cross_entropy(logits, labels.t().contiguous(), **sizes, tp=axis).sum() / tokens

    steps = TORCH[schedule.name](stages, len(microbatches), loss)
    inputs = [torch.cat([batch.tokens for batch in microbatches])] if 0 in run.stages else []
    labels = {"target": torch.cat([batch.labels for batch in microbatches])} if run.has_head else {}
    return lambda: steps.step(*inputs, **labels, return_outputs=False)


def host_overhead(num_microbatches: int, rounds: int) -> float:
    """Median seconds per action of a 1F1B step whose stages compute nothing. In every rank."""
    torch.set_num_threads(1)
    grid = Grid.build(GridShape(pp=RANKS), "cpu", timedelta(seconds=60))
    weight = torch.zeros((), requires_grad=True)
    program = lower(build_schedule("1f1b", RANKS, num_microbatches, 1))

    def stage(x: Tensor | None, _batch: object) -> Tensor:
        out = torch.zeros(1, 1, 1) + weight if x is None else x + weight
        return out.sum() if grid.pp.is_last else out

    runtime = PipelineRuntime({grid.pp.rank: stage}, grid.pp, Edge((1, 1, 1), torch.float32, grid.device))
    seconds = []
    for _ in range(rounds + 1):
        comm.barrier(grid.world)
        begin = time.perf_counter()
        runtime.train_step(program, [None] * num_microbatches, 1.0)
        seconds.append(time.perf_counter() - begin)
    return statistics.median(seconds[1:]) / (2 * num_microbatches)


def tiny(config: RunConfig) -> RunConfig:
    model = replace(
        config.model, vocab_size=128, num_layers=4, hidden_size=32, num_attention_heads=4, num_query_groups=2, ffn_hidden_size=48
    )
    train = replace(config.train, micro_batch_size=1, global_batch_size=4)
    return replace(config, model=model, data=replace(config.data, seq_length=16), train=train)


def measure(name: str, config: RunConfig, rounds: int, pool: RankPool) -> dict[str, float]:
    with tempfile.TemporaryDirectory() as folder:
        trace_file = str(Path(folder) / "trace.jsonl")
        per_rank = pool.run(bench_schedule, RANKS, config, name, rounds, trace_file, timeout=900)
        comparisons = [compare(Path(trace_file), step) for step in _measured_steps(trace_file)]
    makespan = statistics.median(item.measured.makespan for item in comparisons)
    figures = {"makespan_s": makespan, "predicted_s": comparisons[0].predicted.makespan, "step_s": max(r["ours"] for r in per_rank)}
    figures["makespan_over_predicted"] = makespan / figures["predicted_s"]
    if "torch" in per_rank[0]:
        figures["torch_step_s"] = max(rank["torch"] for rank in per_rank)
        figures["step_over_torch"] = figures["step_s"] / figures["torch_step_s"]
    return figures


def _measured_steps(trace_file: str) -> list[int]:
    records = [json.loads(line) for line in Path(trace_file).read_text().splitlines()[1:]]
    return sorted({record["step"] for record in records})


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--schedules", nargs="+", default=list(TORCH), help=f"default: {' '.join(TORCH)}")
    parser.add_argument("--rounds", type=int, default=5, help="measured steps of each (default 5)")
    parser.add_argument("--tolerance", type=float, default=0.15, help="accepted difference from the prediction (default 0.15)")
    parser.add_argument("--slack", type=float, default=0.02, help="how much slower than torch a step may be (default 0.02: noise)")
    parser.add_argument("--tiny", action="store_true", help="a model of no size, to see that everything runs; its figures say nothing")
    arguments = parser.parse_args()
    config = tiny(CONFIG) if arguments.tiny else CONFIG
    results, failed = {}, []
    print(f"{'schedule':18s} {'makespan':>9s} {'predicted':>9s} {'ratio':>6s} {'step':>8s} {'torch':>8s} {'ratio':>6s}")
    with RankPool(max_ranks=RANKS) as pool:
        for name in arguments.schedules:
            results[name] = found = measure(name, config, arguments.rounds, pool)
            torch_columns = f"{found.get('torch_step_s', float('nan')):8.4f} {found.get('step_over_torch', float('nan')):6.2f}"
            predicted = f"{found['makespan_s']:9.4f} {found['predicted_s']:9.4f} {found['makespan_over_predicted']:6.2f}"
            print(f"{name:18s} {predicted} {found['step_s']:8.4f} {torch_columns}", flush=True)
            failed += [f"{name} prediction"] if abs(found["makespan_over_predicted"] - 1) > arguments.tolerance else []
            failed += [f"{name} speed"] if found.get("step_over_torch", 0.0) > 1 + arguments.slack else []
        overhead = max(pool.run(host_overhead, RANKS, 32, 20, timeout=120))
    print(f"host work per action: {overhead * 1e6:.0f} microseconds")
    print(json.dumps({"schedules": results, "host_seconds_per_action": overhead, "failed": failed}))
    return 0 if arguments.tiny or not failed else 1


if __name__ == "__main__":
    sys.exit(main())
