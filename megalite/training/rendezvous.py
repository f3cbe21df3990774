"""A part of the launcher's store that no earlier life of the run has written to.

torchrun keeps one store for all restarts (`--max-restarts`), and starts the ranks of every life with the same address. What the ranks of
a life that ended have written there, addresses of connections and counts of failures, would be read by those of the next one.

Decisions
- Number of restarts is no name for a life: with several nodes each launcher counts the failures of its own ranks only.
- So the ranks meet first: rank 0 makes up a name, every other rank a word. A rank leaves its word under its number, rank 0 answers under
  the word, and the rank confirms there what it was told. Words and names are never used twice, so nothing old can be taken for an answer.
"""

from __future__ import annotations

import time
import uuid
from datetime import timedelta

import torch.distributed as dist

from megalite.errors import CommError

__all__ = ["fresh_store"]

_LOOK_AGAIN = 0.01  # seconds
_MEETING = timedelta(minutes=10)


def fresh_store(store: dist.Store, rank: int, world_size: int, timeout: timedelta = _MEETING) -> dist.Store:
    """Collective over all ranks of this life. Raises CommError where some do not come within `timeout`."""
    life = _name_life(store, world_size, timeout) if rank == 0 else _ask(store, rank, timeout)
    return dist.PrefixStore(f"megalite/life/{life}", store)


def _name_life(store: dist.Store, world_size: int, timeout: timedelta) -> str:
    life, end = uuid.uuid4().hex, time.monotonic() + timeout.total_seconds()
    missing = set(range(1, world_size))
    while missing:
        missing -= {rank for rank in missing if _answer(store, rank, life)}
        if missing and time.monotonic() > end:
            raise CommError(f"ranks {sorted(missing)[:8]} of {world_size} did not come within {timeout.total_seconds():.0f} s")
        if missing:
            time.sleep(_LOOK_AGAIN)
    return life


def _answer(store: dist.Store, rank: int, life: str) -> bool:
    """Whether the rank has confirmed this life; its word may be one of an earlier life, which gets an answer that nobody reads."""
    key = f"megalite/word/{rank}"
    if not store.check([key]):
        return False
    word = store.get(key).decode()
    if store.check([f"megalite/told/{word}"]):
        return store.get(f"megalite/told/{word}").decode() == life
    store.set(f"megalite/answer/{word}", life)
    return False


def _ask(store: dist.Store, rank: int, timeout: timedelta) -> str:
    word = uuid.uuid4().hex
    store.set(f"megalite/word/{rank}", word)
    try:
        store.wait([f"megalite/answer/{word}"], timeout)
    except RuntimeError as error:
        raise CommError(f"rank {rank} got no answer of rank 0 within {timeout.total_seconds():.0f} s: {error}") from error
    life = store.get(f"megalite/answer/{word}").decode()
    store.set(f"megalite/told/{word}", life)
    return life
