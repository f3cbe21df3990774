"""Training speed on one GPU: megalite's own run on models of three sizes, against the matrix products that the card can do.

    python tools/bench_gpu.py --output docs/gpu                        all cases that fit into 10 minutes, the important ones first
    python tools/bench_gpu.py --only 1.3b-4096 8b-slice-8192
    python tools/bench_gpu.py --only 1.3b-4096 --recompute-granularity full    other flags are those of pretrain_gpt.py
    python tools/bench_gpu.py --device cpu --tiny                      models of no size, to see that everything runs

bf16 compute, fp32 master weights, fused AdamW, synthetic tokens, one rank. Per case: tokens/s, MFU, peak memory beside the planner's
prediction, which attention kernel ran, and the share of kernel time by kind (torch.profiler, one step that is not timed). The model FLOPs
of a token are 6 N + 12 L H S (N: weights of matrix products, the head among them; L layers, H = heads x head size, S tokens of a
sequence); the causal figure counts half of the attention, 6 L H S. Recomputed work does not count. The measured ceiling is the median
rate of a bf16 matrix product of 8192 x 8192 x 8192.

--output DIR receives bench_gpu.json and bench_gpu.md, rewritten after every case. The last line is JSON. A case that fails is shown with
its error and the others go on; the exit code is then 1. So it is where memory runs out although the planner says that it is enough.
"""

from __future__ import annotations

import argparse
import gc
import json
import statistics
import sys
import time
import traceback
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from megalite.cli import parse_run_config
from megalite.config import RunConfig
from megalite.errors import NumericsError
from megalite.grid import Grid, GridShape
from megalite.training.launch import Launch, choose_device, init_distributed
from megalite.training.loop import train_step
from megalite.training.plan import plan_memory
from megalite.training.setup import Run, build_programs, build_run_on
from megalite.validate import validate
from tools.gpu_facts import ATTENTION_OPS, kernel_shares, matmul_tflops, peak_tflops, synchronize

GIB = 2**30
WARM_UP = 3

_SHEARED_1B = (
    *("--num-layers", "24", "--hidden-size", "2048", "--num-attention-heads", "16", "--ffn-hidden-size", "5504"),
    *("--vocab-size", "32000", "--untie-embeddings-and-output-weights"),
)
_GPT2 = ("--preset", "gpt2-124m", "--hidden-dropout", "0", "--attention-dropout", "0")
_SLICE = ("--preset", "llama3-8b", "--num-layers", "8")
_TINY = ("--num-layers", "2", "--hidden-size", "32", "--num-attention-heads", "4", "--num-query-groups", "2", "--ffn-hidden-size", "48",
         "--vocab-size", "131", "--seq-length", "16", "--mbs", "1", "--gbs", "2")  # fmt: skip


@dataclass(frozen=True, kw_only=True)
class Case:
    """flags: of the model; seq: tokens of a sequence; mbs: sequences of a micro-batch, of which a step has four."""

    flags: tuple[str, ...]
    seq: int
    mbs: int

    def config(self, extra: Sequence[str], device: str, *, tiny: bool) -> RunConfig:
        """Raises ConfigError for flags that do not go together."""
        length = ("--seq-length", str(self.seq), "--max-position-embeddings", str(self.seq))
        batch = ("--mbs", str(self.mbs), "--gbs", str(4 * self.mbs))
        run = ("--mock-data", "--device", device, "--precision", "bf16", "--train-iters", "100000", "--lr-decay-style", "constant")
        flags = [*self.flags, *length, *batch, *run, *(_TINY if tiny else ()), *extra]
        return parse_run_config(flags, "bench_gpu.py", __doc__ or "").resolve()


CASES = {
    "1.3b-4096": Case(flags=_SHEARED_1B, seq=4096, mbs=4),
    "8b-slice-4096": Case(flags=_SLICE, seq=4096, mbs=4),
    "gpt2-124m-1024": Case(flags=_GPT2, seq=1024, mbs=32),
    "8b-slice-8192": Case(flags=_SLICE, seq=8192, mbs=2),
    "8b-slice-2048": Case(flags=_SLICE, seq=2048, mbs=8),
    "gpt2-124m-2048": Case(flags=_GPT2, seq=2048, mbs=16),
    "1.3b-2048": Case(flags=_SHEARED_1B, seq=2048, mbs=8),
    "1.3b-8192": Case(flags=_SHEARED_1B, seq=8192, mbs=2),
}
"""By importance: what the time does not suffice for is left out from the end."""


@dataclass(frozen=True, kw_only=True)
class Limits:
    """What one case may take: timed steps, and seconds after which no further one begins (three are made in any case)."""

    steps: int
    seconds: float


