"""The gradient noise scale: about how many samples a batch can have before more of them stop helping in proportion.

B = tr(S) / |G|^2 with S the covariance of one sample's gradient and G the true gradient (McCandlish et al., arXiv 1812.06162, B_simple).
Both are estimated from gradients of a small and a large batch as in its appendix A.1; here the small ones are the two halves of a step and
the large one is the step.

Decisions
- With mean gradients a and b of the halves, of m and n samples: |G|^2 is estimated by a . b, and tr(S) by (|a|^2 - a . b) m and
  (|b|^2 - a . b) n, of which the mean is taken. Both have the right expectation, and for equal halves they are the appendix' formulas.
  The product comes from three norms, |m a + n b|^2 among them, which are right for every layout already.
- One step says little, and a ratio of noisy numbers is biased: numerator and denominator are averaged over time first, and the ratio is
  taken of the averages. Steps whose gradients are not finite or that lack tokens in a half are left out.
- Everything stays on the device. The averages are not saved: they begin anew after a resume, and nothing but the log depends on them.
- A negative ratio means that the averages are still too noisy, and is shown as it is.
"""

from __future__ import annotations

import torch
from torch import Tensor

__all__ = ["NoiseScale"]


class NoiseScale:
    """Running estimate from the halves of every step. decay: of the averages, which look back about 1 / (1 - decay) steps."""

    def __init__(self, device: torch.device, decay: float = 0.95) -> None:
        self._decay = decay
        self._trace, self._square = torch.zeros((2,), dtype=torch.float64, device=device)

    def add(self, norms: tuple[Tensor, Tensor, Tensor], tokens: Tensor, num_samples: int) -> None:
        """Take in one step.

        norms: of the halves' gradients and of their sum, all divided by the tokens of the whole step. tokens: loss-bearing ones in each
        half, [2]. num_samples: of the whole step; a half has its share of them by tokens.
        """
        shares = tokens.double() / tokens.double().sum()
        first, second, both = (norm.double().square() for norm in norms)
        square = (both - first - second) / 2 / shares.prod()
        traces = torch.stack([first, second]) / shares.square() - square
        trace = (traces * shares * num_samples).mean()
        is_usable = torch.isfinite(square) & torch.isfinite(trace)
        self._trace = torch.where(is_usable, self._trace.lerp(trace, 1 - self._decay), self._trace)
        self._square = torch.where(is_usable, self._square.lerp(square, 1 - self._decay), self._square)

    @property
    def value(self) -> Tensor:
        """tr(S) / |G|^2 in samples, an fp32 scalar on the device; NaN before the first step."""
        return (self._trace / self._square).float()
