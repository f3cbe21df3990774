"""What can be wrong with the settings of recomputation; see `validate`."""

from __future__ import annotations

from megalite.config import RunConfig
from megalite.config_numerics import RECOMPUTE_MODULES
from megalite.errors import MegaliteError
from megalite.pipeline.from_config import stage_specs, training_schedule

__all__ = ["memory_violations"]


def memory_violations(config: RunConfig, world_size: int) -> list[str]:
    """One sentence for everything that recomputation cannot do or would ignore."""
    memory = config.memory
    modules, granularity, known = memory.recompute_modules, memory.recompute_granularity, ", ".join(RECOMPUTE_MODULES)
    found = []
    if modules is not None:
        unknown = [name for name in modules if name not in RECOMPUTE_MODULES]
        if unknown:
            found.append(f"recompute_modules has {', '.join(map(repr, unknown))}: the parts of a block are {known}")
        if not modules:
            found.append(f"recompute_modules is empty: name some of {known}, or use --recompute-granularity none")
        if granularity != "selective":
            found.append(
                f"recompute_modules has no effect with recompute_granularity {granularity}: leave it out, or use "
                "--recompute-granularity selective"
            )
    number = memory.recompute_num_layers
    if number is not None and granularity == "none":
        found.append(f"recompute_num_layers {number} has no effect without recomputation: leave it out, or set --recompute-granularity")
    elif number is not None:
        most = _most_layers(config, world_size)
        if number > most:
            found.append(
                f"recompute_num_layers is {number}, and no stage has more than {most} layers: use 1 to {most}, or leave it out for all"
            )
    return found


def _most_layers(config: RunConfig, world_size: int) -> int:
    """Of any stage; of the model where the pipeline has no sound layout, which is reported elsewhere."""
    try:
        schedule = training_schedule(config.parallel, config.num_microbatches(world_size))
        return max(spec.num_layers for spec in stage_specs(config, schedule))
    except MegaliteError:
        return config.model.num_layers
