"""The optimizer: rules over local tensors, with their state as named logical tensors.

Decisions
- Every parameter has one rule: AdamW, SGD, or Muon for the matrices of the blocks with AdamW for all else. Rules work on this rank's
  parts; no DTensor dispatch is paid for.
- State is named, placed and saved like the parameter it belongs to, so it moves between layouts with it.
- All parameters take every step together; a missing gradient is a mistake of ours.
- The caller decides about gradients that are not finite; `step` does not look at them. The decision may still be on the device (`skip`):
  the update then changes nothing, not even AdamW's counters, and the host corrects its own count when it learns of it
  (`undo_step_count`).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor

from megalite.config import OptimConfig
from megalite.grid import Axis, Grid
from megalite.optim.elementwise import SGD, AdamW
from megalite.optim.grads import global_names
from megalite.optim.groups import Entry, Rule, make_entries, make_state
from megalite.optim.muon import Muon, is_muon_matrix
from megalite.optim.parameters import OptimParameter, local_twins, without_local_copies

__all__ = ["Optimizer"]


class Optimizer:
    """Updates `parameters` (of `collect_parameters`) in place.

    num_steps: updates made, as far as the host knows. grid: needed where parameters are cut over ranks and the optimizer is Muon, and to
    know all names of a model that is spread over pp; with it the constructor is collective over pp. Raises ConfigError where a multiplier
    matches no parameter.
    """

    def __init__(self, parameters: Sequence[OptimParameter], config: OptimConfig, grid: Grid | None = None) -> None:
        self.num_steps = 0
        self._parameters = list(parameters)
        has_multipliers = bool(config.lr_multipliers or config.weight_decay_multipliers)
        names = [p.name for p in parameters] if grid is None or not has_multipliers else global_names(parameters, grid)
        self._entries = make_entries(parameters, config, names)
        self._rules = _build_rules(self._entries, config, grid)

    @property
    def group_counts(self) -> dict[str, tuple[int, int]]:
        """{"decay" or "no_decay": (logical parameters, their elements)} of this rank's stages.

        Padding of the vocabulary and copies do not count: the sums over pp are the model's.
        """
        none: dict[str, tuple[int, int]] = {"decay": (0, 0), "no_decay": (0, 0)}
        return none | self._counted({entry: "decay" if entry.decay_factor > 0 else "no_decay" for entry in self._entries})

    @property
    def setting_counts(self) -> dict[str, tuple[int, int]]:
        """{"muon, lr x 1, weight decay 0.1": (logical parameters, their elements)} of this rank's stages, counted like `group_counts`."""
        return self._counted(
            {
                entry: f"{name}, lr x {entry.lr_factor:g}, weight decay {entry.weight_decay:g}"
                for name, (entries, _) in self._rules.items()
                for entry in entries
            }
        )

    def _counted(self, labels: dict[Entry, str]) -> dict[str, tuple[int, int]]:
        counts: dict[str, tuple[int, int]] = {}
        for entry, label in labels.items():
            if not entry.parameter.is_copy:
                number, elements = counts.get(label, (0, 0))
                counts[label] = (number + 1, elements + entry.parameter.num_elements)
        return counts

    def step(self, lr: float, skip: Tensor | None = None) -> None:
        """One update from the gradients as they are. Collective over tp and dp_shard where the optimizer is Muon.

        skip: an fp32 scalar on the device. 1.0 leaves parameters, moments and step counters as they were bit for bit, whatever the
        gradients are, without asking the host; 0.0 makes the update. `num_steps` counts the update in any case: see `undo_step_count`.
        """
        for entry in self._entries:
            assert entry.parameter.local_grad is not None, f"{entry.parameter.name} has no gradient"
        for _, rule in self._rules.values():
            rule.step(lr, skip)
        self.num_steps += 1

    def undo_step_count(self, number: int = 1) -> None:
        """Take back the count of the last `number` updates, when it is known that they were skipped."""
        assert 0 <= number <= self.num_steps, f"{number} of {self.num_steps} updates cannot have been skipped"
        self.num_steps -= number

    def zero_grad(self) -> None:
        """Release all gradients."""
        for parameter in self._parameters:
            parameter.parameter.grad = None

    def named_state(self) -> dict[str, dict[str, Tensor]]:
        """{logical name: {"exp_avg": ..., "exp_avg_sq": ...}} (or "momentum_buffer"), placed like the parameters.

        The tensors share storage with the optimizer. Filling these tensors in place, then `load_step`, restores a
        state. Waits for copies to host memory, if the state is there: ask again after more updates.
        """
        if any(moment.device != entry.local.device for entry in self._entries for moment in entry.state.values()):
            torch.cuda.synchronize()
        saved = set(without_local_copies(self._parameters))
        return {
            entry.parameter.name: {key: _placed_like(entry.parameter, moment) for key, moment in entry.state.items()}
            for entry in self._entries
            if entry.parameter in saved
        }

    def load_step(self, num_steps: int) -> None:
        """The end of a restoration: set the number of updates made so far, which AdamW's bias correction depends on, and
        give local copies of tied parameters the values and the state of their originals."""
        self.num_steps = num_steps
        entries = {entry.parameter: entry for entry in self._entries}
        for original, copy in local_twins(self._parameters):
            copy.local.copy_(original.local)
            for key, moment in entries[copy].state.items():
                moment.copy_(entries[original].state[key])
        for _, rule in self._rules.values():
            rule.load_step(num_steps)


def _build_rules(entries: Sequence[Entry], config: OptimConfig, grid: Grid | None) -> dict[str, tuple[list[Entry], Rule]]:
    """{name: (its entries, rule)}; gives the entries their state."""
    device = torch.device("cpu") if config.optimizer_cpu_offload else None
    first, second = config.exp_avg_dtype, config.exp_avg_sq_dtype
    matrices = [entry for entry in entries if config.optimizer == "muon" and is_muon_matrix(entry.parameter)]
    chosen = set(matrices)
    others = [entry for entry in entries if entry not in chosen]
    rules: dict[str, tuple[list[Entry], Rule]] = {}
    if config.optimizer == "sgd":
        make_state(others, {"momentum_buffer": first}, device)
        rules["sgd"] = others, SGD(others, config)
    else:
        make_state(others, {"exp_avg": first, "exp_avg_sq": second}, device)
        rules["adam"] = others, AdamW(others, config)
    if matrices:
        tp, dp_shard = (Axis.single("tp"), Axis.single("dp_shard")) if grid is None else (grid.tp, grid.dp_shard)
        make_state(matrices, {"momentum_buffer": first}, device)
        rules["muon"] = matrices, Muon(matrices, config, tp, dp_shard)
    return rules


def _placed_like(parameter: OptimParameter, local: Tensor) -> Tensor:
    model = parameter.parameter
    if not isinstance(model, DTensor):
        return local
    mesh = model.device_mesh
    if mesh.device_type != local.device.type:
        return _on_host(model, local)
    return DTensor.from_local(local, mesh, model.placements, run_check=False, shape=model.shape, stride=model.stride())


def _on_host(model: DTensor, local: Tensor) -> DTensor:
    """`DTensor.from_local` would copy to the mesh's device; FSDP2 makes its own offloaded parameters like this."""
    meta = model._spec.tensor_meta
    assert meta is not None
    return DTensor(local, replace(model._spec, tensor_meta=meta._replace(dtype=local.dtype)), requires_grad=False)
