"""The rise of activations over a step: the published peaks of schedules, and the published memory of zero-bubble schedules."""

from __future__ import annotations

import pytest

from megalite.pipeline.lowering import lower
from megalite.pipeline.schedules import build_schedule
from megalite.planner.walk import StageMemory, activation_peak

GIB = 2**30


def peak(name: str, p: int, m: int, chunks: int, kept: int, rank: int = 0, deferred: int = 0, edge: int = 0, leaving: int = 0) -> int:
    program = lower(build_schedule(name, p, m, chunks))
    memory = StageMemory(kept=kept, deferred=deferred, forward_rise=kept, backward_rise=0, weight_rise=0)
    return activation_peak(program, rank, dict.fromkeys(program.schedule.stages_of(rank), memory), edge, leaving)


@pytest.mark.parametrize("rank", [0, 1, 3])
def test_1f1b_keeps_as_many_micro_batches_as_stages_behind(rank: int) -> None:
    assert peak("1f1b", 4, 9, 1, kept=7, rank=rank) == 7 * (4 - rank)


def test_gpipe_keeps_all() -> None:
    assert peak("gpipe", 3, 5, 1, kept=7) == 5 * 7


def test_what_waits_for_weight_gradients_goes_with_them_and_whole_backwards_leave_nothing() -> None:
    """DualPipeV splits some backwards only; whatever it splits, at the end of a long step nothing has piled up."""
    assert peak("dualpipe-v", 2, 4, 2, kept=7, deferred=5) == peak("dualpipe-v", 2, 12, 2, kept=7, deferred=5)
    assert peak("zb-h1", 2, 4, 1, kept=7, deferred=5) == peak("zb-h1", 2, 12, 1, kept=7, deferred=5)


def test_working_memory_counts_once() -> None:
    program = lower(build_schedule("1f1b", 2, 3, 1))
    memory = StageMemory(kept=10, deferred=0, forward_rise=14, backward_rise=3, weight_rise=0)
    assert activation_peak(program, 0, {0: memory}, 0, 0) == 2 * 10 + 4


def test_messages_wait_for_their_sends() -> None:
    """The last rank of gpipe sends nothing in the forward half, the first one leaves `leaving` messages under way."""
    assert peak("gpipe", 2, 5, 1, kept=7, edge=1, leaving=3) == 5 * 7 + 3 + 1  # the last forward's result waits to be sent


@pytest.mark.parametrize(
    ("billions", "h", "a", "layers", "p", "published"),
    [
        (1.5, 2304, 24, 22, 8, (30, 59, 40)),
        (6.2, 4096, 32, 30, 8, (39, 70, 48)),
        (14.6, 5120, 40, 46, 16, (32, 51, 39)),
        (28.3, 6144, 48, 62, 32, (43, 74, 58)),
    ],
)
def test_published_memory_of_zero_bubble_schedules(
    billions: float, h: int, a: int, layers: int, p: int, published: tuple[int, int, int]
) -> None:
    """Qi et al. 2024 (arXiv:2401.10241), table 4: 18 bytes per parameter and the activations of 1F1B, ZB-2p and interleaved 1F1B, GiB."""
    micro_batch, s, m = {8: 6 if billions < 2 else 3, 16: 1, 32: 1}[p], 1024, 3 * p
    chunks = (layers + 2) // p  # the first and the last stage have a layer less
    stage = chunks * s * micro_batch * (34 * h + 5 * a * s)
    states = 18 * billions * 1e9 / p
    found = (
        states + peak("1f1b", p, m, 1, kept=stage),
        states + peak("zb-2p", p, m, 1, kept=stage),
        states + peak("interleaved-1f1b", p, m, chunks, kept=stage // chunks),
    )
    for value, wanted in zip(found, published, strict=True):
        assert value / GIB == pytest.approx(wanted, rel=0.075)