def timed_steps(run: Run, limits: Limits) -> list[float]:
    """Seconds of every timed step. The device is waited for after each: a step is far longer than what that costs."""
    device, begin, seconds = run.grid.device, time.perf_counter(), []
    for number in range(WARM_UP + limits.steps):
        if number == WARM_UP and device.type == "cuda":
            torch.cuda.reset_peak_memory_stats(device)
        started = time.perf_counter()
        train_step(run)
        synchronize(device)
        seconds.append(time.perf_counter() - started)
        if number >= WARM_UP + 2 and time.perf_counter() - begin > limits.seconds:
            break
    return seconds[WARM_UP:]


def profile_step(run: Run) -> tuple[dict[str, float], list[str]]:
    """{kind of kernel: share of kernel time} of one step, and the attention kernels that torch chose."""
    from torch.profiler import ProfilerActivity, profile

    on_gpu = run.grid.device.type == "cuda"
    activities = [ProfilerActivity.CPU, *([ProfilerActivity.CUDA] if on_gpu else [])]
    with profile(activities=activities) as profiler:
        train_step(run)
        synchronize(run.grid.device)
    events = profiler.key_averages()
    if on_gpu:
        kernels = [event for event in events if event.device_type == torch.autograd.DeviceType.CUDA and not event.is_user_annotation]
        times = {event.key: event.self_device_time_total for event in kernels}
    else:
        times = {event.key: event.self_cpu_time_total for event in events}
    chosen = {name for op, name in ATTENTION_OPS.items() if any(event.key == op for event in events)}
    return kernel_shares(times), sorted(chosen)


def measure(config: RunConfig, grid: Grid, limits: Limits, ceiling: float, peak: float | None) -> dict[str, Any]:
    """One case. Raises what the run raises, torch.OutOfMemoryError among it."""
    validate(config, 1)
    programs = build_programs(config, 1)
    run = build_run_on(config, grid, *programs)
    try:
        seconds = timed_steps(run, limits)
        memory = torch.cuda.max_memory_allocated(grid.device) if grid.device.type == "cuda" else None
        shares, attention = profile_step(run)
        loss = train_step(run).loss.item()
    finally:
        run.train_loader.close()
        run.metrics.close()
    if loss != loss or abs(loss) == float("inf"):
        raise NumericsError(f"the loss is {loss} after {run.state.step} steps: the speed of such a run says nothing")
    model, length = config.model, config.data.seq_length
    tokens = config.global_batch(1) * length
    flops, step = model.flops_per_token(length), statistics.median(seconds)
    causal = flops - 6 * model.num_layers * model.num_attention_heads * model.head_dim * length
    tflops, causal_tflops = (tokens * value / step / 1e12 for value in (flops, causal))
    return {
        "parameters": model.num_parameters(),
        "seq": length,
        "mbs": config.train.micro_batch_size,
        "gbs": config.global_batch(1),
        "steps": len(seconds),
        "step_ms": round(1e3 * step, 3),
        "step_ms_range": [round(1e3 * min(seconds), 3), round(1e3 * max(seconds), 3)],
        "tokens_per_s": round(tokens / step, 1),
        "tflops": round(tflops, 4),
        "mfu": None if peak is None else round(tflops / peak, 4),
        "mfu_causal": None if peak is None else round(causal_tflops / peak, 4),
        "of_ceiling": round(tflops / ceiling, 4),
        "memory_gib": None if memory is None else round(memory / GIB, 3),
        "attention": attention,
        "kernel_shares": shares,
        "loss": round(loss, 4),
    }


def run_case(name: str, make: Callable[[], RunConfig], grid: Grid, limits: Limits, ceiling: float, peak: float | None) -> dict[str, Any]:
    """The case's figures, or how it failed: status ok, out of memory or failed. failed: whether that is a failure of ours."""
    row: dict[str, Any] = {"case": name, "status": "ok", "failed": False}
    try:
        config = make()
        program = build_programs(config, 1)[0][config.num_microbatches(1)]
        predicted = plan_memory(config, program, 1, 0, grid.device.type).total
        row["predicted_gib"] = round(predicted / GIB, 3)
        row |= measure(config, grid, limits, ceiling, peak)
    except torch.OutOfMemoryError as error:
        total = torch.cuda.get_device_properties(grid.device).total_memory if grid.device.type == "cuda" else 0
        row |= {"status": "out of memory", "error": str(error).splitlines()[0], "failed": row["predicted_gib"] * GIB < 0.9 * total}
    except Exception as error:  # shown, counted, and the next case may still say something
        traceback.print_exc()
        row |= {"status": "failed", "error": f"{type(error).__name__}: {error}", "failed": True}
    gc.collect()
    if grid.device.type == "cuda":
        torch.cuda.empty_cache()
    return row


