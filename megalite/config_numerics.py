"""Settings of precision, of what happens when numbers go wrong, and of what is kept in memory.

Decision
- Nothing here changes what is computed in exact arithmetic, but for the two terms of the loss (`label_smoothing`, `z_loss`).
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

__all__ = ["RECOMPUTE_MODULES", "MemoryConfig", "NumericsConfig"]

RECOMPUTE_MODULES = ("core_attn", "norm", "attention", "mlp_act", "mlp")


@dataclass(frozen=True, kw_only=True)
class NumericsConfig:
    """Number formats, the loss, and policies for numbers that went wrong."""

    precision: Literal["fp32", "bf16", "fp16"] = "fp32"
    """Number format of matmuls; weights and optimizer state are fp32 in all."""
    grad_reduce_in_bf16: bool = False
    """Sum gradients over data-parallel ranks in bf16 instead of fp32: half the traffic, fewer bits; with --zero 0 and 1 a rank's
    micro-batches are added up in bf16 too."""
    fp8: Literal["tensorwise", "rowwise"] | None = None
    """Matmuls of the blocks in fp8 with scales per tensor or per row, by torchao, on a GPU that has fp8; not set: none."""
    loss_scale: float | None = None
    """Fixed scale of the fp16 loss; not set: dynamic."""
    initial_loss_scale: float = 65536.0
    """First dynamic scale of the fp16 loss."""
    min_loss_scale: float = 1.0
    """A gradient that overflows at this scale ends the run."""
    loss_scale_window: int = 1000
    """Steps without overflow after which the dynamic scale doubles."""
    hysteresis: int = 2
    """Overflows, not cancelled by a doubling, before the dynamic scale halves."""
    on_nonfinite: Literal["stop", "skip"] = "stop"
    """What follows a loss or gradient norm that is not finite: the end of the run, or the next step without an update."""
    spike_factor: float | None = None
    """A loss or gradient norm above this many times its running median is a spike, of which an autopsy is written; not set: none."""
    spike_window: int = 64
    """Steps of the running median."""
    skip_spikes: bool = False
    """Make no update in a step that is a spike."""
    max_skipped_steps: int = 20
    """Steps without an update in a row that end the run."""
    rewind_steps: int | None = None
    """After a spike or a number that is not finite, go back to a copy of the state, which is made every so many steps in
    host memory, and go on with the data behind the bad step; not set: no copies."""
    label_smoothing: float = 0.0
    """Share of the target's probability that is spread evenly over the vocabulary, in training; the loss shown stays plain."""
    z_loss: float = 0.0
    """Factor of the squared logarithm of the softmax's denominator, added to the loss in training; the loss shown stays plain."""
    dpo_beta: float = 0.1
    """How much a preferred answer's gain over the reference model counts with --dpo-data-path; small values move further from it."""
    check_replicas_interval: int | None = None
    """Steps between checks that ranks which should hold equal weights do, bit for bit; not set: no checks."""
    log_gradient_noise_scale: bool = False
    """Estimate the gradient noise scale (about the critical batch size, in samples) and log it; every step becomes two pipeline passes,
    of half its micro-batches each, with a second copy of the gradients."""


@dataclass(frozen=True, kw_only=True)
class MemoryConfig:
    """What is kept, computed again or moved to the host, to fit."""

    recompute_granularity: Literal["none", "selective", "full"] = "none"
    """What is computed again in the backward pass instead of kept: nothing, --recompute-modules, or whole blocks."""
    recompute_modules: tuple[str, ...] | None = None
    """Parts of a block that selective recomputation drops: core_attn, norm, attention, mlp_act, mlp; not set: core_attn."""
    recompute_num_layers: int | None = None
    """Blocks of each stage that are recomputed, the first ones; not set: all."""
    cpu_offloading: bool = False
    """Keep what the backward pass needs of each block in host memory; it has no effect on a CPU."""
    loss_chunk_tokens: int | None = None
    """Most tokens whose logits exist at one time: head and loss go over the micro-batch in pieces; not set: pieces of 16 MiB
    of logits on a CPU, 256 MiB elsewhere."""
    memory_report: bool = False
    """Print the predicted memory of each rank at the start, and the measured one beside it at the end."""
