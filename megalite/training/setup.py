"""Builds a run from a configuration: grid, stages, data-parallel sharding, optimizer, data, program.

Everything that can be checked is checked before a process group exists (`megalite.validate`, the schedule's proof); what only the data
can tell (vocabulary, too few tokens) is checked before the first step.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch

from megalite import comm
from megalite.batch_sizes import BatchSizes
from megalite.checkpoint import BackgroundSaver, find_checkpoint, has_checkpoints, read_manifest
from megalite.comm_check import check_sums
from megalite.config import RunConfig
from megalite.data.loader import GlobalBatchLoader
from megalite.data_parallel import GradientSync
from megalite.grid import Grid, GridShape, twin_axis
from megalite.log import configure_logging, get_logger
from megalite.model import GPTStage
from megalite.optim import LossScale, NoiseScale, Optimizer, OptimParameter, collect_parameters, global_names
from megalite.optim.rank_allocation import RankAllocator
from megalite.pipeline.from_config import evaluation_schedule, training_schedule
from megalite.pipeline.lowering import Program, lower
from megalite.pipeline.p2p import Edge
from megalite.pipeline.runtime import PipelineRuntime, splits_backward
from megalite.pipeline.verify import verify
from megalite.tensor_parallel import WeightGradQueue
from megalite.training.datasets import build_datasets, resolve_vocab_size
from megalite.training.describe import describe
from megalite.training.launch import Launch, choose_device, init_distributed
from megalite.training.memory_report import MemoryReport
from megalite.training.metrics import Metrics
from megalite.training.outputs import check_outputs
from megalite.training.pipeline_trace import PipelineTrace
from megalite.training.probes import Probes
from megalite.training.rewind import Rewind
from megalite.training.stages import build_stages, compute_dtype
from megalite.training.state import TrainState
from megalite.training.stop import Stop
from megalite.training.stragglers import Stragglers
from megalite.training.verdict import Guard
from megalite.validate import validate

__all__ = ["Run", "build_run"]


@dataclass(kw_only=True)
class Run:
    """Everything one rank needs to train; `state` is the part that moves.

    train_programs: by their number of micro-batches. checkpoint: what `load_run` is to fill it from, if anything.
    """

    config: RunConfig
    grid: Grid
    stages: dict[int, GPTStage]
    train_programs: Mapping[int, Program]
    eval_program: Program
    runtime: PipelineRuntime
    parameters: list[OptimParameter]
    parameter_names: list[str]
    optimizer: Optimizer
    train_loader: GlobalBatchLoader
    valid_loader: GlobalBatchLoader | None
    test_loader: GlobalBatchLoader | None
    metrics: Metrics
    guard: Guard
    rewind: Rewind | None
    trace: PipelineTrace | None
    noise_scale: NoiseScale | None
    memory: MemoryReport | None
    saver: BackgroundSaver | None
    stragglers: Stragglers | None
    stop: Stop
    probes: Probes | None
    ranks: RankAllocator | None
    state: TrainState
    checkpoint: Path | None = None
    skipped_in_a_row: int = 0
    num_autopsies: int = 0

    @property
    def full_config(self) -> RunConfig:
        """The configuration with the global batch size written out: alone, without the number of ranks, it says what every step read."""
        return replace(self.config, train=replace(self.config.train, global_batch_size=self.global_batch_size))

    @property
    def global_batch_size(self) -> int:
        """Samples of a full step."""
        return self.config.global_batch(self.grid.world_size)

    @property
    def batch_sizes(self) -> BatchSizes:
        """Samples of every step."""
        return self.train_loader.batch_sizes

    @property
    def has_head(self) -> bool:
        """Whether this rank holds the last stage, which knows the loss."""
        return self.eval_program.schedule.num_stages - 1 in self.stages


def build_run(config: RunConfig, launch: Launch) -> Run:
    """Validate, make the process groups, build. Collective. Raises MegaliteError subclasses."""
    config = resolve_vocab_size(config)
    validate(config, launch.world_size)
    train_programs, eval_program = build_programs(config, launch.world_size)
    device = choose_device(config.train.device, launch.local_rank)
    configure_logging(launch.rank, launch.world_size)
    if launch.rank == 0:
        check_outputs(config.output)
    timeout = timedelta(minutes=config.train.distributed_timeout_minutes)
    if not torch.distributed.is_initialized():
        init_distributed(launch, device, timeout)
    grid = Grid.build(GridShape(**config.grid_sizes(launch.world_size)), device, timeout)
    check_sums([grid.tp, grid.dp_shard, grid.dp_replicate, grid.pp], device)
    checkpoint = _find_checkpoint(config, grid)
    return build_run_on(config, grid, train_programs, eval_program, checkpoint)


def build_programs(config: RunConfig, world_size: int) -> tuple[dict[int, Program], Program]:
    """The training programs by number of micro-batches, one for each size of a batch size ramp-up, and the evaluation program.

    All are proven. Pure. Raises ConfigError and ScheduleError.
    """
    schedules = {number: training_schedule(config.parallel, number) for number in config.all_num_microbatches(world_size)}
    training = {number: lower(schedule) for number, schedule in schedules.items()}
    evaluation = lower(evaluation_schedule(schedules[config.num_microbatches(world_size)]))
    for program in (*training.values(), evaluation):
        verify(program)
    return training, evaluation


def build_run_on(
    config: RunConfig, grid: Grid, train_programs: Mapping[int, Program], eval_program: Program, checkpoint: Path | None = None
) -> Run:
    """Build on an existing grid (tests and the parity tool keep one world for many runs).

    checkpoint: what the run will be filled from (`load_run`); its position says how many samples there must be.
    """
    full_program = train_programs[config.num_microbatches(grid.world_size)]
    weight_grads = WeightGradQueue() if any(splits_backward(program) for program in train_programs.values()) else None
    stages = build_stages(config, grid, full_program, weight_grads)
    parameters = collect_parameters(stages.values())
    optimizer = Optimizer(parameters, config.optim, grid)
    loaders = _build_loaders(config, grid, _position(None if config.output.load_weights_only else checkpoint))
    run = Run(
        config=config,
        grid=grid,
        stages=stages,
        train_programs=train_programs,
        eval_program=eval_program,
        runtime=PipelineRuntime(stages, grid.pp, _edge(config, grid), GradientSync(stages, config.zero), weight_grads),
        parameters=parameters,
        parameter_names=global_names(parameters, grid),
        optimizer=optimizer,
        train_loader=loaders[0],
        valid_loader=loaders[1],
        test_loader=loaders[2],
        metrics=_build_metrics(config, grid),
        guard=Guard(config.numerics, LossScale(config.numerics, grid.device), grid.device),
        rewind=None if config.numerics.rewind_steps is None else Rewind(config.numerics.rewind_steps),
        trace=PipelineTrace.start(grid, full_program.schedule, config.output.trace_pipeline),
        noise_scale=NoiseScale(grid.device) if config.numerics.log_gradient_noise_scale else None,
        memory=MemoryReport.predict(config, full_program, grid) if config.memory.memory_report else None,
        saver=BackgroundSaver(twin_axis(grid.world), config.output.hash_tensors) if config.output.async_save else None,
        stragglers=None,
        stop=Stop(config.output, grid.world),
        probes=_probes(config, grid, stages, checkpoint),
        ranks=None
        if config.lora.lora_average_rank is None
        else RankAllocator(parameters, config.lora, grid, config.lora.allocation_end(config.train.train_iters)),
        state=TrainState(),
        checkpoint=checkpoint,
    )
    run.runtime.clock = None if run.trace is None else run.trace.clock
    if config.output.straggler_factor is not None:
        run.stragglers = Stragglers(grid, config.output.straggler_factor, run.runtime.clock)
        run.runtime.clock = run.stragglers.clock
    describe(run)
    return run


def _probes(config: RunConfig, grid: Grid, stages: Mapping[int, GPTStage], checkpoint: Path | None) -> Probes | None:
    """Of the steps that are still to be made."""
    output = config.output
    if output.probe_dir is None:
        return None
    start = _position(None if output.load_weights_only else checkpoint).step
    steps = [step for step in output.probe_steps if step > start]
    return Probes(Path(output.probe_dir), steps, stages, grid, replaces=checkpoint is not None and output.load == output.save)


def _edge(config: RunConfig, grid: Grid) -> Edge:
    split = grid.tp.size if config.parallel.use_sequence_parallel else 1
    shape = (config.data.seq_length // split, config.train.micro_batch_size, config.model.hidden_size)
    return Edge(shape, compute_dtype(config), grid.device)


def _find_checkpoint(config: RunConfig, grid: Grid) -> Path | None:
    """What to resume from. One command for the first start and every restart: --load X --save X starts anew while X holds nothing."""
    output = config.output
    if output.load is None:
        return None
    if output.load == output.save and comm.broadcast_object(not has_checkpoints(Path(output.load)), grid.world):
        get_logger().info(f"{output.load} holds no checkpoint yet: starting from step 0")
        return None
    return find_checkpoint(Path(output.load), grid.world, on_damage=output.on_damaged_checkpoint)


def _position(checkpoint: Path | None) -> TrainState:
    """Where a run that is filled from `checkpoint` goes on."""
    if checkpoint is None:
        return TrainState()
    manifest = read_manifest(checkpoint)
    return TrainState(manifest.step, manifest.consumed_samples)


def _build_loaders(
    config: RunConfig, grid: Grid, start: TrainState
) -> tuple[GlobalBatchLoader, GlobalBatchLoader | None, GlobalBatchLoader | None]:
    batch_sizes = config.batch_sizes(grid.world_size)
    train, valid, test = build_datasets(config, batch_sizes, grid, start)
    shared: dict[str, Any] = {
        "micro_batch_size": config.train.micro_batch_size,
        "dp_rank": grid.dp.rank,
        "dp_size": grid.dp.size,
        "vocab_size": config.model.known_vocab_size,
        "pin_memory": grid.device.type == "cuda",
    }
    # Evaluations read the same samples each time and need no threads of their own.
    valid_loader, test_loader = (
        None if data is None else GlobalBatchLoader(data, global_batch_size=batch_sizes.full, num_workers=0, **shared)
        for data in (valid, test)
    )
    train_loader = GlobalBatchLoader(train, global_batch_size=batch_sizes, num_workers=config.data.num_workers, **shared)
    return train_loader, valid_loader, test_loader


def _build_metrics(config: RunConfig, grid: Grid) -> Metrics:
    output, sequence = config.output, config.data.seq_length
    file = output.metrics_file or (str(Path(output.save) / "metrics.jsonl") if output.save else None)
    return Metrics(
        grid,
        train_iters=config.train.train_iters,
        seq_length=sequence,
        flops_per_token=config.model.flops_per_token(sequence, trains_adapters=config.lora.lora_r is not None),
        metrics_file=Path(file) if file else None,
        tensorboard_dir=output.tensorboard_dir,
    )
