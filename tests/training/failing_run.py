"""A run in which one rank raises, or hangs, in the middle of a step (started by test_programs through torchrun, and by test_watchdog).

failing_run.py RANK KIND ARGUMENTS...      KIND: python (a bug), user (a MegaliteError) or hang
"""

from __future__ import annotations

import sys
import time


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
            if kind == "hang":
                time.sleep(1000)
            raise {"python": ZeroDivisionError, "user": DataError}[kind]("injected failure")
        return plain_step(self, *args)

    PipelineRuntime.train_step = failing_step
    with guard(launch):
        run_training(config, launch)


if __name__ == "__main__":
    main()
