"""What a run says about itself: one log line per interval from one rank, every step in a JSONL file, TensorBoard if asked.

Decisions
- Losses and norms stay on the device; they are read once per interval, for all of its steps together.
- A loss that is not finite is null in the JSONL file: the field is never left out, and the line stays JSON.
- Throughput leaves evaluation and saving out: `pause` stops its clock.
- FLOPs are model FLOPs (`ModelConfig.flops_per_token`, which states its convention); MFU divides by the dense BF16 peak of known GPUs
  and is left out elsewhere.
"""

from __future__ import annotations

import json
import math
import resource
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import torch
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn
from torch import Tensor

from megalite.grid import Grid
from megalite.log import get_logger
from megalite.training.outputs import drop_torn_line

__all__ = ["Metrics", "StepRecord", "memory_gib", "peak_flops"]

# Dense BF16 FLOP/s by a part of the device name; the first match counts.
_PEAK_FLOPS = (
    ("H100 PCIe", 756e12),
    ("H100 NVL", 835e12),
    ("H100", 989.4e12),
    ("H200", 989.4e12),
    ("GH200", 989.4e12),
    ("B200", 2250e12),
    ("A100", 312e12),
    ("L40S", 362e12),
    ("4090", 165.2e12),
    ("V100", 125e12),
)


def peak_flops(device: torch.device) -> float | None:
    """Dense BF16 FLOP/s of a known GPU, else None."""
    if device.type != "cuda":
        return None
    name = torch.cuda.get_device_name(device)
    return next((flops for part, flops in _PEAK_FLOPS if part in name), None)


def memory_gib(device: torch.device) -> float:
    """Peak memory of this rank: what the allocator held on a GPU, the resident set on a CPU."""
    if device.type == "cuda":
        return torch.cuda.max_memory_allocated(device) / 2**30
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 2**20


@dataclass(frozen=True, kw_only=True)
class StepRecord:
    """One step as the loop knows it. num_samples: of this step; consumed_samples: with it.

    loss: per loss-bearing token of the global batch. loss_scale: of fp16. noise_scale: in samples, where it is estimated. Tensors are
    fp32 scalars on the device, the same on all ranks.
    """

    step: int
    consumed_samples: int
    num_samples: int
    loss: Tensor
    grad_norm: Tensor
    lr: float
    loss_scale: Tensor | None = None
    noise_scale: Tensor | None = None


