"""ZB-H1, ZB-H2, ZB-1p and ZB-2p: literal orders, and the published makespans, peaks and bubble rates."""

from __future__ import annotations

import pytest

from megalite.errors import ConfigError, ScheduleError
from megalite.pipeline.schedules import CostModel, Kind, Schedule, ScheduleOptions, build_schedule, zb_auto, zb_h1, zb_h2
from megalite.pipeline.simulate import simulate
from megalite.pipeline.verify import verify

SIZES = [(2, 4), (4, 8), (4, 16), (8, 32)]


def order(schedule: Schedule, rank: int) -> str:
    return " ".join(schedule.label(action) for action in schedule.orders[rank])


def test_literal_orders_of_two_ranks() -> None:
    assert order(zb_h1(2, 4), 0) == "F0 F1 I0 W0 F2 I1 W1 F3 I2 W2 I3 W3"
    assert order(zb_h1(2, 4), 1) == "F0 I0 F1 I1 W0 F2 I2 W1 F3 I3 W2 W3"
    assert order(zb_h2(2, 4), 0) == "F0 F1 F2 I0 W0 F3 I1 W1 I2 W2 I3 W3"
    assert order(zb_h2(2, 4), 1) == "F0 I0 F1 I1 F2 I2 W0 F3 I3 W1 W2 W3"


def test_literal_orders_of_four_ranks() -> None:
    h1, h2 = zb_h1(4, 8), zb_h2(4, 8)
    assert order(h1, 0) == "F0 F1 F2 F3 I0 W0 F4 I1 W1 F5 I2 W2 F6 I3 W3 F7 I4 W4 I5 W5 I6 W6 I7 W7"
    assert order(h1, 3) == "F0 I0 F1 I1 F2 I2 F3 I3 W0 F4 I4 W1 F5 I5 W2 F6 I6 W3 F7 I7 W4 W5 W6 W7"
    assert order(h2, 0) == "F0 F1 F2 F3 F4 F5 F6 I0 W0 F7 I1 W1 I2 W2 I3 W3 I4 W4 I5 W5 I6 W6 I7 W7"
    assert order(h2, 3) == "F0 I0 F1 I1 F2 I2 F3 I3 F4 I4 F5 I5 F6 I6 W0 F7 I7 W1 W2 W3 W4 W5 W6 W7"


@pytest.mark.parametrize(("size", "expected"), list(zip(SIZES, (13, 27, 51, 103), strict=True)))
def test_h1(size: tuple[int, int], expected: float) -> None:
    p, m = size
    timeline = simulate(zb_h1(p, m))
    assert timeline.makespan == timeline.span == expected
    assert timeline.peaks_at_input_grad == tuple(range(p, 0, -1))
    assert timeline.peaks == (p,) * p
    assert timeline.messages == 2 * m * (p - 1)


@pytest.mark.parametrize(("size", "expected"), list(zip(SIZES, ((13, 12), (27, 24), (51, 48), (103, 96)), strict=True)))
def test_h2(size: tuple[int, int], expected: tuple[float, float]) -> None:
    p, m = size
    timeline = simulate(zb_h2(p, m))
    assert (timeline.makespan, timeline.span) == expected
    assert timeline.bubble_over_total == 0
    assert timeline.peaks_at_input_grad == tuple(range(2 * p - 1, 0, -2))
    assert timeline.peaks == (2 * p - 1,) * p


def test_few_microbatches() -> None:
    spans = [tuple(simulate(make(p, m)).span for make in (zb_h1, zb_h2)) for p, m in ((4, 4), (4, 6), (8, 8), (8, 12))]
    assert spans == [(15, 15), (21, 19), (31, 31), (43, 39)]
    verify(zb_h1(5, 1))
    verify(zb_h2(5, 2))


def test_latency_and_unequal_times() -> None:
    def spans(name: str, cost: CostModel) -> list[float]:
        return [simulate(build_schedule(name, *size, 1), cost).span for size in SIZES]

    slow = CostModel(latency=0.1)
    assert spans("zb-h1", slow) == pytest.approx([13.4, 28.2, 52.2, 105.8])
    assert spans("zb-h2", slow) == pytest.approx([12.2, 24.6, 48.6, 97.4])
    # span = m T + (p-1)(F + I - W) and (p-1)(F + I - 2W)
    half = CostModel(weight_grad=0.5)
    assert simulate(zb_h1(4, 8), half).makespan == 24.5
    assert simulate(zb_h2(4, 8), half).span == 23


