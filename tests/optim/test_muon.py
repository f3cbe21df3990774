"""Muon: equal to torch's on one rank, and the same update in every layout."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from dataclasses import replace
from functools import cache
from typing import Any

import pytest
import torch
from torch import Tensor

from megalite import comm
from megalite.config import OptimConfig, RunConfig
from megalite.optim import Optimizer, finalize_grads, muon
from megalite.optim.muon import newton_schulz
from megalite.testing.layouts import Layout
from megalite.testing.parity import Tolerance, TrainedCase, bitwise_differences, compare, tiny_config, train_case
from tests.data_parallel import toy
from tests.optim.test_skip import set_grads
from tests.ranks import run_ranks

MUON = OptimConfig(optimizer="muon", weight_decay=0.2)
MATRICES = [f"layers.{layer}.{name}" for layer in range(toy.NUM_LAYERS) for name in ("down", "up")]


@pytest.mark.parametrize(("mode", "theirs"), [("match_adam", "match_rms_adamw"), ("spectral", "original")])
@pytest.mark.parametrize("nesterov", [True, False])
def test_equals_torch_muon_for_block_matrices_and_adamw_for_the_rest(mode: str, theirs: str, nesterov: bool) -> None:
    """In bf16, in which torch's iterations are; momentum, decay and scales are fp32 in both."""
    stage, twin = toy.build_plain(), toy.build_plain()
    config = replace(MUON, muon_dtype="bf16", muon_scale_mode=mode, muon_use_nesterov=nesterov, muon_momentum=0.9)
    optimizer = Optimizer(toy.collect_parameters([stage]), config)
    named = dict(twin.named_parameters())
    reference = torch.optim.Muon([named[name] for name in MATRICES], weight_decay=0.2, momentum=0.9, nesterov=nesterov, adjust_lr_fn=theirs)
    decayed = [value for name, value in named.items() if name not in MATRICES and name.endswith(("weight", "mix"))]
    others = [value for name, value in named.items() if name not in MATRICES and not name.endswith(("weight", "mix"))]
    adam = torch.optim.AdamW([{"params": decayed, "weight_decay": 0.2}, {"params": others, "weight_decay": 0.0}], betas=(0.9, 0.95))
    for step, lr in enumerate([0.01, 0.03, 0.02]):
        set_grads(stage, step)
        set_grads(twin, step)
        optimizer.step(lr)
        for group in (*reference.param_groups, *adam.param_groups):
            group["lr"] = lr
        reference.step()
        adam.step()
    for name, found in stage.named_parameters():
        torch.testing.assert_close(found, named[name], rtol=1e-5, atol=1e-6, msg=name)
    state = optimizer.named_state()
    assert {name for name, moments in state.items() if set(moments) == {"momentum_buffer"}} == set(MATRICES)
    assert all(set(moments) == {"exp_avg", "exp_avg_sq"} for name, moments in state.items() if name not in MATRICES)


@pytest.mark.parametrize("shape", [(7, 19), (19, 7), (11, 11)])
def test_newton_schulz_keeps_singular_vectors_and_flattens_singular_values(shape: tuple[int, int]) -> None:
    matrix = torch.randn(shape, generator=torch.Generator().manual_seed(3))
    found = newton_schulz(matrix, 5)
    u, _, vh = torch.linalg.svd(matrix, full_matrices=False)
    values = u.mT @ found @ vh.mT
    torch.testing.assert_close(values, torch.diag(values.diag()), rtol=0, atol=1e-4)
    assert 0.6 < values.diag().min() <= values.diag().max() < 1.3
    assert newton_schulz(torch.zeros(shape), 5).equal(torch.zeros(shape))


