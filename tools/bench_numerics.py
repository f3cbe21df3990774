"""Number formats and layouts on real text: do the loss curves stay together, and does fp16 recover from overflow?

    python tools/bench_numerics.py            200 steps of each run, some ten minutes

Trains a small model on the text of the demo, on this machine's CPU:

    fp32                one rank; and with another seed, which gives the band in which runs differ anyway
    bf16                one rank, and tp 2 x pp 2 x dp 2 with ZeRO 3
    fp16                one rank, and with a first loss scale that overflows

Compared are losses, each the mean of a tenth of the run: bf16 in 3D against bf16 on one rank must stay inside the band at every tenth;
at the end bf16 must be within 2 % of fp32, and the forced fp16 run within 2 % of the unforced one. The last line is JSON; exits with 1
where one of them does not hold.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import tempfile
from dataclasses import dataclass, field, replace
from pathlib import Path
from statistics import mean
from typing import Literal

from megalite.config import DataConfig, ModelConfig, OptimConfig, RunConfig, TrainConfig
from megalite.testing.layouts import Layout
from megalite.testing.parity import build_in_this_world
from megalite.testing.rank_pool import RankPool
from megalite.training.loop import train

ROOT = Path(__file__).resolve().parent.parent
TENTHS = 10
CLOSE = 0.02
OVERFLOWING = 2.0**30  # gradients of this model times that leave the range of fp16


@dataclass(frozen=True, kw_only=True)
class Case:
    """One training run."""

    precision: Literal["fp32", "bf16", "fp16"] = "fp32"
    layout: Layout = field(default_factory=Layout)
    seed: int = 1234
    initial_loss_scale: float = 65536.0


CASES = {
    "fp32": Case(),
    "fp32, another seed": Case(seed=4321),
    "bf16": Case(precision="bf16"),
    "bf16, tp 2 x pp 2 x dp 2, zero 3": Case(precision="bf16", layout=Layout(tp=2, pp=2, dp=2, zero=3, sequence_parallel=True)),
    "fp16": Case(precision="fp16"),
    "fp16, forced to overflow": Case(precision="fp16", initial_loss_scale=OVERFLOWING),
}


def prepare(folder: Path) -> Path:
    """Token files of the demo's text, one byte a token. Returns their prefix."""
    command = [sys.executable, str(ROOT / "tools" / "preprocess_data.py"), "--input", str(ROOT / "examples" / "data" / "shakespeare.txt")]
    options = ["--document-separator", "\\n\\n\\n", "--append-eod", "--tokenizer-type", "bytes", "--output-prefix", str(folder / "text")]
    subprocess.run([*command, *options], check=True, stdout=subprocess.DEVNULL)
    return folder / "text_text_document"


def configure(prefix: Path, case: Case, steps: int) -> RunConfig:
    config = RunConfig(
        model=ModelConfig(num_layers=4, hidden_size=64, num_attention_heads=4, num_query_groups=2, vocab_size=257, ffn_hidden_size=160),
        data=DataConfig(data_path=(str(prefix),), split="1,0,0", seq_length=64, num_workers=0),
        optim=OptimConfig(lr=3e-3, min_lr=3e-4, lr_warmup_iters=steps // 10),
        train=TrainConfig(
            micro_batch_size=2,
            global_batch_size=16,
            train_iters=steps,
            eval_interval=None,
            log_interval=steps,
            device="cpu",
            seed=case.seed,
        ),
    )
    numerics = replace(config.numerics, precision=case.precision, initial_loss_scale=case.initial_loss_scale)
    return case.layout.apply(replace(config, numerics=numerics)).resolve()


def losses_of(prefix: Path, case: Case, steps: int) -> list[float]:
    """Loss of every step. In every rank."""
    return train(build_in_this_world(configure(prefix, case, steps), timeout_s=300))


def tenths(losses: list[float]) -> list[float]:
    size = max(1, len(losses) // TENTHS)
    return [mean(losses[first : first + size]) for first in range(0, size * TENTHS, size)]


def judge(curves: dict[str, list[float]]) -> dict[str, float | bool]:
    """curves: {name of a case: mean losses of its tenths}."""
    fp32, other, bf16, bf16_3d, fp16, forced = (curves[name] for name in CASES)
    band = max(abs(one - two) for one, two in zip(fp32, other, strict=True))
    apart = max(abs(one - two) for one, two in zip(bf16, bf16_3d, strict=True))
    figures = {
        "band_of_two_seeds": band,
        "bf16_3d_from_bf16": apart,
        "bf16_over_fp32": bf16[-1] / fp32[-1],
        "forced_fp16_over_fp16": forced[-1] / fp16[-1],
    }
    holds = apart <= band and abs(figures["bf16_over_fp32"] - 1) <= CLOSE and abs(figures["forced_fp16_over_fp16"] - 1) <= CLOSE
    return {**{name: round(value, 5) for name, value in figures.items()}, "holds": holds}


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=200, help="of each run (default 200); with few, a forced overflow costs too many")
    steps = parser.parse_args().steps
    curves = {}
    with tempfile.TemporaryDirectory() as folder, RankPool(8) as pool:
        prefix = prepare(Path(folder))
        for name, case in CASES.items():
            curves[name] = tenths(pool.run(losses_of, case.layout.world_size, prefix, case, steps, timeout=1800)[0])
            print(f"{name:34}" + "".join(f"{loss:8.4f}" for loss in curves[name]), flush=True)
    verdict = judge(curves)
    print(json.dumps({"steps": steps, **verdict}))
    return 0 if verdict["holds"] else 1


if __name__ == "__main__":
    sys.exit(main())
