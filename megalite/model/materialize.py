"""Memory and initial values for modules that were built without any (`device="meta"`).

Decisions:
- Works on any part of a stage, so that data parallelism can materialise, shard and release one unit after another and
  no rank ever holds the whole stage.
- Only parameters that have no memory yet are touched: after its units, the rest of a stage is materialised by the
  same call on the stage.
- Initial values depend on seed, full name and position in the global tensor only (see tensor_parallel/init).
"""

from __future__ import annotations

import torch
from torch import nn

from megalite.tensor_parallel.init import init_parameter_
from megalite.tensor_parallel.parameter import logical_name, named_parameter_info

__all__ = ["materialize"]


def materialize(module: nn.Module, prefix: str, device: torch.device | str, seed: int) -> None:
    """Give every parameter of `module` that is on the meta device memory on `device` and its initial value.

    prefix: the module's dotted name in its stage with a "." at the end, or "" for the stage itself.
    """
    waiting = {name for name, parameter in module.named_parameters() if parameter.is_meta}
    for part in module.modules():
        own = [*part.parameters(recurse=False), *part.buffers(recurse=False)]
        if any(tensor.is_meta for tensor in own):
            assert all(tensor.is_meta for tensor in own), "a module gets its memory as a whole"
            part.to_empty(device=device, recurse=False)
    infos = named_parameter_info(module)
    for name, parameter in module.named_parameters():
        if name in waiting:
            init_parameter_(logical_name(prefix + name, infos[name]), parameter, infos[name], seed)
