"""Which numbers a schedule accepts: one sentence per violation, with the numbers and the remedy.

Letters: p ranks, v model chunks per rank, m micro-batches per step, N group size of the interleaved schedule.
"""

from __future__ import annotations

__all__ = [
    "dualpipe_violations",
    "group_fits",
    "group_size_violations",
    "interleaved_violations",
    "looped_violations",
    "number_violations",
    "one_chunk_violations",
    "smallest_group",
    "two_chunk_violations",
]


def number_violations(num_ranks: int, num_microbatches: int, num_chunks: int) -> list[str]:
    """Numbers below 1, which no schedule accepts."""
    numbers = {"pipeline ranks": num_ranks, "micro-batches": num_microbatches, "model chunks per rank": num_chunks}
    return [f"a schedule needs at least 1 of {what}, got {number}" for what, number in numbers.items() if number < 1]


def one_chunk_violations(num_ranks: int, num_microbatches: int, num_chunks: int) -> list[str]:
    """For schedules with one chunk per rank: any p and m."""
    if num_chunks == 1:
        return []
    return [f"this schedule has one model chunk per rank, got {num_chunks}: use a virtual pipeline size of 1, or schedule interleaved-1f1b"]


def two_chunk_violations(num_ranks: int, num_microbatches: int, num_chunks: int) -> list[str]:
    """For schedules on the V placement: two chunks, any p and m."""
    if num_chunks == 2:
        return []
    return [f"this schedule places two model chunks per rank in a V, got {num_chunks}: use a virtual pipeline size of 2 (--vpp 2)"]


def dualpipe_violations(num_ranks: int, num_microbatches: int, num_chunks: int) -> list[str]:
    """For DualPipeV: two chunks in a V and m >= 2p."""
    violations = two_chunk_violations(num_ranks, num_microbatches, num_chunks)
    if num_microbatches < 2 * num_ranks:
        violations.append(
            f"this schedule needs twice as many micro-batches as pipeline ranks, got {num_microbatches} for {num_ranks} "
            f"ranks: use {2 * num_ranks} or more micro-batches, at most {num_microbatches // 2} ranks, or schedule zb-v"
        )
    return violations


def looped_violations(num_ranks: int, num_microbatches: int, num_chunks: int) -> list[str]:
    """For looped breadth-first: any p, m and v."""
    return []


def interleaved_violations(num_ranks: int, num_microbatches: int, num_chunks: int) -> list[str]:
    """For interleaved 1F1B: v >= 2 and m >= p."""
    violations = []
    if num_chunks == 1:
        violations.append("interleaving needs at least 2 model chunks per rank, got 1: use schedule 1f1b")
    if num_microbatches < num_ranks:
        violations.append(
            f"interleaving needs at least as many micro-batches as pipeline ranks, got {num_microbatches} for "
            f"{num_ranks} ranks: use {num_ranks} or more micro-batches (larger global batch or smaller micro-batch), "
            f"at most {num_microbatches} ranks, or schedule 1f1b"
        )
    return violations


def group_fits(num_ranks: int, num_microbatches: int, group_size: int) -> bool:
    """p <= N <= m, and no last group below p: there chunk 1 would be due before micro-batch 0 has come round."""
    if not num_ranks <= group_size <= num_microbatches:
        return False
    rest = num_microbatches % group_size
    return rest == 0 or rest >= num_ranks


def smallest_group(num_ranks: int, num_microbatches: int) -> int:
    """The smallest N that fits; N = m always does when m >= p."""
    return next(n for n in range(num_ranks, num_microbatches + 1) if group_fits(num_ranks, num_microbatches, n))


def group_size_violations(num_ranks: int, num_microbatches: int, group_size: int) -> list[str]:
    """Why this N does not fit, and which ones do."""
    if group_fits(num_ranks, num_microbatches, group_size):
        return []
    groups = [n for n in range(num_ranks, num_microbatches + 1) if group_fits(num_ranks, num_microbatches, n)]
    nearby = range(max(1, num_microbatches - group_size), num_microbatches + 2 * max(group_size, 1))
    usable = [m for m in nearby if group_fits(num_ranks, m, group_size)][:6]
    remedy = f"use a group size out of {groups}" + (f", or one of {usable} micro-batches" if usable else "")
    return [
        f"group size {group_size} does not fit {num_microbatches} micro-batches on {num_ranks} pipeline ranks (it must "
        f"lie between the two, and the last group must be full or hold at least {num_ranks}): {remedy}"
    ]
