"""Tells data parallelism, before each backward pass, what that pass has to reduce, free and wait for.

Decisions
- The pipeline says which backward of a stage is its last of the step; everything else follows from the strategy (table
  in `shard`).
- Up to the last backward, strategies 0 and 1 only add gradients up, 2 and 3 reduce them; only 3 frees the weights. The
  last backward always frees them: the optimizer changes the slices, and nobody would gather them again.
- Several forwards may be in flight: their saved activations refer to gathered weights by storage, which a later gather
  fills again with the same values.
- Over dp_replicate, slices of strategies 2 and 3 are added up locally (fp32) and all-reduced by the last backward only.
- Each stage of a rank is its own root, so stages may stand at different points of the step.
- A split backward (I, then W) counts as one: I reduces nothing, and after W the reductions that a whole backward would
  have started from its hooks are started here. FSDP2 has no public call for that; torch.distributed.pipelining uses the
  same private one.
"""

from __future__ import annotations

from collections.abc import Mapping

from torch import nn
from torch.distributed.fsdp import FSDPModule

from megalite.data_parallel.shard import drop_gathered, sharded_modules

__all__ = ["GradientSync"]


class GradientSync:
    """The pipeline's hook; does nothing for stages that are not wrapped.

    stages: {global stage number: stage} of this rank. zero: what `shard_stage` was given.
    """

    def __init__(self, stages: Mapping[int, nn.Module], zero: int) -> None:
        self._zero = zero
        self._modules = {number: sharded_modules(stage) for number, stage in stages.items()}
        self._roots = {number: stage for number, stage in stages.items() if isinstance(stage, FSDPModule)}
        self._set_to: dict[int, tuple[bool, bool]] = {}

    def before_backward(self, stage: int, is_last: bool) -> None:
        """Must be called before each backward of `stage`; `is_last` marks the last one of the step."""
        self._set(stage, is_last, reduces=is_last or self._zero >= 2)

    def before_input_grad(self, stage: int) -> None:
        """Must be called before each input-gradient pass (I) of `stage`."""
        self._set(stage, is_last=False, reduces=False)

    def after_weight_grad(self, stage: int, is_last: bool) -> None:
        """Must be called when the weight gradients (W) of a micro-batch are complete; `is_last` as above."""
        if stage not in self._roots:
            return
        self._set(stage, is_last, reduces=is_last or self._zero >= 2)
        self._roots[stage]._get_fsdp_state()._root_post_backward_final_callback()

    def without_backward(self, stage: int) -> None:
        """Must be called where `stage` has nothing to differentiate: no backward will free what its forwards have gathered."""
        if stage in self._roots:
            drop_gathered(self._roots[stage])

    def _set(self, stage: int, is_last: bool, reduces: bool) -> None:
        if stage not in self._roots or self._set_to.get(stage) == (is_last, reduces):
            return
        self._set_to[stage] = (is_last, reduces)
        # FSDP2 forgets the forwards in flight and waits for all reductions in the last backward only.
        self._roots[stage].set_is_last_backward(is_last)
        for module in self._modules[stage]:
            module.set_requires_gradient_sync(reduces, recurse=False)
            module.set_requires_all_reduce(is_last, recurse=False)
            module.set_reshard_after_backward(is_last or self._zero == 3, recurse=False)
