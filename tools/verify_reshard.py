"""Save a model in every layout of a list, load each checkpoint in each of them, and train on.

    python tools/verify_reshard.py             8 layouts of up to 8 ranks on this machine's CPU, all 64 pairs, some minutes
    python tools/verify_reshard.py --quick     train on from the first checkpoint and the same layout only

Weights and optimizer moments must be equal in every bit after loading, the losses of the five steps that follow equal to those of the run
that never stopped: bit for bit in the same layout, within 1e-5 (relative) in another. Prints a row per pair and, last, one line of JSON;
exits with 1 when a pair does not hold.
"""

from __future__ import annotations

import argparse
import json
import math
import sys
import tempfile
from pathlib import Path


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="train on from the first checkpoint and in the same layout only")
    parser.add_argument("--timeout", type=float, default=300, help="seconds for one layout (default 300)")
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory(prefix="megalite-reshard-") as folder:
        figures = run_pairs(Path(folder), arguments.quick, arguments.timeout)
    print(json.dumps(figures))
    return 1 if figures["failed"] else 0


def run_pairs(folder: Path, quick: bool, timeout: float) -> dict[str, float | int | None]:
    """All pairs; rows are printed as they come."""
    from megalite.testing.rank_pool import RankPool
    from megalite.testing.reshard import LAYOUTS, largest_relative, load_and_train_on, problems, reshard_config, train_and_save

    config, num_failed, worst = reshard_config(), 0, 0.0
    places = [folder / str(number) for number in range(len(LAYOUTS))]
    with RankPool(max_ranks=max(layout.world_size for layout in LAYOUTS)) as pool:
        straight = [
            pool.run(train_and_save, layout.world_size, config, layout, place, timeout=timeout)[0]
            for layout, place in zip(LAYOUTS, places, strict=True)
        ]
        print(f"{'saved by':34s} {'loaded by':34s} {'tensors':>9s} {'losses':>9s}   verdict")
        for loaded in LAYOUTS:
            wanted = {place: not quick or saved in (LAYOUTS[0], loaded) for saved, place in zip(LAYOUTS, places, strict=True)}
            ranks = pool.run(load_and_train_on, loaded.world_size, config, loaded, wanted, timeout=timeout)
            for number, saved in enumerate(LAYOUTS):
                found = sorted({problem for rank in ranks for problem in problems(saved, loaded, rank[number], straight[number])})
                result = ranks[0][number]
                apart = largest_relative(result.losses, straight[number]) if result.losses else None
                worst = max(worst, apart or 0.0)
                num_failed += bool(found)
                losses = "" if apart is None else f"{apart:.1e}"
                print(f"{saved!s:34s} {loaded!s:34s} {len(result.unequal):3d} apart {losses:>9s}   {'; '.join(found) or 'ok'}", flush=True)
    worst_or_none = worst if math.isfinite(worst) else None
    return {"pairs": len(LAYOUTS) ** 2, "failed": num_failed, "max_loss_difference": worst_or_none}


if __name__ == "__main__":
    sys.exit(main())
