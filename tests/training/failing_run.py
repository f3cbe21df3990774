"""A run in which one rank raises in the middle of a step (started by test_programs through torchrun).

failing_run.py RANK KIND ARGUMENTS...      KIND: python (a bug) or user (a MegaliteError)
"""

from __future__ import annotations

import sys


def main() -> None:
    rank, kind, arguments = int(sys.argv[1]), sys.argv[2], sys.argv[3:]
    from megalite.cli import parse_and_validate
    from megalite.errors import DataError
    from megalite.pipeline.runtime import PipelineRuntime
    from megalite.training import Launch, guard, run_training

    config = parse_and_validate(arguments, prog="failing_run.py", description="")
    launch = Launch.from_environment()
    plain_step = PipelineRuntime.train_step
    calls = []

    def failing_step(self, *args):
        calls.append(1)
        if launch.rank == rank and len(calls) == 2:
            raise {"python": ZeroDivisionError, "user": DataError}[kind]("injected failure")
        return plain_step(self, *args)

    PipelineRuntime.train_step = failing_step
    with guard(launch):
        run_training(config, launch)


if __name__ == "__main__":
    main()