class Metrics:
    """Collects steps, reports intervals; rank 0 writes."""

    def __init__(
        self,
        grid: Grid,
        *,
        train_iters: int,
        seq_length: int,
        flops_per_token: float,
        metrics_file: Path | None,
        tensorboard_dir: str | None,
    ) -> None:
        self._grid, self._train_iters, self._seq_length = grid, train_iters, seq_length
        self._flops_per_token, self._peak = flops_per_token, peak_flops(grid.device)
        self._records: list[StepRecord] = []
        self._logger = get_logger()
        self._is_writer = grid.rank == 0
        self._file = self._board = None
        if self._is_writer and metrics_file is not None:
            metrics_file.parent.mkdir(parents=True, exist_ok=True)
            drop_torn_line(metrics_file)
            self._file = metrics_file.open("a")
        if self._is_writer and tensorboard_dir is not None:
            from torch.utils.tensorboard import SummaryWriter  # 1 s of import that only this option pays

            self._board = SummaryWriter(tensorboard_dir)
        self._bar = _Bar(train_iters) if self._is_writer and sys.stderr.isatty() else None
        self._clock = time.perf_counter()

    def add(self, record: StepRecord) -> None:
        self._records.append(record)
        if self._bar is not None:
            self._bar.move(record.step)

    @contextmanager
    def pause(self) -> Iterator[None]:
        """Keep what happens inside out of the throughput."""
        begin = time.perf_counter()
        yield
        self._clock += time.perf_counter() - begin

    def report(self) -> list[float]:
        """Read, write and log the steps since the last report; returns their losses (the same on every rank)."""
        if not self._records:
            return []
        losses, norms = torch.stack([torch.stack([record.loss, record.grad_norm]) for record in self._records]).T.tolist()
        now = time.perf_counter()
        seconds, self._clock = (now - self._clock) / len(self._records), now
        rate = self._throughput(sum(record.num_samples for record in self._records) / len(self._records) / seconds)
        if self._is_writer:
            for record, loss, norm in zip(self._records, losses, norms, strict=True):
                self._write(record, loss, norm, rate)
            finite = [loss for loss in losses if math.isfinite(loss)]
            self._say(self._records[-1], sum(finite) / len(finite) if finite else math.nan, norms[-1], seconds, rate)
        self._records = []
        return losses

    def report_own_seconds(self, step: int, seconds: list[float]) -> None:
        """Write how long each rank has worked, without waiting, since the line before of this kind (`stragglers`)."""
        if seconds:
            self._record({"step": step, "own_seconds": [round(own, 4) for own in seconds]})

    def report_evaluation(self, step: int, loss: float, split: Literal["valid", "test"] = "valid") -> None:
        """Log a validation or test loss (per token, over all ranks)."""
        if self._is_writer:
            self._line(f"step {step} | {'validation' if split == 'valid' else split} loss {loss:.4f}")
            self._record({"step": step, f"{split}_loss": loss})
            if self._board is not None:
                self._board.add_scalar(f"loss/{split}", loss, step)

    def close(self) -> None:
        for end in (self._file, self._board, self._bar):
            if end is not None:
                end.close()

    def _throughput(self, samples_per_s: float) -> dict[str, float]:
        tokens_per_s = samples_per_s * self._seq_length
        flops = tokens_per_s * self._flops_per_token / self._grid.world_size
        values = {"tokens_per_s": tokens_per_s, "tflops_per_rank": flops / 1e12}
        return values if self._peak is None else {**values, "mfu": flops / self._peak}

    def _write(self, record: StepRecord, loss: float, norm: float, rate: dict[str, float]) -> None:
        values = {"loss": loss, "lr": record.lr, "grad_norm": norm, **rate}
        if record.loss_scale is not None:
            values["loss_scale"] = record.loss_scale.item()
        if record.noise_scale is not None:
            values["noise_scale"] = record.noise_scale.item()
        plain = {name: value if math.isfinite(value) else None for name, value in values.items()}
        self._record({"step": record.step, "consumed_samples": record.consumed_samples, **plain})
        if self._board is not None:
            for name, value in values.items():
                self._board.add_scalar(f"train/{name}", value, record.step)

    def _record(self, values: dict[str, Any]) -> None:
        if self._file is not None:
            self._file.write(json.dumps(values) + "\n")
            self._file.flush()

    def _say(self, last: StepRecord, loss: float, norm: float, seconds: float, rate: dict[str, float]) -> None:
        mfu = f" | MFU {rate['mfu']:.1%}" if "mfu" in rate else ""
        self._line(
            f"step {last.step}/{self._train_iters} | {last.consumed_samples:,} samples | loss {loss:.4f} | lr {last.lr:.3e} | "
            f"grad norm {norm:.3f} | "
            f"{seconds * 1e3:.0f} ms/step | {rate['tokens_per_s']:,.0f} tokens/s | {rate['tflops_per_rank']:.3g} TFLOP/s/rank{mfu} | "
            f"memory {memory_gib(self._grid.device):.2f} GiB"
        )

    def _line(self, text: str) -> None:
        if self._bar is not None:
            self._bar.print(text)
        else:
            self._logger.info(text)


class _Bar:
    """A progress bar on a terminal; log lines scroll above it."""

    def __init__(self, total: int) -> None:
        self._console = Console(stderr=True)
        columns = (TextColumn("training"), BarColumn(), MofNCompleteColumn(), TextColumn("steps, left"), TimeRemainingColumn())
        self._progress = Progress(*columns, console=self._console, transient=True)
        self._task = self._progress.add_task("training", total=total)
        self._progress.start()

    def move(self, step: int) -> None:
        self._progress.update(self._task, completed=step)

    def print(self, text: str) -> None:
        self._console.print(text, highlight=False, soft_wrap=True)

    def close(self) -> None:
        self._progress.stop()