def markdown(found: dict[str, Any]) -> str:
    """Heading with card, versions and date, then a table."""
    lines = [
        f"One rank on {found['card']}, torch {found['torch']}, CUDA {found['cuda']}, {found['date']}. Measured ceiling (bf16, "
        f"{found['matmul_size']}^3): {found['ceiling_tflops']:,.1f} TFLOP/s; data sheet: {found['peak_tflops'] or 'not known'}. "
        "FLOPs of a token: 6 N + 12 L H S; causal: 6 N + 6 L H S.",
        "",
        "| case | batch | tokens/s | MFU | MFU, causal | of ceiling | peak GiB (predicted) | attention | kernel time |",
        "|---|---|---|---|---|---|---|---|---|",
    ]
    for row in found["cases"]:
        if row["status"] != "ok":
            lines.append(f"| {row['case']} | {row['status']}: {row.get('error', '')} | | | | | ({row.get('predicted_gib', '')}) | | |")
            continue
        shares = ", ".join(f"{kind} {share:.0%}" for kind, share in row["kernel_shares"].items() if share >= 0.005)
        mfu, causal = ("-" if row[key] is None else f"{row[key]:.1%}" for key in ("mfu", "mfu_causal"))
        memory = "-" if row["memory_gib"] is None else f"{row['memory_gib']:.2f}"
        lines.append(
            f"| {row['case']} | {row['mbs']} x {row['gbs'] // row['mbs']} | {row['tokens_per_s']:,.0f} | {mfu} | {causal} | "
            f"{row['of_ceiling']:.1%} | {memory} ({row['predicted_gib']:.2f}) | {', '.join(row['attention'])} | {shares} |"
        )
    return "\n".join(lines) + "\n"


def parse_arguments(arguments: Sequence[str] | None) -> tuple[argparse.Namespace, list[str]]:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter, allow_abbrev=False)
    parser.add_argument("--only", nargs="+", metavar="CASE", choices=list(CASES), help=f"of {', '.join(CASES)}")
    parser.add_argument("--budget-minutes", type=float, default=10.0, help="for everything; later cases are left out (default 10)")
    parser.add_argument("--steps", type=int, default=20, help="timed steps of a case at most (default 20)")
    parser.add_argument("--device", choices=("cuda", "cpu"), default="cuda")
    parser.add_argument("--tiny", action="store_true", help="models of no size; the figures say nothing")
    parser.add_argument("--peak-tflops", type=float, help="dense bf16, for cards that are not known here")
    parser.add_argument("--output", type=Path, help="folder for bench_gpu.json and bench_gpu.md")
    return parser.parse_known_args(arguments)


def heading(options: argparse.Namespace, device: torch.device) -> dict[str, Any]:
    card = torch.cuda.get_device_name(device) if device.type == "cuda" else "the CPU"
    size = 256 if options.tiny else 8192
    return {
        "date": datetime.now(UTC).strftime("%Y-%m-%d"),
        "card": card,
        "torch": torch.__version__,
        "cuda": torch.version.cuda,
        "peak_tflops": options.peak_tflops or peak_tflops(card),
        "matmul_size": size,
        "ceiling_tflops": round(matmul_tflops(device, size), 4),
        "tiny": options.tiny,
        "cases": [],
    }


def write(found: dict[str, Any], folder: Path | None) -> None:
    if folder is not None:
        folder.mkdir(parents=True, exist_ok=True)
        (folder / "bench_gpu.json").write_text(json.dumps(found, indent=1) + "\n", encoding="utf-8")
        (folder / "bench_gpu.md").write_text(markdown(found), encoding="utf-8")


def main(arguments: Sequence[str] | None = None) -> int:
    begin = time.perf_counter()
    options, flags = parse_arguments(arguments)
    device = choose_device(options.device, 0)
    owns_group = not dist.is_initialized()
    if owns_group:
        init_distributed(Launch(0, 1, 0, dist.HashStore()), device, timedelta(minutes=10))
    try:
        grid = Grid.build(GridShape(), device)
        found = heading(options, device)
        names = options.only or list(CASES)
        for place, name in enumerate(names):
            left = 60 * options.budget_minutes - (time.perf_counter() - begin)
            if left < (0 if options.tiny else 20):
                row: dict[str, Any] = {"case": name, "status": "not run", "error": "no time was left", "failed": False}
            else:
                share = 0.6 * left / (len(names) - place)  # the rest is for building, prediction and the profiler
                make = lambda name=name: CASES[name].config(flags, options.device, tiny=options.tiny)  # noqa: E731
                row = run_case(name, make, grid, Limits(steps=options.steps, seconds=share), found["ceiling_tflops"], found["peak_tflops"])
            found["cases"].append(row)
            print(f"{name}: {row['status']} after {time.perf_counter() - begin:.0f} s {row.get('error', '')}", flush=True)
            write(found, options.output)
    finally:
        if owns_group:
            dist.destroy_process_group()
    print(markdown(found))
    holds = not any(row["failed"] for row in found["cases"]) and any(row["status"] == "ok" for row in found["cases"])
    print(json.dumps({"holds": holds, **found}))
    return 0 if holds else 1


if __name__ == "__main__":
    sys.exit(main())
