"""Ranks of a restarted run do not see what the ranks before them have written."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from datetime import timedelta
from typing import Any

import pytest
import torch.distributed as dist

from megalite.errors import CommError
from megalite.training.rendezvous import fresh_store


def meet(store: Any, ranks: list[int], world_size: int, seconds: float = 20) -> list[dist.Store]:
    """One life: ranks arrive in the order given, each with a connection of its own."""
    with ThreadPoolExecutor(len(ranks)) as pool:
        found = [pool.submit(fresh_store, store.clone(), rank, world_size, timedelta(seconds=seconds)) for rank in ranks]
        stores = [future.result() for future in found]
    return [stores[ranks.index(rank)] for rank in sorted(ranks)]


@pytest.fixture
def store() -> dist.Store:
    return dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)


def test_every_life_has_names_of_its_own(store: dist.Store) -> None:
    first = meet(store, [2, 0, 1], 3)
    first[1].set("address", "old")
    assert first[2].get("address") == b"old"
    second = meet(store, [1, 2, 0], 3)
    assert not second[0].check(["address"])
    second[0].set("address", "new")
    assert second[1].get("address") == b"new" and first[0].get("address") == b"old"
    fewer = meet(store, [1, 0], 2)
    assert not fewer[1].check(["address"])
    assert meet(store, [0], 1)[0].add("failures", 1) == 1


def test_a_life_that_ended_while_meeting_leaves_nothing_behind(store: dist.Store) -> None:
    with pytest.raises(CommError, match=r"ranks \[2\] of 3 did not come"):
        meet(store, [0, 1], 3, seconds=0.3)
    with pytest.raises(CommError, match="rank 1 got no answer of rank 0"):
        meet(store, [1], 3, seconds=0.3)
    names = meet(store, [1, 2, 0], 3)
    names[2].set("x", "1")
    assert names[0].get("x") == names[1].get("x") == b"1"
