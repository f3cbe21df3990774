"""Zero-bubble schedules with one chunk per rank and a fixed pattern: ZB-H1 and ZB-H2.

The backward is split: the previous stage waits for the input gradient I only, so the weight gradient W can fill what
would be idle time. Source: Zero Bubble Pipeline Parallelism, arXiv 2401.10241 (which writes B for I).

Decisions:
- m below p (H1) or 2p-1 (H2) is not refused. The pattern stays valid; only the bubble grows.
- Both keep I and W of a stage in ascending micro-batch order, as published.
- ZB-H2's zero bubble holds for the span, and for a step without a barrier between ranks before the optimizer.

Letters: p ranks, r one of them, m micro-batches per step.
"""

from __future__ import annotations

from megalite.pipeline.schedules.actions import Action, Kind, Schedule, round_robin
from megalite.pipeline.schedules.classic import refuse
from megalite.pipeline.schedules.constraints import number_violations

__all__ = ["zb_h1", "zb_h2"]


def zb_h1(num_ranks: int, num_microbatches: int) -> Schedule:
    """1F1B's memory, a third of its bubble at equal times: p-1-r forwards ahead, r weight gradients behind."""
    return _handcrafted("zb-h1", num_ranks, num_microbatches, 1)


def zb_h2(num_ranks: int, num_microbatches: int) -> Schedule:
    """No bubble at equal times and m >= 2p-1, for twice the memory: 2(p-1-r) forwards ahead, 2r weight gradients behind."""
    return _handcrafted("zb-h2", num_ranks, num_microbatches, 2)


def _handcrafted(name: str, num_ranks: int, num_microbatches: int, factor: int) -> Schedule:
    refuse(name, number_violations(num_ranks, num_microbatches, 1))
    orders = tuple(_order(rank, num_microbatches, ahead=factor * (num_ranks - 1 - rank), behind=factor * rank) for rank in range(num_ranks))
    return Schedule(name, num_ranks, num_microbatches, 1, round_robin(num_ranks, 1), orders)


def _order(rank: int, num_microbatches: int, ahead: int, behind: int) -> tuple[Action, ...]:
    """`ahead` forwards; per micro-batch k the next forward, I of k, W of k-behind; then the weight gradients left over."""
    ahead, behind = min(ahead, num_microbatches), min(behind, num_microbatches)
    order = [Action(Kind.FORWARD, rank, mb) for mb in range(ahead)]
    for mb in range(num_microbatches):
        if mb + ahead < num_microbatches:
            order.append(Action(Kind.FORWARD, rank, mb + ahead))
        order.append(Action(Kind.INPUT_GRAD, rank, mb))
        if mb >= behind:
            order.append(Action(Kind.WEIGHT_GRAD, rank, mb - behind))
    return (*order, *(Action(Kind.WEIGHT_GRAD, rank, mb) for mb in range(num_microbatches - behind, num_microbatches)))
