"""With a pipeline: the same bits for every split, and tied copies that stay equal."""

from __future__ import annotations

import pytest
import torch

from megalite import comm
from megalite.config import OptimConfig
from megalite.optim import Optimizer, check_replicas, clip_grads_, finalize_grads, global_names, grad_norm
from tests.data_parallel import toy
from tests.ranks import run_ranks

CONFIG = OptimConfig(adam_eps=1e-3)
STEPS = 2


def train_bits(sizes: dict[str, int], zero: int, in_flight: int) -> dict:
    """{(what, step, name, place in the layer grid): bytes} of this rank after each step."""
    grid = toy.grid_of(**sizes)
    numbers = [grid.pp.rank] if grid.pp.size > 1 else [0]
    stages = toy.build(grid, zero, numbers=numbers, num_stages=grid.pp.size)
    parameters = toy.parameters_of(stages)
    names, optimizer, bits = global_names(parameters, grid), Optimizer(parameters, CONFIG), {}
    place = (grid.dp.rank, grid.tp.rank)
    for step in range(STEPS):
        batches = toy.microbatches(2 * grid.dp.size, step)
        mine, divisor = toy.share(batches, grid), len(batches) * toy.S * toy.B
        if grid.pp.size > 1:
            toy.train_on_pp(stages[grid.pp.rank], grid, mine, divisor, zero)
        else:
            toy.train(stages, mine, divisor, zero, in_flight)
        finalize_grads(parameters, grid)
        norm = grad_norm(parameters, names, grid)
        clip_grads_(parameters, norm, 0.5)
        bits["norm", step, "", place] = norm.numpy().tobytes()
        for p in parameters:
            bits["gradient", step, p.name, place] = p.local_grad.numpy().tobytes()
        optimizer.step(0.01)
        optimizer.zero_grad()
        for p in parameters:
            bits["weight", step, p.name, place] = p.local.numpy().tobytes()
    return bits


@pytest.mark.parametrize(("sizes", "zero"), [({"dp_shard": 3}, 2), ({"dp_replicate": 3}, 0), ({"tp": 4}, 0), ({"dp_shard": 2, "tp": 2}, 3)])
def test_gradients_norm_and_weights_have_the_same_bits_for_every_split(sizes: dict[str, int], zero: int) -> None:
    ranks = torch.tensor(list(sizes.values())).prod().item()
    whole, split = {}, {}
    for bits in run_ranks(train_bits, ranks, sizes, zero, 2):
        whole |= bits
    for bits in run_ranks(train_bits, 2 * ranks, {"pp": 2, **sizes}, zero, 2):
        split |= bits
    assert whole.keys() == split.keys()
    assert [key for key in whole if whole[key] != split[key]] == []


def train_tied(sizes: dict[str, int], zero: int) -> dict:
    grid = toy.grid_of(**sizes)
    stage = toy.build(grid, zero, numbers=[grid.pp.rank], num_stages=2, tied=True)
    plain = toy.build_plain(tied=True)
    parameters, reference = toy.parameters_of(stage), toy.collect_parameters([plain])
    names = global_names(parameters, grid)
    optimizer, twin = Optimizer(parameters, CONFIG), Optimizer(reference, CONFIG)
    found = {"gradient": 0.0, "norm": 0.0, "before": len(check_replicas(parameters, grid)), "reduced": []}
    for step in range(STEPS):
        batches = toy.microbatches(2 * grid.dp.size, step)
        toy.train_on_pp(stage[grid.pp.rank], grid, toy.share(batches, grid), 20, zero)
        with comm.record_comms(grid) as records:
            finalize_grads(parameters, grid)
        found["reduced"].append(comm.count_comms(records))
        expected = toy.plain_gradients(plain, batches, 20)
        norm = grad_norm(parameters, names, grid)
        dense = torch.cat([grad.flatten() for grad in expected.values()]).norm()
        found["norm"] = max(found["norm"], toy.relative_difference(norm, dense))
        found["gradient"] = max(found["gradient"], toy.worst_gradient(parameters, expected))
        for each in (optimizer, twin):
            each.step(0.01)
            each.zero_grad()
    found["weight"] = toy.worst_value(parameters, plain)
    found["after"] = len(check_replicas(parameters, grid))
    found["elements"] = sum(number for _, number in optimizer.group_counts.values())
    spoil(parameters, grid)
    found["spoiled"] = check_replicas(parameters, grid)
    return found


def spoil(parameters: list, grid) -> None:
    """Change the last bit of one element of the copy, on one rank that has part of it."""
    for p in parameters:
        if p.is_copy and grid.dp.is_first and grid.tp.is_first:
            p.local[0, 1:2].view(torch.int32).bitwise_xor_(1)


@pytest.mark.parametrize(
    ("sizes", "zero"),
    [({"pp": 2}, 0), ({"pp": 2, "dp_shard": 2, "tp": 2}, 1), ({"pp": 2, "dp_shard": 3}, 3)],
)
def test_copies_of_a_tied_embedding_count_once_and_stay_equal(sizes: dict[str, int], zero: int) -> None:
    found = run_ranks(train_tied, torch.tensor(list(sizes.values())).prod().item(), sizes, zero)
    for rank in found:
        assert rank["before"] == rank["after"] == 0
        assert max(rank["gradient"], rank["norm"], rank["weight"]) < 1e-5, rank
        wanted = {("all_reduce", "embedding"): 1} | ({("all_gather", "tp"): 1} if "tp" in sizes else {})
        assert rank["reduced"] == [wanted] * STEPS
    lines = [line for rank in found for line in rank["spoiled"]]
    assert lines
    assert all(line.startswith("embedding.weight differs over ") for line in lines)
    per_line = len(found) // 2
    plain = toy.build_plain(tied=True)
    padding = (toy.ROWS - toy.V) * toy.H
    assert found[0]["elements"] + found[per_line]["elements"] == sum(p.numel() for p in plain.parameters()) - padding
