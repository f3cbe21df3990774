"""The optimizer's and the learning rate's settings.

Decision
- Times of the learning-rate schedule are given in steps or in samples, one of the two for each; the schedule itself
  (`megalite.optim.lr`) counts full steps.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

__all__ = ["OptimConfig"]


@dataclass(frozen=True, kw_only=True)
class OptimConfig:
    """The optimizer and its learning rate, which is a function of the step alone."""

    optimizer: Literal["adam", "sgd", "muon"] = "adam"
    """AdamW, SGD with momentum, or Muon for the matrices of the blocks with AdamW for all else."""
    lr: float = 3e-4
    """Highest learning rate."""
    min_lr: float = 0.0
    """Learning rate after the decay."""
    lr_decay_style: Literal["constant", "linear", "cosine", "inverse-square-root", "WSD"] = "cosine"
    """Shape of the decay; WSD is constant until the last --lr-wsd-decay-iters steps."""
    lr_warmup_iters: int = 0
    """Steps in which the learning rate rises from 0."""
    lr_warmup_samples: int | None = None
    """The same in samples."""
    lr_warmup_fraction: float | None = None
    """The same as a share of the decay steps; give one of the three."""
    lr_decay_iters: int | None = None
    """Step at which the decay ends, warm-up included; not set: --train-iters."""
    lr_decay_samples: int | None = None
    """The same in samples."""
    lr_wsd_decay_iters: int | None = None
    """Steps of the final decay of WSD."""
    lr_wsd_decay_samples: int | None = None
    """The same in samples."""
    lr_wsd_decay_style: Literal["linear", "cosine", "minus_sqrt", "exponential"] = "linear"
    """Shape of the final decay of WSD."""
    lr_multipliers: tuple[str, ...] = ()
    """REGEX=FACTOR: parameters whose name the regular expression is found in learn at FACTOR times the rate; the last match counts."""
    weight_decay: float = 0.1
    """Weight decay, decoupled (with SGD added to the gradient); biases and normalizations have none."""
    weight_decay_multipliers: tuple[str, ...] = ()
    """REGEX=FACTOR: the same for the weight decay; 0 exempts, and a norm or bias that is matched decays."""
    adam_beta1: float = 0.9
    """Decay of the first moment."""
    adam_beta2: float = 0.95
    """Decay of the second moment."""
    adam_eps: float = 1e-8
    """Added to the root of the second moment."""
    sgd_momentum: float = 0.9
    """Momentum of SGD."""
    muon_momentum: float = 0.95
    """Momentum of Muon."""
    muon_num_ns_steps: int = 5
    """Newton-Schulz iterations that make Muon's update orthogonal."""
    muon_use_nesterov: bool = True
    """Muon looks ahead along its momentum."""
    muon_scale_mode: Literal["match_adam", "spectral"] = "match_adam"
    """Size of Muon's update: match_adam makes its root mean square that of AdamW, so both share --lr; spectral keeps its spectral norm."""
    muon_dtype: Literal["fp32", "bf16"] = "fp32"
    """Number format of Muon's Newton-Schulz iterations; bf16 is several times faster on a GPU, but layouts then agree only to about 1 % of
    an update."""
    exp_avg_dtype: Literal["fp32", "bf16"] = "fp32"
    """Number format in which the first moment (or momentum) is kept."""
    exp_avg_sq_dtype: Literal["fp32", "bf16"] = "fp32"
    """Number format in which AdamW's second moment is kept."""
    optimizer_cpu_offload: bool = False
    """Keep optimizer state in host memory; it passes through the device in pieces in every update; it has no effect on a CPU."""
    clip_grad: float = 1.0
    """Largest global gradient norm; 0: no clipping."""
