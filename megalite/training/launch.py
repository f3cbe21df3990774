"""From a launched process to a process group, and from any rank's error to the end of all ranks.

Decisions
- Where a process stands comes from torchrun's variables, read once, here; without them it is a run of one rank.
- Backend: NCCL for CUDA tensors beside gloo for CPU tensors where CUDA is used, gloo otherwise.
- The first rank that fails says so in the rendezvous store, which exists before any process group; it alone prints its error. The
  others, whose errors are consequences (closed connections), print one line. Every rank then leaves at once, without the clean-up that
  could wait for the others; torchrun ends whatever is left.
- Ctrl-C ends a rank in the same way and without a traceback.
- Ranks do not outlive torchrun: when it is killed nobody else would end them, and they would train on unseen.
"""

from __future__ import annotations

import os
import re
import sys
import threading
import time
import traceback
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import timedelta
from typing import NoReturn

import torch
import torch.distributed as dist

from megalite.errors import CommError, ConfigError, MegaliteError
from megalite.grid import Axis, Grid
from megalite.training.rendezvous import fresh_store

__all__ = ["FAILURES", "Launch", "choose_device", "end_process", "guard", "init_distributed", "library_comm_error"]

FAILURES = "megalite/failures"
"""Name of the number of failures in the store; the rank that makes it 1 is the first."""

_BROKEN_LINE = re.compile("timed out|timeout|connection (closed|reset|refused)|broken pipe|nccl|socket", re.IGNORECASE)
_LOOK_FOR_LAUNCHER = 0.5  # seconds
_WAIT_FOR_LAUNCHER = 5.0  # seconds that a rank which failed second leaves the launcher to notice the first one


@dataclass(frozen=True)
class Launch:
    """Where this process stands among those that were launched together. launcher: torchrun's process id, None without it."""

    rank: int
    world_size: int
    local_rank: int
    store: dist.Store
    launcher: int | None = None

    @classmethod
    def from_environment(cls) -> Launch:
        """Meet the other ranks at torchrun's store; a process of its own makes a private one. Raises CommError where they do not come."""
        if "RANK" not in os.environ:
            return cls(0, 1, 0, dist.HashStore())
        store, rank, world_size = next(dist.rendezvous("env://"))  # type: ignore[call-overload]
        launcher = os.getppid() if "TORCHELASTIC_RUN_ID" in os.environ else None
        if launcher is not None:
            store = fresh_store(store, rank, world_size)
        return cls(rank, world_size, int(os.environ.get("LOCAL_RANK", "0")), store, launcher)


def choose_device(name: str, local_rank: int) -> torch.device:
    """`auto` is this rank's GPU where CUDA is, else the CPU. Raises ConfigError when CUDA is asked for and missing."""
    if name == "cpu" or (name == "auto" and not torch.cuda.is_available()):
        return torch.device("cpu")
    if not torch.cuda.is_available():
        raise ConfigError("device is cuda, but torch sees no CUDA device; use --device cpu or install a CUDA build of torch")
    if local_rank >= torch.cuda.device_count():
        raise ConfigError(
            f"local rank {local_rank} has no GPU of its own: {torch.cuda.device_count()} are visible; "
            "launch at most one rank per GPU, or use --device cpu"
        )
    return torch.device("cuda", local_rank)


def init_distributed(launch: Launch, device: torch.device, timeout: timedelta) -> None:
    """Make the default process group; a collective that waits longer than `timeout` fails."""
    on_gpu = device.type == "cuda"
    if on_gpu:
        torch.cuda.set_device(device)
    dist.init_process_group(
        "cpu:gloo,cuda:nccl" if on_gpu else "gloo",
        store=dist.PrefixStore("world", launch.store),
        rank=launch.rank,
        world_size=launch.world_size,
        timeout=timeout,
        device_id=device if on_gpu else None,
    )


def library_comm_error(error: Exception, grid: Grid) -> CommError | None:
    """What to say of a collective that failed inside a library: FSDP2's go over data parallelism, other libraries' over the world.

    None for every other error, whose traceback is wanted. (Collectives of ours raise CommError by themselves, see `comm`.)
    """
    files = [frame.filename for frame in traceback.extract_tb(error.__traceback__)]
    in_library = any("torch/distributed/" in file for file in files)
    if (
        type(error) not in (RuntimeError, dist.DistBackendError, dist.DistNetworkError)
        or not in_library
        or not _BROKEN_LINE.search(str(error))
    ):
        return None
    axis: Axis = grid.dp if any("_fully_shard" in file for file in files) else grid.world
    ranks = ", ".join(map(str, axis.ranks[:8])) + (", ..." if axis.size > 8 else "")
    return CommError(f"a collective over axis {axis.name} (ranks {ranks}) failed during {grid.progress.doing}: {error}")


@contextmanager
def guard(launch: Launch) -> Iterator[None]:
    """Run the body; on an error print it once for the whole world and end this process with a non-zero code.

    A user's error (MegaliteError) is printed as one message, anything else with its traceback. Leaves the process groups on success.
    """
    if launch.launcher is not None:
        threading.Thread(target=_leave_with_launcher, args=(launch,), name="leave with launcher", daemon=True).start()
    try:
        yield
    except SystemExit:
        raise
    except KeyboardInterrupt:
        if _is_first_failure(launch.store):
            _say("interrupted; what was not saved is lost\n")
        os._exit(130)  # what a shell reports for SIGINT
    except BaseException as error:  # DCP's exceptions do not derive from Exception
        end_process(launch, error, is_first=_is_first_failure(launch.store))
    if dist.is_initialized():
        dist.destroy_process_group()


def end_process(launch: Launch, error: BaseException, *, is_first: bool) -> NoReturn:
    """Say `error`, or that another rank has failed first, and end this process at once; from any thread."""
    _report(launch, error, is_first)
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(2 if isinstance(error, ConfigError) else 1)


def _leave_with_launcher(launch: Launch) -> None:
    while os.getppid() == launch.launcher:
        time.sleep(_LOOK_FOR_LAUNCHER)
    _say(f"rank {launch.rank}: stopped, because torchrun is gone\n")
    os._exit(1)


def _report(launch: Launch, error: BaseException, is_first: bool) -> None:
    if not is_first:
        _say(f"rank {launch.rank}: stopped, because another rank failed first\n")
        time.sleep(_WAIT_FOR_LAUNCHER)
        return
    where = f"rank {launch.rank}: " if launch.world_size > 1 else ""
    if isinstance(error, MegaliteError):
        notes = "".join(f"\n  {note}" for note in getattr(error, "__notes__", ()))
        _say(f"error: {where}{error}{notes}\n")
    else:
        _say(f"{where}{''.join(traceback.format_exception(error))}")


def _say(text: str) -> None:
    sys.stderr.write(text)
    sys.stderr.flush()


def _is_first_failure(store: dist.Store) -> bool:
    try:
        return store.add(FAILURES, 1) == 1
    except RuntimeError:  # the store is gone with the launcher: say the error rather than hide it
        return True
