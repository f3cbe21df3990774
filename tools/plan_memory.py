"""Say what a run needs before it is launched: memory of every pipeline rank, and the pipeline's idle share.

    python tools/plan_memory.py --preset llama3-8b --world-size 8 --tp 2 --pp 2 --zero 3 --precision bf16 --gbs 64 --gpu-memory-gib 80

Takes the flags of pretrain_gpt.py and three of its own: --world-size (ranks in all), --target (cuda or cpu: where it will run) and
--gpu-memory-gib (exit code 1 when a rank needs more). Neither a GPU nor data nor the ranks are needed: each stage runs once on tensors
without values. The last line is JSON. A GPU's allocator and its libraries need some more: leave a tenth of the card.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from megalite.cli import parse_run_config
from megalite.config import RunConfig
from megalite.errors import ConfigError, MegaliteError
from megalite.pipeline.lowering import Program
from megalite.validate import validate

GIB = 2**30


def parse_arguments(arguments: Sequence[str] | None) -> tuple[argparse.Namespace, RunConfig]:
    argv = list(sys.argv[1:] if arguments is None else arguments)
    parser = argparse.ArgumentParser(add_help=False, allow_abbrev=False)
    parser.add_argument("--world-size", type=int, help="ranks in all; not set: tp x pp")
    parser.add_argument("--target", choices=("cuda", "cpu"), default="cuda", help="where the run will be")
    parser.add_argument("--gpu-memory-gib", type=float, help="memory of one device")
    options, flags = parser.parse_known_args(argv)
    if {"-h", "--help"} & set(argv):
        parser.print_help()
    return options, parse_run_config(flags, "plan_memory.py", __doc__ or "")


def prepare(config: RunConfig, world_size: int) -> tuple[RunConfig, Program]:
    """The resolved settings and the program of a full training step; data need not exist. Raises ConfigError."""
    from megalite.training.setup import build_programs

    if not (config.data.data_path or config.data.train_data_path):
        config = replace(config, data=replace(config.data, mock_data=True))
    config = config.resolve()
    if config.model.vocab_size is None:
        raise ConfigError("the vocabulary size is not known: set --vocab-size, or a preset that has one")
    validate(config, world_size)
    programs, _ = build_programs(config, world_size)
    return config, programs[config.num_microbatches(world_size)]


def plan(config: RunConfig, world_size: int, target: str) -> dict[str, Any]:
    """{"ranks": [{what: bytes} per pipeline rank], "bubble": idle share of the step}. Raises ConfigError."""
    from megalite.pipeline.simulate import simulate
    from megalite.training.plan import plan_memory

    config, program = prepare(config, world_size)
    places = range(config.parallel.pipeline_model_parallel_size)
    ranks = [plan_memory(config, program, world_size, place, target) for place in places]
    rows = [{**rank.rows(), "peak of a step": rank.total} for rank in ranks]
    return {"ranks": rows, "bubble": simulate(program.schedule).bubble_over_total}


def table(rows: Sequence[dict[str, int]]) -> str:
    lines = [f"{'GiB':24}" + "".join(f"{f'pp rank {place}':>14}" for place in range(len(rows)))]
    lines += [f"{name:24}" + "".join(f"{row[name] / GIB:14,.3f}" for row in rows) for name in rows[0]]
    return "\n".join(lines)


def main(arguments: Sequence[str] | None = None) -> int:
    options, config = parse_arguments(arguments)
    parallel = config.parallel
    world_size = options.world_size or parallel.tensor_model_parallel_size * parallel.pipeline_model_parallel_size
    try:
        found = plan(config, world_size, options.target)
    except MegaliteError as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    print(table(found["ranks"]))
    print(f"idle share of the pipeline: {found['bubble']:.1%} (forward, input gradient and weight gradient taking equally long)")
    highest = max(row["peak of a step"] for row in found["ranks"])
    fits = options.gpu_memory_gib is None or highest <= options.gpu_memory_gib * GIB
    if not fits:
        print(
            f"the fullest rank needs {highest / GIB:.2f} GiB, the device has {options.gpu_memory_gib:g}: try more tp, pp or zero, a "
            "smaller micro-batch, or --recompute-granularity"
        )
    print(json.dumps({"world_size": world_size, "fits": fits, "peak_gib": round(highest / GIB, 3), **found}))
    return 0 if fits else 1


if __name__ == "__main__":
    sys.exit(main())
