"""The rank pool: values, errors, hangs and deaths, and that nothing of one call reaches the next."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
import warnings
from pathlib import Path

import numpy as np
import pytest
import torch
import torch.distributed as dist

from megalite.testing import RankFailure, RankPool, RankTimeout
from tests.ranks import factorisations, run_ranks


def sum_of_ranks(scale: int, *, offset: int = 0) -> tuple[int, int, int]:
    total = torch.tensor([dist.get_rank() * scale + offset])
    dist.all_reduce(total)
    return dist.get_rank(), dist.get_world_size(), int(total.item())


def process_id() -> int:
    return os.getpid()


def raise_in(rank: int) -> None:
    if dist.get_rank() == rank:
        raise_for_a_reason(rank)
    dist.barrier()


def raise_for_a_reason(rank: int) -> None:
    raise ValueError(f"rank {rank} has a reason")


def die_in(rank: int, how: str) -> None:
    if dist.get_rank() == rank:
        if how == "exit":
            os._exit(3)
        os.kill(os.getpid(), signal.SIGKILL)
    dist.all_reduce(torch.ones(1))


def hang_in_rank_1_of_2() -> str:
    if dist.get_rank() == 1:
        wait_for_a_message_that_nobody_sends()
    return "finished"


def wait_for_a_message_that_nobody_sends() -> None:
    dist.recv(torch.zeros(1), src=0)


def tensors_and_arrays() -> dict[str, object]:
    rank = dist.get_rank()
    return {"tensor": torch.full((2, 3), float(rank)), "array": np.arange(rank + 1)}


def unpicklable_value() -> object:
    return lambda: None


def warn(category: type[Warning], text: str) -> str:
    warnings.warn(text, category, stacklevel=1)
    return "went on"


def leave_by(way: str) -> None:
    if way == "exit":
        sys.exit("leaving")
    if way == "skip":
        pytest.skip("leaving")
    raise KeyboardInterrupt("leaving")


def random_numbers() -> tuple[float, float]:
    torch.set_default_dtype(torch.float64)
    return torch.rand(()).item(), float(np.random.rand())


def default_dtype() -> torch.dtype:
    return torch.get_default_dtype()


def world_is_set_up() -> bool:
    dist.destroy_process_group()
    return dist.is_initialized()


def redistribute_after(num_other_groups: int) -> tuple[float, list[float]]:
    """A sharded tensor doubled and gathered, on a mesh whose groups are named by how many groups were made before."""
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.tensor import Replicate, Shard, distribute_tensor

    for _ in range(num_other_groups):
        dist.new_group([0])
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))
    whole = torch.arange(8.0)
    cut = distribute_tensor(whole, mesh, [Replicate(), Shard(0)])
    doubled = cut + cut
    return doubled.sum().full_tensor().item(), doubled.full_tensor().tolist()


def test_values_come_in_rank_order_for_worlds_of_any_size() -> None:
    for size in (3, 1, 8, 2):
        total = sum(10 * rank + 1 for rank in range(size))
        assert run_ranks(sum_of_ranks, size, 10, offset=1) == [(rank, size, total) for rank in range(size)]


def test_workers_stay_alive_between_calls() -> None:
    first = run_ranks(process_id, 3)
    assert len({*first, os.getpid()}) == 4
    assert run_ranks(process_id, 2) == first[:2]


def test_tensors_and_arrays_come_back() -> None:
    for rank, value in enumerate(run_ranks(tensors_and_arrays, 3)):
        assert torch.equal(value["tensor"], torch.full((2, 3), float(rank)))
        assert value["array"].tolist() == list(range(rank + 1))


@pytest.mark.parametrize("rank", [0, 2])
def test_an_exception_ends_the_call_while_the_others_wait(rank: int) -> None:
    start = time.monotonic()
    with pytest.raises(RankFailure) as caught:
        run_ranks(raise_in, 3, rank, timeout=60)
    assert time.monotonic() - start < 5
    assert (caught.value.rank, caught.value.summary) == (rank, f"ValueError: rank {rank} has a reason")
    message = str(caught.value)
    assert message.startswith(f"rank {rank} of 3 failed in tests.test_rank_pool.raise_in: ValueError: ")
    assert "in raise_for_a_reason" in message
    assert message.count("had not finished") == 2
    assert run_ranks(sum_of_ranks, 3, 1) == [(0, 3, 3), (1, 3, 3), (2, 3, 3)]


@pytest.mark.parametrize(("how", "words"), [("exit", "with exit status 3"), ("kill", "by signal 9")])
def test_a_death_is_the_failure_not_the_error_it_causes_elsewhere(how: str, words: str) -> None:
    start = time.monotonic()
    with pytest.raises(RankFailure, match=f"rank 1 of 3 failed in .*the process died {words}") as caught:
        run_ranks(die_in, 3, 1, how)
    assert time.monotonic() - start < 5
    assert caught.value.rank == 1
    assert len(run_ranks(process_id, 3)) == 3


def test_a_worker_that_dies_between_calls_is_replaced() -> None:
    before = run_ranks(process_id, 3)
    os.kill(before[1], signal.SIGKILL)
    deadline = time.monotonic() + 5
    while Path(f"/proc/{before[1]}").exists() and time.monotonic() < deadline:
        time.sleep(0.01)
    after = run_ranks(process_id, 3)
    assert before[1] not in after
    assert {before[0], before[2]} < set(after)


def test_a_hang_is_a_timeout_with_stacks_and_the_pool_goes_on() -> None:
    with pytest.raises(RankTimeout) as caught:
        run_ranks(hang_in_rank_1_of_2, 2, timeout=2)
    assert set(caught.value.stacks) == {1}
    assert "in wait_for_a_message_that_nobody_sends" in caught.value.stacks[1]
    message = str(caught.value)
    assert "1 of 2 ranks gave no answer within 2 s" in message
    assert "--- rank 0: had finished" in message
    assert run_ranks(sum_of_ranks, 2, 1) == [(0, 2, 1), (1, 2, 1)]


@pytest.mark.parametrize("category", [DeprecationWarning, FutureWarning, UserWarning])
def test_a_warning_in_a_rank_is_an_error(category: type[Warning]) -> None:
    with pytest.raises(RankFailure, match=f"{category.__name__}: this is old"):
        run_ranks(warn, 1, category, "this is old")


def test_warnings_can_be_let_through() -> None:
    with RankPool(
        1,
        ignored_warnings=[
            "this is .*",
        ],
    ) as pool:
        assert pool.run(warn, 1, UserWarning, "this is known") == ["went on"]
        with pytest.raises(RankFailure, match="that is not"):
            pool.run(warn, 1, UserWarning, "that is not")


@pytest.mark.parametrize("way", ["exit", "skip", "interrupt"])
def test_leaving_a_rank_by_any_exception_is_a_failure(way: str) -> None:
    with pytest.raises(RankFailure, match=r"(SystemExit|Skipped|KeyboardInterrupt): leaving"):
        run_ranks(leave_by, 1, way)


def test_what_cannot_be_pickled_is_named() -> None:
    with pytest.raises(TypeError, match="must stand at the top level of a module"):
        run_ranks(lambda: None, 1)
    with pytest.raises(RankFailure, match="pickle"):
        run_ranks(unpicklable_value, 1)


def test_every_call_begins_in_the_same_state() -> None:
    first, second = run_ranks(random_numbers, 1), run_ranks(random_numbers, 1)
    assert first == second
    assert run_ranks(default_dtype, 1) == [torch.float32]


def test_a_function_may_take_its_world_down() -> None:
    assert run_ranks(world_is_set_up, 2) == [False, False]
    assert len(run_ranks(sum_of_ranks, 2, 1)) == 2


def test_meshes_do_not_outlive_their_world() -> None:
    expected = [(56.0, [0.0, 2.0, 4.0, 6.0, 8.0, 10.0, 12.0, 14.0])] * 4
    assert run_ranks(redistribute_after, 4, 3) == expected
    assert run_ranks(redistribute_after, 4, 0) == expected
    assert run_ranks(redistribute_after, 4, 5) == expected


def test_sizes_and_closed_pools_are_checked() -> None:
    pool = RankPool(2)
    with pytest.raises(ValueError, match=r"world_size 3 is not in 1\.\.2"):
        pool.run(process_id, 3)
    pool.close()
    pool.close()
    with pytest.raises(ValueError, match="closed"):
        pool.run(process_id, 1)


PROGRAM = """
import os
from megalite.testing import RankPool