def three_steps(sizes: Mapping[str, int], zero: int) -> tuple[dict[str, Tensor], Counter[str]]:
    """Weights and moments after three steps, whole; the last update's all-to-alls by axis, and the "matrices" that this rank computed."""
    grid = toy.grid_of(**sizes)
    stages = toy.build(grid, zero)
    parameters = toy.parameters_of(stages)
    optimizer = Optimizer(parameters, MUON, grid)
    counts: Counter[str] = Counter()

    def counted(*args: Any) -> Tensor:
        counts["matrices"] += 1
        return newton_schulz(*args)

    for step in range(3):
        toy.train(stages, toy.share(toy.microbatches(12, step), grid), 120, zero, 2)
        finalize_grads(parameters, grid)
        with comm.record_comms(grid) as records, pytest.MonkeyPatch.context() as patch:
            counts.clear()
            patch.setattr(muon, "newton_schulz", counted)
            optimizer.step(0.02)
        assert {record.op for record in records} <= {"all_to_all"}
        counts.update(record.axis for record in records)
        optimizer.zero_grad()
    tensors = {p.name: p.parameter.detach() for p in parameters}
    for name, moments in optimizer.named_state().items():
        tensors |= {f"{key}.{name}": moment for key, moment in moments.items()}
    return {name: toy.full(tensor) for name, tensor in tensors.items()}, counts


@cache
def of_one_rank() -> dict[str, Tensor]:
    return run_ranks(three_steps, 1, {}, 0)[0][0]


@pytest.mark.parametrize(
    ("sizes", "zero"),
    [
        ({"dp_shard": 4, "tp": 2}, 3),  # the last rank's slice of a matrix is empty
        ({"dp_shard": 3}, 1),  # REQ 60: an odd number of ranks
        ({"dp_replicate": 2, "dp_shard": 2, "tp": 2}, 2),
        ({"dp_replicate": 2}, 0),
    ],
    ids=str,
)
def test_requirement_60_odd_cuts_and_empty_slices_make_the_update_of_whole_matrices(sizes: dict[str, int], zero: int) -> None:
    expected, parts = of_one_rank(), {"dp_shard": 1, "tp": 1} | sizes
    rounds = -(-len(MATRICES) // (parts["dp_shard"] * parts["tp"]))
    results = run_ranks(three_steps, int(torch.tensor(list(sizes.values())).prod()), sizes, zero)
    for found, counts in results:
        for name, value in expected.items():
            torch.testing.assert_close(found[name], value, rtol=1e-4, atol=1e-5, msg=name)
        assert counts["dp_shard"] == (2 * rounds if parts["dp_shard"] > 1 else 0)
        assert counts["tp"] <= (2 * rounds if parts["tp"] > 1 else 0)  # fewer where there are not enough matrices
        assert counts["matrices"] <= rounds
    assert sum(counts["matrices"] for _, counts in results) == len(MATRICES) * sizes.get("dp_replicate", 1)


GROUPS = [  # layouts that do the same arithmetic
    [Layout(), Layout(pp=2, schedule="zb-h1")],
    [Layout(tp=2, sequence_parallel=True), Layout(tp=2, pp=2, sequence_parallel=True)],
    [Layout(tp=4)],  # more ranks than key/value heads
    [Layout(dp=3, zero=3)],
    [Layout(dp=2, zero=0), Layout(dp=2, zero=1)],
    [Layout(dp=2, zero=2), Layout(dp=2, zero=3, pp=2)],
]


@cache
def train(layout: Layout) -> TrainedCase:
    return run_ranks(train_case, layout.world_size, small_config(), layout, timeout=120)[0]


def small_config() -> RunConfig:
    """Clipping is off: the norm's last bit depends on the cut over dp, and through it everything would."""
    config = tiny_config()
    return replace(
        config,
        model=replace(config.model, num_layers=2),
        optim=replace(config.optim, optimizer="muon", lr=3e-3, clip_grad=0.0),
        train=replace(config.train, global_batch_size=12),
    )


@pytest.mark.parametrize("group", GROUPS, ids=lambda group: str(group[0]))
def test_every_layout_trains_the_model_of_one_rank(group: list[Layout]) -> None:
    reference, first = train(Layout()), train(group[0])
    for layout in group:
        difference = compare(train(layout), reference)
        assert difference.within(Tolerance(weights=1e-5)), (str(layout), difference)
        assert set(bitwise_differences(train(layout), first)) <= {"grad norm"}, str(layout)


def test_a_matrix_cut_by_rows_is_not_the_same_as_its_pieces() -> None:
    """The comparison above would see an orthogonalisation of slices: it gives another update."""
    matrix = torch.randn(8, 12, generator=torch.Generator().manual_seed(1))
    pieces = torch.cat([newton_schulz(piece, 5) for piece in matrix.chunk(2)])
    assert (pieces - newton_schulz(matrix, 5)).abs().max() > 0.05
