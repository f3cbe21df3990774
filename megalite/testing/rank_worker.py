"""The side of the rank pool that runs in the worker processes: serve one job after the other, each in a fresh world.

Decisions:
- A job has two phases. First the function runs and its outcome is reported; the process group is taken down only
  when the pool says that every rank has reported. So a rank that raises keeps its connections open, the others stay
  blocked instead of failing with "connection closed", and the first error that the pool sees is the real one.
- What a job could leave behind for the next one is reset: random state, default dtype, signal handlers, the process
  groups, and PyTorch's caches of sharding decisions, which hold device meshes and so the names of dead groups.
- Values travel as pickled bytes made by plain `pickle`, not by torch's reducers: those pass file descriptors of shared
  memory, which outlive their sender and run out.
"""

from __future__ import annotations

import faulthandler
import gc
import multiprocessing
import os
import pickle
import random
import signal
import socket
import sys
import threading
import time
import traceback
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import timedelta
from multiprocessing.connection import Connection
from typing import TextIO

__all__ = ["STACK_SIGNAL", "Done", "Failed", "Job", "worker_main"]

STACK_SIGNAL = signal.SIGUSR2
SEED = 1234
STRICT_CATEGORIES = (DeprecationWarning, FutureWarning, UserWarning)


@dataclass(frozen=True, kw_only=True)
class Job:
    """What one rank has to do; `call` is a pickled `(function, args, kwargs)`."""

    rank: int
    world_size: int
    rendezvous: str
    """Path of a file that no other world has used."""
    call: bytes
    timeout: float
    """Seconds until the pool kills the workers; collectives wait longer, so that the pool's report comes first."""
    sys_path: list[str]
    warnings_as_errors: bool
    ignored_warnings: tuple[str, ...]


@dataclass(frozen=True)
class Done:
    """A phase has ended well; `payload` is the pickled value of the function, empty for the other phases."""

    payload: bytes = b""


@dataclass(frozen=True)
class Failed:
    """A phase has raised, or (`died`) the process has ended; `moment` is the machine-wide monotonic clock."""

    summary: str
    details: str
    moment: float
    died: bool = False


def worker_main(connection: Connection, stack_path: str) -> None:
    """Serve jobs until the pool closes its end of the connection."""
    with open(stack_path, "w") as stack_file:
        _prepare_process()
        connection.send(Done())
        while True:
            try:
                job: Job = connection.recv()
            except EOFError:
                return
            _reset_process(stack_file)
            connection.send(_guarded(_run, job))
            connection.recv()
            connection.send(_guarded(_leave_world))


def _prepare_process() -> None:
    # the pool's owner may be killed while this rank is blocked in a collective: nobody else would end it
    threading.Thread(target=_exit_with_owner, name="exit with owner", daemon=True).start()
    # worlds never leave this machine; without this gloo asks for the address of the host name, which may not resolve
    loopback = next((name for _, name in socket.if_nameindex() if name.startswith("lo")), None)
    if loopback is not None:
        os.environ.setdefault("GLOO_SOCKET_IFNAME", loopback)
    import torch

    torch.set_num_threads(1)
    gc.collect()
    gc.freeze()  # the modules stay; the collection after each job need not look at them


def _exit_with_owner() -> None:
    owner = multiprocessing.parent_process()
    assert owner is not None
    owner.join()
    os._exit(1)


def _reset_process(stack_file: TextIO) -> None:
    import numpy
    import torch

    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C reaches the whole terminal group; the owner decides
    signal.signal(signal.SIGTERM, signal.SIG_DFL)
    faulthandler.register(STACK_SIGNAL, file=stack_file, all_threads=True)
    random.seed(SEED)
    numpy.random.seed(SEED)
    torch.manual_seed(SEED)
    torch.set_default_dtype(torch.float32)


def _guarded(function, *args) -> Done | Failed:
    try:
        return Done(function(*args))
    except BaseException as error:  # SystemExit and pytest's outcomes included: each must reach the caller
        summary = traceback.format_exception_only(error)[-1].strip()
        return Failed(summary, traceback.format_exc(), time.monotonic())
    finally:
        sys.stdout.flush()
        sys.stderr.flush()


def _run(job: Job) -> bytes:
    sys.path[:] = job.sys_path
    with _warning_filters(job):
        function, args, kwargs = pickle.loads(job.call)
        _join_world(job)
        return pickle.dumps(function(*args, **kwargs))


@contextmanager
def _warning_filters(job: Job) -> Iterator[None]:
    with warnings.catch_warnings():
        if job.warnings_as_errors:
            for category in STRICT_CATEGORIES:
                warnings.simplefilter("error", category)
        for pattern in job.ignored_warnings:
            warnings.filterwarnings("ignore", message=pattern)
        yield


def _join_world(job: Job) -> None:
    import torch.distributed as dist

    dist.init_process_group(
        "gloo",
        init_method=f"file://{job.rendezvous}",
        rank=job.rank,
        world_size=job.world_size,
        timeout=timedelta(seconds=job.timeout + 60),
    )


def _leave_world() -> bytes:
    import torch.distributed as dist

    gc.collect()  # models in reference cycles hold groups; they go before the groups do
    if dist.is_initialized():
        dist.destroy_process_group()
    if "torch.distributed.tensor" in sys.modules:
        _forget_device_meshes()
    return b""


def _forget_device_meshes() -> None:
    # Meshes of two worlds are equal when their shapes are, although their groups are not: a cached sharding decision
    # would carry the old mesh, and so the old group names, into the new world (test_meshes_do_not_outlive_their_world).
    from torch.distributed.tensor import _redistribute, debug

    debug._clear_sharding_prop_cache()
    _redistribute._gen_transform_infos.cache_clear()