def pid():
    return os.getpid()

if __name__ == "__main__":
    print(*RankPool(2, preload=["torch"]).run(pid, 2), flush=True)
    {end}
"""


@pytest.mark.parametrize("end", ["pass", "raise SystemExit(5)", "os.kill(os.getpid(), 9)"])
def test_no_process_outlives_the_program(tmp_path: Path, end: str) -> None:
    script = tmp_path / "program.py"
    script.write_text(PROGRAM.format(end=end))
    root = str(Path(__file__).resolve().parents[1])
    done = subprocess.run(
        [sys.executable, str(script)],
        capture_output=True,
        text=True,
        timeout=60,
        env={**os.environ, "PYTHONPATH": root},
    )
    pids = [int(word) for word in done.stdout.split()]
    assert len(pids) == 2, done.stderr
    deadline = time.monotonic() + 5
    while any(map(is_alive, pids)) and time.monotonic() < deadline:
        time.sleep(0.02)
    assert not any(map(is_alive, pids))


def is_alive(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    return True


@pytest.mark.parametrize(("num_ranks", "count"), [(1, 1), (4, 6), (6, 9), (8, 10)])
def test_factorisations(num_ranks: int, count: int) -> None:
    layouts = factorisations(num_ranks)
    assert len(set(layouts)) == len(layouts) == count
    assert all(tp * pp * dp == num_ranks for tp, pp, dp in layouts)
