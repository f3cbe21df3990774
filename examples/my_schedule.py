"""A pipeline schedule of one's own in ten lines: 1F1B that runs ahead, so that slow transfers hide behind computation.

    python tools/draw_schedule.py --schedule 1f1b examples/my_schedule.py:eager_1f1b --pp 4 --num-microbatches 8 --cost 1,1,1,0.5
    torchrun --nproc-per-node 4 pretrain_gpt.py --pp 4 --pipeline-schedule examples/my_schedule.py:eager_1f1b ...

A function gets the number of pipeline ranks, of micro-batches per step and of model chunks per rank, and returns one list
per rank of what it computes, in order. `3F0` is the forward of micro-batch 0 on stage 3, B its backward, I and W the
halves of a backward (input gradient, weight gradient). Sends and receives are added, and the whole is proven to run,
before anything starts.

In 1F1B a backward that arrives late delays the next forward, because a rank holds no spare work. With twice the warm-up
forwards there always is some: with messages that take half as long as a forward (the command above), 41 time units
become 36, for up to 7 activations on the first rank instead of 4.
"""

from __future__ import annotations

__all__ = ["eager_1f1b"]


def eager_1f1b(num_ranks: int, num_microbatches: int, num_chunks: int) -> list[list[str]]:
    """1F1B with 2(p-1-r) instead of p-1-r forwards before the first backward of rank r."""
    if num_chunks != 1:
        raise ValueError(f"eager 1F1B has one model chunk per rank, got {num_chunks}")
    ranks = []
    for rank in range(num_ranks):
        ahead = min(2 * (num_ranks - 1 - rank), num_microbatches)
        order = [f"{rank}F{k}" for k in range(ahead)]
        for k in range(num_microbatches):
            order += [f"{rank}F{k + ahead}"] if k + ahead < num_microbatches else []
            order.append(f"{rank}B{k}")
        ranks.append(order)
    return ranks
