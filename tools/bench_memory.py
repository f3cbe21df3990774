"""Predicted memory against measured memory, in many layouts on this machine's CPU: every living tensor of a step is counted.

    python tools/bench_memory.py            all cases, some minutes
    python tools/bench_memory.py --quick    fewer, within a minute

Two tables: bytes of weights, gradients and optimizer state with ZeRO 3 over 1, 2, 4 and 8 ranks against 16 / N per parameter; and the
peak of a step per schedule, precision and recomputation against the prediction (of what a step adds to weights and optimizer state).
The last line is JSON. Exits with 1 when states are off by more than 5 % or a peak by more than 10 %.
"""

from __future__ import annotations

import argparse
import json
import sys
from typing import Any

from megalite.config_numerics import MemoryConfig
from megalite.testing.layouts import Layout
from megalite.testing.memory_cases import MemoryCase, gradient_bytes, measure
from megalite.testing.rank_pool import RankPool

STATES, PEAK = 0.05, 0.10
RECOMPUTED = (
    MemoryConfig(recompute_granularity="full"),
    MemoryConfig(recompute_granularity="selective", recompute_modules=("core_attn", "norm", "mlp_act")),
)


def cases(*, quick: bool) -> list[MemoryCase]:
    schedules = [Layout(pp=2), Layout(pp=4), Layout(pp=2, schedule="zb-h1")]
    if not quick:
        names = ("gpipe", "interleaved-1f1b", "zb-h1", "zb-h2", "zb-v", "v-half", "dualpipe-v")
        schedules += [Layout(pp=pp, schedule=name) for pp in (2, 4) for name in names if (pp, name) != (2, "zb-h1")]
    found = [MemoryCase(layout=layout) for layout in schedules]
    found += [MemoryCase(layout=Layout(dp=2, zero=zero)) for zero in ((1, 3) if quick else range(4))]
    if not quick:
        found += [MemoryCase(memory=memory, layout=layout) for memory in RECOMPUTED for layout in (Layout(), Layout(pp=2))]
        found += [MemoryCase(precision="bf16", layout=Layout(dp=dp, zero=zero)) for dp, zero in ((1, 0), (2, 1), (3, 2), (4, 3))]
        found += [MemoryCase(layout=Layout(tp=2, sequence_parallel=sp)) for sp in (False, True)]
        found += [MemoryCase(layout=Layout(tp=2, pp=2, dp=2, zero=3, sequence_parallel=True), precision="bf16")]
    return found


def check_states(pool: RankPool, *, quick: bool) -> list[dict[str, Any]]:
    rows = []
    print(f"{'ZeRO 3 over':>12}{'bytes per rank':>18}{'16 P / N':>14}{'ratio':>8}")
    for ranks in (1, 2, 4) if quick else (1, 2, 4, 8):
        layout = Layout(dp=ranks, zero=3 if ranks > 1 else 0)
        found = pool.run(gradient_bytes, ranks, MemoryCase(layout=layout), timeout=300)
        held, wanted = max(value for value, _ in found), 16 * found[0][1] / ranks
        print(f"{ranks:>12}{held:>18,}{wanted:>14,.0f}{held / wanted:>8.3f}", flush=True)
        rows.append({"ranks": ranks, "bytes": held, "ratio": round(held / wanted, 4)})
    return rows


def check_peaks(pool: RankPool, *, quick: bool) -> list[dict[str, Any]]:
    rows = []
    print(f"\n{'peak of a step beyond weights and optimizer, MiB':62}{'predicted':>10}{'measured':>10}{'ratio':>8}")
    for case in cases(quick=quick):
        worst: dict[str, Any] = {"ratio": 1.0}
        for place, found in pool.run(measure, case.layout.world_size, case, timeout=300):
            predicted, peak = found["peak of a step"]
            states = [found["weights (fp32)"], found["optimizer state"]]
            assert peak is not None
            predicted, peak = predicted - sum(value for value, _ in states), peak - sum(value or 0 for _, value in states)
            ratio = peak / predicted
            print(f"{f'{case}, pp rank {place}':62}{predicted / 2**20:>10.2f}{peak / 2**20:>10.2f}{ratio:>8.3f}", flush=True)
            if abs(ratio - 1) >= abs(worst["ratio"] - 1):
                worst = {"case": str(case), "pp_rank": place, "ratio": round(ratio, 4)}
        rows.append(worst)
    return rows


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="fewer cases, within a minute")
    quick = parser.parse_args().quick
    with RankPool(4 if quick else 8) as pool:
        states, peaks = check_states(pool, quick=quick), check_peaks(pool, quick=quick)
    holds = all(abs(row["ratio"] - 1) <= STATES for row in states) and all(abs(row["ratio"] - 1) <= PEAK for row in peaks)
    print(json.dumps({"holds": holds, "states": states, "peaks": peaks}))
    return 0 if holds else 1


if __name__ == "__main__":
    sys.exit(main())
