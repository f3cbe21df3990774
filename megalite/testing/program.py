"""Starts the ranks of a program in milliseconds, so that they can be killed by the dozen.

Decisions
- Ranks are forked from a server that has imported torch and megalite, with torchrun's variables set; each then runs the program's file as
  `python FILE ARGUMENTS` would. There is no launcher, so nobody but the ranks themselves reacts to a death.
- Standard output and error of each rank go to a file of its own.
"""

from __future__ import annotations

import multiprocessing
import os
import runpy
import socket
import sys
import time
from collections.abc import Sequence
from multiprocessing.context import ForkServerProcess
from pathlib import Path

from megalite.testing.rank_pool import PRELOAD

__all__ = ["ProgramRanks"]


class ProgramRanks:
    """`world_size` processes that run `program` with `arguments`; log files `rank-N.log` in `folder`."""

    def __init__(self, program: Path, arguments: Sequence[str], world_size: int, folder: Path) -> None:
        context = multiprocessing.get_context("forkserver")
        folder.mkdir(parents=True, exist_ok=True)
        self.logs = [folder / f"rank-{rank}.log" for rank in range(world_size)]
        shared = {"WORLD_SIZE": str(world_size), "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(_free_port()), "OMP_NUM_THREADS": "1"}
        self.processes: list[ForkServerProcess] = []
        for rank, log in enumerate(self.logs):
            variables = {**shared, "RANK": str(rank), "LOCAL_RANK": str(rank)}
            process = context.Process(target=_run, args=(str(program), list(arguments), variables, str(log)), daemon=True)
            process.start()
            self.processes.append(process)

    @staticmethod
    def warm_up() -> None:
        """Start the server and wait for its imports, unless a pool of this process has started it before with its own."""
        context = multiprocessing.get_context("forkserver")
        context.set_forkserver_preload([*PRELOAD, "megalite.training"])
        process = context.Process(target=int)
        process.start()
        process.join()

    @property
    def exit_codes(self) -> list[int | None]:
        """None for a rank that lives; -9 for one that was killed."""
        return [process.exitcode for process in self.processes]

    @property
    def has_ended(self) -> bool:
        return None not in self.exit_codes

    def kill(self, ranks: Sequence[int]) -> None:
        """SIGKILL, to all of them before any is waited for."""
        for rank in ranks:
            self.processes[rank].kill()

    def wait(self, timeout: float) -> list[int]:
        """Wait for all; the ranks that still lived after `timeout` seconds and were killed."""
        deadline = time.monotonic() + timeout
        for process in self.processes:
            process.join(max(0.0, deadline - time.monotonic()))
        alive = [rank for rank, code in enumerate(self.exit_codes) if code is None]
        self.kill(alive)
        for process in self.processes:
            process.join()
        return alive

    def output(self, rank: int = 0) -> str:
        """What the rank has written so far."""
        return self.logs[rank].read_text(errors="replace") if self.logs[rank].exists() else ""


def _free_port() -> int:
    with socket.socket() as place:
        place.bind(("127.0.0.1", 0))
        return place.getsockname()[1]


def _run(program: str, arguments: list[str], variables: dict[str, str], log: str) -> None:
    """In the rank."""
    os.environ.update(variables)
    file = os.open(log, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o644)
    os.dup2(file, 1)
    os.dup2(file, 2)
    sys.argv = [program, *arguments]
    runpy.run_path(program, run_name="__main__")
