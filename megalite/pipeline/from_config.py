"""What a run's configuration means for its pipeline: the schedule, the evaluation order, the layers of each stage.

This is the one place that reads `ParallelConfig`'s pipeline settings; the parts below it take plain numbers.
"""

from __future__ import annotations

from megalite.config import ParallelConfig, RunConfig
from megalite.errors import ConfigError, ScheduleError
from megalite.pipeline.balance import StageCosts, balanced_split, layout_string_violations, parse_layout
from megalite.pipeline.partition import StageSpec, partition_violations, split_layers
from megalite.pipeline.schedules import (
    CostModel,
    Schedule,
    ScheduleOptions,
    build_schedule,
    forward_only,
    is_written_by_user,
    schedule_violations,
)
from megalite.pipeline.verify import verify

__all__ = ["evaluation_schedule", "pipeline_violations", "schedule_options", "stage_costs", "stage_specs", "training_schedule"]


def schedule_options(parallel: ParallelConfig) -> ScheduleOptions:
    """Group size and planning times. Raises ConfigError for times that are not four numbers of 0 or more."""
    times = parallel.pipeline_schedule_costs or (1.0, 1.0, 1.0, 0.0)
    if len(times) != 4:
        raise ConfigError(
            f"pipeline_schedule_costs has {len(times)} numbers: give four, the times of a forward, an input gradient, a weight gradient "
            "and a message"
        )
    return ScheduleOptions(group_size=parallel.microbatch_group_size_per_virtual_pipeline_stage, cost=CostModel(*times))


def training_schedule(parallel: ParallelConfig, num_microbatches: int) -> Schedule:
    """The schedule of a training step, not yet proven. Raises ScheduleError or ConfigError."""
    numbers = (parallel.pipeline_model_parallel_size, num_microbatches, parallel.num_virtual_stages_per_pipeline_rank)
    return build_schedule(parallel.schedule, *numbers, schedule_options(parallel))


def evaluation_schedule(training: Schedule) -> Schedule:
    """Forwards only, for the stages where the training schedule has placed them."""
    return forward_only(training.num_ranks, training.num_microbatches, training.num_chunks, training.placement)


def stage_specs(config: RunConfig, schedule: Schedule) -> list[StageSpec]:
    """What each stage of the schedule holds, in model order. Raises ConfigError."""
    return split_layers(config.model.num_layers, schedule.num_stages, _layers_per_stage(config, schedule.placement))


def stage_costs(config: RunConfig) -> StageCosts:
    """Model FLOPs of a layer and of the head; looking up an embedding takes none. Raises ConfigError without a vocabulary."""
    model, length = config.model, config.data.seq_length
    head = 6 * model.known_vocab_size * model.hidden_size
    layer = (model.flops_per_token(length) - head) / model.num_layers
    return StageCosts(layer=layer, head=head)


def _layers_per_stage(config: RunConfig, placement: tuple[int, ...]) -> tuple[int, ...] | None:
    parallel = config.parallel
    if parallel.pipeline_model_parallel_layout is not None:
        return parse_layout(parallel.pipeline_model_parallel_layout)
    if parallel.balance_pipeline_stages:
        return balanced_split(config.model.num_layers, placement, stage_costs(config))
    return parallel.pipeline_layer_split


def pipeline_violations(config: RunConfig, num_microbatches: int | None) -> list[str]:
    """Everything in the pipeline's settings that cannot work, one sentence each with its remedy.

    num_microbatches: None when the batch sizes do not fit together, which hides what is wrong with their number.
    A schedule that the user wrote is read (a Python function: run) and proven here.
    """
    parallel = config.parallel
    ranks, chunks = parallel.pipeline_model_parallel_size, parallel.num_virtual_stages_per_pipeline_rank
    try:
        options = schedule_options(parallel)
    except ConfigError as error:
        return error.violations
    if num_microbatches is None:
        if is_written_by_user(parallel.schedule):
            return _split_violations(config, None)
        num_microbatches, options = 2 * ranks, ScheduleOptions()  # enough for every schedule, so that only the rest shows
    found = schedule_violations(parallel.schedule, ranks, num_microbatches, chunks, options)
    if not found and is_written_by_user(parallel.schedule):
        found += _proof_violations(training_schedule(parallel, num_microbatches))
    if not found:
        return found + _split_violations(config, num_microbatches)
    return found + _split_violations(config, None)


def _proof_violations(schedule: Schedule) -> list[str]:
    try:
        verify(schedule)
    except ScheduleError as error:
        return [f"pipeline schedule {schedule.name}: {error}"]
    return []


def _split_violations(config: RunConfig, num_microbatches: int | None) -> list[str]:
    """num_microbatches: None when there is no schedule that could place the stages."""
    parallel, num_layers = config.parallel, config.model.num_layers
    ways = {
        "pipeline_layer_split": parallel.pipeline_layer_split is not None,
        "pipeline_model_parallel_layout": parallel.pipeline_model_parallel_layout is not None,
        "balance_pipeline_stages": parallel.balance_pipeline_stages,
    }
    chosen = [name for name, is_set in ways.items() if is_set]
    if len(chosen) > 1:
        return [f"{' and '.join(chosen)} are different ways to split the layers: keep one of them"]
    if parallel.pipeline_model_parallel_layout is not None:
        layout = parallel.pipeline_model_parallel_layout
        found = layout_string_violations(layout, parallel.pipeline_model_parallel_size, parallel.num_virtual_stages_per_pipeline_rank)
        return found or partition_violations(num_layers, parallel.num_stages, parse_layout(layout))
    if parallel.balance_pipeline_stages:
        # without a schedule there is no placement, without a vocabulary no cost of the head: both are reported elsewhere or later
        if num_microbatches is not None and config.model.vocab_size is not None:
            try:
                _layers_per_stage(config, training_schedule(parallel, num_microbatches).placement)
            except ConfigError as error:
                return error.violations
        return []
    return partition_violations(num_layers, parallel.num_stages, parallel.pipeline_layer_split)
