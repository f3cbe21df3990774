"""What is written about a step that went wrong: enough to find its documents, its layers, and to run it again.

Decisions
- Gradient norms per parameter come from the step itself: they are the terms of its norm.
- Activation norms come from a forward pass over the same batch, made only now. Where the update was not made, these are the step's own
  activations, since dropout's masks are functions of the sample; else they are those of the weights after it, and the file says so.
- Documents come from the run's configuration, by `megalite.data.provenance`.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from megalite import comm
from megalite.checkpoint.manifest import write_atomically
from megalite.data.provenance import Provenance
from megalite.errors import ConfigError
from megalite.model.block import Block
from megalite.training.verdict import Verdict

if TYPE_CHECKING:
    from megalite.training.setup import Run

__all__ = ["write_autopsy"]


def write_autopsy(run: Run, verdict: Verdict) -> Path | None:
    """Write `autopsy-step-N.json` into the --save folder; returns its path, None without such a folder. Collective."""
    activations = _activation_norms(run, verdict)
    if run.config.output.save is None:
        return None
    path = Path(run.config.output.save) / f"autopsy-step-{verdict.step}.json"
    if run.grid.rank == 0:
        write_atomically(path, json.dumps(_report(run, verdict, activations), indent=1) + "\n")
    return path


def _report(run: Run, verdict: Verdict, activations: dict[str, float] | None) -> dict[str, Any]:
    last = verdict.first_sample + verdict.num_samples - 1
    norms = (verdict.squares.sqrt() / verdict.loss_scale).tolist()
    return {
        "step": verdict.step,
        "samples": [verdict.first_sample, last],
        "loss": _number(verdict.loss),
        "grad_norm": _number(verdict.grad_norm),
        "median_loss": _number(verdict.median_loss),
        "median_grad_norm": _number(verdict.median_grad_norm),
        "loss_scale": verdict.loss_scale,
        "lr": verdict.lr,
        "update": "skipped" if verdict.was_skipped else "made",
        "grad_norms": {name: _number(norm) for name, norm in zip(run.parameter_names, norms, strict=True)},
        "activation_norms": activations,
        "activation_norms_are_of": "the weights before the update" if verdict.was_skipped else "the weights after the update",
        "documents": _documents(run, verdict),
        "replay": (
            f"load the newest checkpoint before step {verdict.step} and train to that step in the same layout: "
            "the run is the same bit for bit"
        ),
    }


def _number(value: float) -> float | str:
    """JSON has no word for inf and NaN."""
    return value if abs(value) < float("inf") else str(value)


def _documents(run: Run, verdict: Verdict) -> list[dict[str, Any]] | str:
    """Every piece of text that the step read, or why that is not known."""
    try:
        provenance = Provenance.of_run(run.full_config)
    except ConfigError as error:
        return str(error)
    samples = range(verdict.first_sample, verdict.first_sample + verdict.num_samples)
    names = ("sample", "dataset", "document", "first_byte", "end_byte")
    return [{name: getattr(use, name) for name in names} for sample in samples for use in provenance.of_sample(sample)]


@torch.no_grad()
def _activation_norms(run: Run, verdict: Verdict) -> dict[str, float] | None:
    """L2 norm of every block's output over the batch, by layer; None for a step of a batch size ramp-up. Collective."""
    if verdict.num_samples != run.global_batch_size:
        return None
    squares: dict[int, Tensor] = {}

    def add(block: Any, _args: Any, output: Tensor) -> None:
        square = output.double().square().sum()
        squares[block.layer] = squares.get(block.layer, 0) + square

    blocks = [module for stage in run.stages.values() for module in stage.modules() if isinstance(module, Block)]
    hooks = [block.register_forward_hook(add) for block in blocks]
    try:
        microbatches = [batch.to(run.grid.device) for batch in run.train_loader.batch(verdict.first_sample)]
        run.runtime.evaluate(run.eval_program, microbatches)
    finally:
        for hook in hooks:
            hook.remove()
    grid, num_layers = run.grid, run.config.model.num_layers
    mine = torch.zeros(num_layers, dtype=torch.float64, device=grid.device)
    for layer, square in squares.items():
        mine[layer] = square
    if run.config.parallel.use_sequence_parallel:
        mine = comm.all_reduce(mine, grid.tp)
    norms = comm.all_reduce(comm.all_reduce(mine, grid.dp), grid.pp).sqrt().tolist()
    return {f"layers.{layer}": _number(norm) for layer, norm in enumerate(norms)}  # type: ignore[misc]
