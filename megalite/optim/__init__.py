"""From gradients to new weights: finishing sums, norm, clipping, optimizers, learning rate."""

from megalite.optim.grads import clip_grads_, finalize_grads, global_names, grad_norm, grad_squares, norm_of
from megalite.optim.loss_scale import LossScale
from megalite.optim.lr import lr_at
from megalite.optim.noise_scale import NoiseScale
from megalite.optim.optimizer import Optimizer
from megalite.optim.parameters import OptimParameter, collect_parameters, local_twins, without_local_copies
from megalite.optim.replicas import check_replicas

__all__ = [
    "LossScale",
    "NoiseScale",
    "OptimParameter",
    "Optimizer",
    "check_replicas",
    "clip_grads_",
    "collect_parameters",
    "finalize_grads",
    "global_names",
    "grad_norm",
    "grad_squares",
    "local_twins",
    "lr_at",
    "norm_of",
    "without_local_copies",
]
