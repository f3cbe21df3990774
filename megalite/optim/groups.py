"""What each parameter is updated with: its rule's settings, its state, and where that state lives.

Decisions
- Weight decay goes by role, settled before any wrapping: weights that multiply (linear, head) and tables (embedding, position) decay,
  norms and biases do not. Shapes are not asked: a slice may have any.
- An expression of `weight_decay_multipliers` overrules the role, in both directions.
- State exists from the start, as zeros, so that a checkpoint has the same tensors at step 0 as later.
- State may be kept in bf16, or in host memory. It is made fp32 on the device for the update, a bounded number of elements at a time,
  and written back: there is one arithmetic, and offloaded state gives the same bits. Rounding a moment to bf16 (to nearest) loses
  increments below 2^-9 of it: a second moment with beta2 0.999 stops following small changes, one with 0.95 does not.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor

from megalite.config import OptimConfig
from megalite.config_multipliers import Multipliers
from megalite.optim.parameters import OptimParameter

__all__ = ["Entry", "Rule", "make_entries", "make_state", "streamed", "write_unless"]

DECAYED = frozenset({"linear", "head", "embedding", "position"})
DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16}
STREAMED = 2**24
"""Elements whose state is fp32 on the device at one time, where it is not kept so: 64 MiB for each moment."""


class Rule:
    """One way of updating; `Optimizer` gives each parameter to one rule. Subclasses say how."""

    def __init__(self, entries: Sequence[Entry]) -> None:
        self.entries = list(entries)

    def step(self, lr: float, skip: Tensor | None) -> None:
        """One update of all entries, as `Optimizer.step`. Entries of a collective rule are the same on all ranks that take part."""
        raise NotImplementedError

    def load_step(self, num_steps: int) -> None:
        """State that counts updates is set to this number."""


@dataclass(frozen=True, eq=False, kw_only=True)
class Entry:
    """A parameter with the factors of its learning rate and weight decay, and its moments by name."""

    parameter: OptimParameter
    local: Tensor
    lr_factor: float
    decay_factor: float
    weight_decay: float
    state: dict[str, Tensor] = field(default_factory=dict)

    @property
    def grad(self) -> Tensor:
        grad = self.parameter.local_grad
        assert grad is not None, f"{self.parameter.name} has no gradient"
        return grad


def make_entries(parameters: Sequence[OptimParameter], config: OptimConfig, all_names: Sequence[str]) -> list[Entry]:
    """One entry per parameter, still without state. all_names: of the whole model. Raises ConfigError for multipliers that match none."""
    rates = Multipliers.parse(config.lr_multipliers, "lr_multipliers")
    decays = Multipliers.parse(config.weight_decay_multipliers, "weight_decay_multipliers")
    for multipliers in (rates, decays):
        multipliers.check_names(all_names)
    entries = []
    for parameter in parameters:
        rate, decay = rates.factor_of(parameter.name), decays.factor_of(parameter.name)
        by_role = 1.0 if parameter.info.role in DECAYED else 0.0
        factor = by_role if decay is None else decay
        entries.append(
            Entry(
                parameter=parameter,
                local=parameter.local,
                lr_factor=1.0 if rate is None else rate,
                decay_factor=factor,
                weight_decay=config.weight_decay * factor,
            )
        )
    return entries


def make_state(entries: Sequence[Entry], dtypes: dict[str, str], device: torch.device | None) -> None:
    """Give every entry zeros for each moment in `dtypes` ({name: "fp32" or "bf16"}), on `device` or, with None, beside its parameter.

    Host memory for a parameter elsewhere is page-locked, so that copies need not wait for one another.
    """
    for entry in entries:
        place = entry.local.device if device is None else device
        pinned = place.type == "cpu" and entry.local.device.type == "cuda"
        for name, dtype in dtypes.items():
            entry.state[name] = torch.zeros(entry.local.shape, dtype=DTYPES[dtype], device=place, pin_memory=pinned)


def streamed(entries: Sequence[Entry], names: Sequence[str]) -> Iterator[tuple[list[Entry], dict[str, list[Tensor]]]]:
    """Entries with equal settings together, and their moments as fp32 tensors on the parameters' device, to be changed in place.

    What is kept otherwise is written back when the next ones are asked for. State that is fp32 on the device is handed out as it is, all
    of it at once.
    """
    for group in _groups(entries):
        for part in _cut(group, lambda entry: all(_as_used(entry, name) is entry.state[name] for name in names)):
            moments = {name: [_as_used(entry, name) for entry in part] for name in names}
            yield part, moments
            for name in names:
                for entry, used in zip(part, moments[name], strict=True):
                    if used is not entry.state[name]:
                        entry.state[name].copy_(used, non_blocking=True)


def _as_used(entry: Entry, name: str) -> Tensor:
    return entry.state[name].to(device=entry.local.device, dtype=torch.float32, non_blocking=True)


def _groups(entries: Sequence[Entry]) -> list[list[Entry]]:
    groups: dict[tuple[float, float], list[Entry]] = {}
    for entry in entries:
        groups.setdefault((entry.lr_factor, entry.weight_decay), []).append(entry)
    return list(groups.values())


def _cut(entries: list[Entry], is_free: Callable[[Entry], bool]) -> Iterator[list[Entry]]:
    """All at once where their state needs no copies, else in runs of about STREAMED elements."""
    if is_free(entries[0]):
        yield entries
        return
    part, size = [], 0
    for entry in entries:
        if part and size + entry.local.numel() > STREAMED:
            yield part
            part, size = [], 0
        part.append(entry)
        size += entry.local.numel()
    yield part


def write_unless(skip: Tensor | None, target: Tensor, value: Tensor) -> None:
    """`target` becomes `value`; where `skip` is 1.0 it keeps its bits, whatever `value` holds. Does not wait for the device."""
    if skip is not None:
        value = torch.where(skip > 0.5, target.to(device=value.device, dtype=value.dtype), value)
    target.copy_(value, non_blocking=True)
