"""How many samples a step takes: one number, or a ramp from small batches to the full one.

Decisions
- The size of a step is a function of the samples consumed before it and of nothing else, so a run that resumes, in any layout, goes
  on with the right one. A step keeps the size that it began with, even where a border of the ramp lies inside it.
- A ramp has Megatron's three numbers, START INCREMENT SAMPLES: the sizes START, START + INCREMENT, ... up to the global batch
  size share the first SAMPLES samples evenly. The share is divided in double precision, as there: the sizes are equal step by step.
- The ramp changes how many samples make a step, never their order.
"""

from __future__ import annotations

from bisect import bisect_right
from dataclasses import dataclass
from functools import cached_property

__all__ = ["BatchSizes"]


@dataclass(frozen=True)
class BatchSizes:
    """The sizes of a run's global batches; `rampup` is (start, increment, samples), None for `full` from the first step on."""

    full: int
    rampup: tuple[int, ...] | None = None

    def at(self, consumed_samples: int) -> int:
        """Samples of the step that begins after `consumed_samples`."""
        if self.rampup is None:
            return self.full
        start, increment, samples = self.rampup
        num_increments = (self.full - start) // increment
        if num_increments == 0 or consumed_samples > samples:
            return self.full
        return start + int(consumed_samples / (samples / num_increments)) * increment

    @property
    def possible(self) -> list[int]:
        """Every size that a step can have, from the smallest."""
        if self.rampup is None:
            return [self.full]
        start, increment, _ = self.rampup
        return list(range(start, self.full + 1, increment))

    def consumed_before(self, step: int) -> int:
        """Samples that the steps before `step` (from 0) take, in a run that has these sizes from its start."""
        starts = self._ramp_starts
        last = len(starts) - 1
        return starts[step] if step < last else starts[last] + (step - last) * self.full

    def step_of(self, sample: int) -> int:
        """The step (from 0) that takes `sample` (from 0)."""
        starts = self._ramp_starts
        if sample >= starts[-1]:
            return len(starts) - 1 + (sample - starts[-1]) // self.full
        return bisect_right(starts, sample) - 1

    def num_steps(self, consumed_samples: int, num_samples: int) -> int:
        """Whole steps from `consumed_samples` to the end of `num_samples` samples."""
        steps = 0
        while consumed_samples + (size := self.at(consumed_samples)) <= num_samples:
            if size == self.full:
                return steps + (num_samples - consumed_samples) // size
            consumed_samples += size
            steps += 1
        return steps

    def violations(self, divisor: int) -> list[str]:
        """One sentence for everything that is wrong with the ramp. `divisor`: micro-batch size x data-parallel size, cuts every size."""
        rampup, full = self.rampup, self.full
        if rampup is None:
            return []
        if len(rampup) != 3:
            return [f"rampup_batch_size has {len(rampup)} numbers: give three, START INCREMENT SAMPLES, such as {divisor} {divisor} 1000"]
        start, increment, samples = rampup
        if min(start, increment, samples) < 1:
            return [f"rampup_batch_size {start} {increment} {samples}: start, increment and samples must be 1 or more"]
        if start > full:
            return [f"rampup_batch_size starts at {start}, above global_batch_size {full}: start at {full} or below"]
        found = []
        if (full - start) % increment:
            last = full - (full - start) % increment
            found.append(
                f"rampup_batch_size {start} {increment} {samples} does not meet global_batch_size {full}: steps of {increment} from "
                f"{start} reach {last} and {last + increment}; change one of the three"
            )
        wrong = [size for size in self.possible if size % divisor]
        if wrong:
            shown = ", ".join(str(size) for size in wrong[:5]) + (f" and {len(wrong) - 5} more" if len(wrong) > 5 else "")
            found.append(
                f"rampup_batch_size {start} {increment} {samples} makes global batches of {shown}, which are no multiples of "
                f"micro_batch_size x data-parallel size = {divisor}: use a start and an increment that are"
            )
        return found

    @cached_property
    def _ramp_starts(self) -> list[int]:
        """Samples before each step of the ramp, ending with the first step of the full size."""
        starts = [0]
        while (size := self.at(starts[-1])) < self.full:
            starts.append(starts[-1] + size)
        return starts