# model, p, m, T_F, T_I, T_W, T_comm, then the bubble rates of 1F1B, ZB-H1, ZB-H2, ZB-1p, ZB-2p (arXiv 2401.10241, tables 5 and 9)
TABLE_5 = """
1.5B  8  24 18.522 18.086  9.337 .601 .2431 .1585 .1083 .1585 .0433
1.5B  8  32 18.513 18.086  9.331 .626 .1985 .1242 .0837 .1242 .0039
1.5B  8  64 18.546 18.097  9.321 .762 .1240 .0674 .0444 .0674 .0026
6.2B  8  24 29.718 29.444 19.927 .527 .2347 .1323 .0698 .1323 .0029
6.2B  8  32 29.802 29.428 19.530 .577 .1898 .1045 .0559 .1045 .0022
6.2B  8  64 29.935 29.621 19.388 .535 .1091 .0554 .0294 .0554 .0010
14.6B 16 48 11.347 11.248  8.132 .377 .2552 .1397 .0672 .1397 .0066
14.6B 16 64 11.307 11.254  8.101 .379 .2082 .1088 .0516 .1088 .0054
14.6B 16 128 11.325 11.308 8.109 .378 .1251 .0576 .0266 .0576 .0028
28.3B 32 96 10.419 10.207  7.715 .408 .2646 .1421 .0641 .1421 .0038
28.3B 32 128 10.408 10.204 7.703 .408 .2168 .1106 .0490 .1106 .0029
28.3B 32 256 10.402 10.248 7.698 .460 .1352 .0594 .0257 .0594 .0018
"""
ROWS = [line.split() for line in TABLE_5.strip().splitlines()]


def rate(name: str, row: list[str]) -> float:
    p, m = map(int, row[1:3])
    cost = CostModel(*map(float, row[3:7]))
    return simulate(build_schedule(name, p, m, 1, ScheduleOptions(cost=cost)), cost).bubble_over_total


@pytest.mark.parametrize("row", ROWS, ids=lambda row: f"{row[0]}-{row[2]}")
def test_table_5_fixed_schedules(row: list[str]) -> None:
    assert [f"{rate(name, row):.4f}" for name in ("1f1b", "zb-h1", "zb-h2")] == [f"0{text}" for text in row[7:10]]


def test_table_5_automatic_schedules() -> None:
    """All 24 values agree in all 4 decimals; those that take longest are left out here.

    The last one depends on exact arithmetic: planned with binary fractions, equal times compare as different, the best
    plan is another, and its rate .0023 instead of .0018.
    """
    for row in ROWS:
        if int(row[1]) * int(row[2]) <= 800:
            assert [f"{rate(name, row):.4f}" for name in ("zb-1p", "zb-2p")] == [f"0{text}" for text in row[10:]]
    assert f"{rate('zb-2p', ROWS[-1]):.4f}" == "0.0018"


def weighted_peak(schedule: Schedule) -> float:
    """Most memory of any rank when I frees half of an activation and W the other half."""
    peak = 0.0
    for actions in schedule.orders:
        alive = 0.0
        for action in actions:
            alive += 1 if action.kind is Kind.FORWARD else -0.5
            peak = max(peak, alive)
    return peak


@pytest.mark.parametrize("factor", [1, 2])
def test_automatic_schedules_keep_their_limit_and_are_deterministic(factor: int) -> None:
    for p, m, cost in ((3, 7, CostModel()), (4, 9, CostModel(1.3, 0.9, 0.6, 0.2)), (5, 5, CostModel((1, 2, 1, 1, 3)))):
        schedule = zb_auto(p, m, factor, cost)
        verify(schedule)
        assert weighted_peak(schedule) <= factor * p
        assert schedule == zb_auto(p, m, factor, cost)
    assert simulate(zb_auto(4, 16, 2)).bubble_over_total == 0


def test_automatic_schedules_refuse() -> None:
    with pytest.raises(ConfigError, match="forward has 2 numbers for 3 stages"):
        zb_auto(3, 4, 1, CostModel(forward=(1, 2)))
    with pytest.raises(ScheduleError, match="zb-1p: cost model: forward has 2 numbers for 3 stages"):
        build_schedule("zb-1p", 3, 4, 1, ScheduleOptions(cost=CostModel(forward=(1, 2))))
    with pytest.raises(ScheduleError, match="memory limit"):
        zb_auto(2, 4, 0)
