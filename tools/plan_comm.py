"""Say what every rank of a run will send in one step, by axis and operation, before it is launched.

    python tools/plan_comm.py --preset llama3-8b --world-size 16 --tp 2 --pp 2 --zero 3 --precision bf16 --gbs 32

Takes the flags of pretrain_gpt.py and two of its own: --world-size (ranks in all) and --target (cuda or cpu: where it will run). Neither a
GPU nor data nor the ranks are needed: the step runs on tensors without values, and what goes through megalite's communication layer is
counted; the collectives of FSDP2 are arithmetic. "in" are the bytes of the tensors that the rank hands over, "sent" those that leave it
where libraries use rings. The last line is JSON.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Sequence
from dataclasses import asdict
from typing import Any

from megalite.cli import parse_run_config
from megalite.config import RunConfig
from megalite.errors import MegaliteError
from tools.plan_memory import prepare

MIB = 2**20


def parse_arguments(arguments: Sequence[str] | None) -> tuple[argparse.Namespace, RunConfig]:
    argv = list(sys.argv[1:] if arguments is None else arguments)
    parser = argparse.ArgumentParser(add_help=False, allow_abbrev=False)
    parser.add_argument("--world-size", type=int, help="ranks in all; not set: tp x pp")
    parser.add_argument("--target", choices=("cuda", "cpu"), default="cuda", help="where the run will be")
    options, flags = parser.parse_known_args(argv)
    if {"-h", "--help"} & set(argv):
        parser.print_help()
    return options, parse_run_config(flags, "plan_comm.py", __doc__ or "")


def plan(config: RunConfig, world_size: int, target: str) -> list[list[dict[str, Any]]]:
    """For each pipeline rank, [{"axis", "op", "calls", "nbytes", "sent"}]. Raises ConfigError."""
    from megalite.training.plan import plan_traffic

    config, program = prepare(config, world_size)
    places = range(config.parallel.pipeline_model_parallel_size)
    return [[asdict(row) for row in plan_traffic(config, program, world_size, place, target)] for place in places]


def table(ranks: Sequence[Sequence[dict[str, Any]]]) -> str:
    lines = [f"{'pp rank':>7} {'axis':14}{'operation':16}{'calls':>8}{'MiB in':>14}{'MiB sent':>14}"]
    for place, rows in enumerate(ranks):
        for row in rows:
            mib = f"{row['nbytes'] / MIB:14,.4f}{row['sent'] / MIB:14,.4f}"
            lines.append(f"{place:>7} {row['axis']:14}{row['op']:16}{row['calls']:>8,}{mib}")
        lines.append(f"{place:>7} {'all axes':38}{'':14}{sum(row['sent'] for row in rows) / MIB:14,.4f}")
    return "\n".join(lines)


def main(arguments: Sequence[str] | None = None) -> int:
    options, config = parse_arguments(arguments)
    parallel = config.parallel
    world_size = options.world_size or parallel.tensor_model_parallel_size * parallel.pipeline_model_parallel_size
    try:
        ranks = plan(config, world_size, options.target)
    except MegaliteError as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    print("communication of one step, per rank")
    print(table(ranks))
    print(json.dumps({"world_size": world_size, "ranks": ranks}))
    return 0


if __name__ == "__main__":
    sys.exit(main())
