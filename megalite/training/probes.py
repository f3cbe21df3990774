"""Writes what a step computes, by logical name and sample, so that two runs of different layouts can be compared (`tools/compare_runs.py`).

    DIR/step-0000001/rank-0003.safetensors     keys: KIND/NAME/SAMPLE/PART

| kind      | name                                                              | what                                             |
|-----------|-------------------------------------------------------------------|--------------------------------------------------|
| forward   | embedding, layers.3.attention, layers.3.mlp, layers.3, loss       | outputs [S, H] of each sample; loss: of the micro-batch |
| backward  | the same without loss                                             | gradients of these outputs                       |
| gradient  | parameters                                                        | complete, before clipping, without the loss scale |
| parameter | parameters                                                        | after the update                                 |

Decisions
- SAMPLE is the number of the sample in the order of the whole run, so micro-batches and data parallelism may cut a batch in any way. It is
  "all" for parameters. PART is "1of2" where a tp rank holds its share of the sequence, "0of1" where it holds all.
- Hooks exist in the probed steps only: other steps run no line of this file.
- Activations are written as each rank has them and put together by the reader, so probing does not change what is communicated. Gradients
  and parameters are gathered when all passes are over.
- A region that is computed again gives its first outputs.

Legend: S sequence, B micro-batch, H hidden.
"""

from __future__ import annotations

import shutil
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from safetensors.torch import save_file
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from megalite.errors import ConfigError
from megalite.grid import Grid
from megalite.model import GPTStage
from megalite.optim import OptimParameter

__all__ = ["Probes", "step_folder"]


def step_folder(folder: Path, step: int) -> Path:
    """Where the probes of a step are."""
    return folder / f"step-{step:07d}"


class Probes:
    """Records the steps `steps` of a run into `folder`.

    replaces: the run restarts itself, and steps that it makes again are written anew. Otherwise raises ConfigError where the folder holds
    such a step already.
    """

    def __init__(self, folder: Path, steps: Sequence[int], stages: Mapping[int, GPTStage], grid: Grid, *, replaces: bool = False) -> None:
        self._folder, self._steps, self._stages, self._grid = folder, frozenset(steps), stages, grid
        self._tensors: dict[str, Tensor] = {}
        existing = [path for step in sorted(self._steps) if (path := step_folder(folder, step)).exists()]
        if not existing or not grid.world.is_first:
            return
        if not replaces:
            raise ConfigError(f"probe_dir holds probes of an earlier run ({existing[0]}): give another folder, or delete it")
        for path in existing:  # no rank writes before its first step, which waits for this one
            shutil.rmtree(path)

    def is_due(self, step: int) -> bool:
        return step in self._steps

    @contextmanager
    def passes(self) -> Iterator[None]:
        """Record the forward and backward passes inside."""
        handles = [handle for stage in self._stages.values() for handle in self._watch(stage)]
        try:
            yield
        finally:
            for handle in handles:
                handle.remove()

    def gradients(self, parameters: Sequence[OptimParameter], scale: float | Tensor) -> None:
        """Record final gradients, which are `scale` times too large. Collective over tp and dp_shard."""
        self._whole("gradient", parameters, lambda parameter: parameter.parameter.grad, scale)
        divisor = float(scale)
        if divisor != 1:
            backward = {key: value for key, value in self._tensors.items() if key.startswith("backward/")}
            self._tensors |= {key: value.float() / divisor for key, value in backward.items()}

    def finish(self, step: int, parameters: Sequence[OptimParameter]) -> None:
        """Record the updated parameters, and write the step. Collective over tp and dp_shard."""
        self._whole("parameter", parameters, lambda parameter: parameter.parameter.detach(), 1.0)
        folder = step_folder(self._folder, step)
        folder.mkdir(parents=True, exist_ok=True)
        path = folder / f"rank-{self._grid.rank:04d}.safetensors"
        unfinished = path.with_suffix(".tmp")
        save_file(self._tensors, unfinished)
        unfinished.replace(path)
        self._tensors = {}

    def _watch(self, stage: GPTStage) -> Iterator[Any]:
        """Hooks on the parts of a stage; each knows the samples from its own arguments or from those of the stage."""
        first = _FirstSample()
        yield stage.register_forward_pre_hook(first.note)
        parts: list[tuple[str, nn.Module]] = [] if stage.embedding is None else [("embedding", stage.embedding)]
        for layer, block in stage.layers.items():
            parts += [(f"layers.{layer}.attention", block.get_submodule("attention"))]
            parts += [(f"layers.{layer}.mlp", block.get_submodule("mlp")), (f"layers.{layer}", block)]
        for name, module in parts:
            yield module.register_forward_hook(self._recorder(name, first))
        if stage.head is not None:
            yield stage.head.register_forward_hook(self._loss_recorder(first))

    def _recorder(self, name: str, first: _FirstSample) -> Callable[..., None]:
        def record(_module: nn.Module, args: tuple[Any, ...], out: Tensor) -> None:
            sample = first.of(args)
            if self._put("forward", name, sample, out) and out.requires_grad:
                out.register_hook(lambda grad: _nothing(self._put("backward", name, sample, grad)))

        return record

    def _loss_recorder(self, first: _FirstSample) -> Callable[..., None]:
        def record(_module: nn.Module, _args: tuple[Any, ...], out: Tensor) -> None:
            if self._grid.tp.is_first and out.dim() == 0:
                self._tensors.setdefault(f"forward/loss/{first.sample}/0of1", _on_host(out))

        return record

    def _put(self, kind: str, name: str, sample: int, values: Tensor) -> bool:
        """values: [S or S_local, B, H]. Returns whether this is the first time."""
        tp, stage = self._grid.tp, next(iter(self._stages.values()))
        is_cut = stage.ctx.sequence_parallel
        part = f"{tp.rank}of{tp.size}" if is_cut else "0of1"
        if f"{kind}/{name}/{sample}/{part}" in self._tensors:
            return False
        if is_cut or tp.is_first:
            for row in range(values.shape[1]):
                self._tensors[f"{kind}/{name}/{sample + row}/{part}"] = _on_host(values[:, row])
        return True

    def _whole(
        self, kind: str, parameters: Sequence[OptimParameter], get: Callable[[OptimParameter], Tensor | None], scale: float | Tensor
    ) -> None:
        grid = self._grid
        for parameter in parameters:
            value = get(parameter)
            if parameter.is_copy or value is None:
                continue
            whole = value.full_tensor() if isinstance(value, DTensor) else value
            if grid.tp.is_first and grid.dp_shard.is_first and grid.dp_replicate.is_first:
                self._tensors[f"{kind}/{parameter.name}/all/0of1"] = _on_host(whole[: parameter.info.valid_rows] / scale)


class _FirstSample:
    """The first sample of the micro-batch that a stage is computing. Parts that are computed again are told by their own arguments."""

    sample = 0

    def note(self, _stage: nn.Module, args: tuple[Any, ...]) -> None:
        self.sample = args[1].first_sample

    def of(self, args: tuple[Any, ...]) -> int:
        known = [argument.first_sample for argument in args if hasattr(argument, "first_sample")]
        return known[0] if known else self.sample


def _on_host(values: Tensor) -> Tensor:
    """A copy that holds no memory of the device: a step's outputs are far more than what a schedule keeps at a time."""
    return values.detach().to("cpu", copy=True).contiguous()


def _nothing(_value: object) -> None:
    """A tensor's hook that returns something replaces its gradient."""
