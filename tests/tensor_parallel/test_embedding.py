"""The vocabulary-parallel embedding against a plain one, with a prime vocabulary."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F

from megalite import comm
from megalite.errors import DataError
from megalite.grid import Axis
from megalite.tensor_parallel import ParallelContext, VocabParallelEmbedding, named_parameter_info
from tests.ranks import run_ranks
from tests.tensor_parallel.helpers import assert_gradient, assert_near, context, load, random, share

S, B, H, VOCAB, PADDED = 8, 3, 5, 37, 48
LAYOUTS = [(1, False), (2, False), (2, True), (4, False), (4, True)]


def check_embedding(tp_size: int, sequence_parallel: bool, dtype: torch.dtype) -> None:
    ctx = context(tp_size, sequence_parallel)
    layer = VocabParallelEmbedding(PADDED, H, ctx, std=0.02, valid_rows=VOCAB).to(dtype)
    weight = random((PADDED, H), dtype, 1).requires_grad_()
    load(layer, weight=weight)
    tokens = torch.randint(VOCAB, (B, S), generator=torch.Generator().manual_seed(2)).t()
    dy = random((S, B, H), dtype, 3)
    plain = F.embedding(tokens, weight)
    (plain * dy).sum().backward()

    with comm.record_comms(ctx.tp) as records:
        y = layer(tokens)
        expected = share(plain.detach(), ctx.tp) if ctx.sequence_parallel else plain.detach()
        assert torch.equal(y, expected)  # all other ranks add zeros
        (y * (share(dy, ctx.tp) if ctx.sequence_parallel else dy)).sum().backward()
    assert_gradient(layer.weight, weight.grad, "dW")

    counts = {op: number for (op, _), number in comm.count_comms(records).items()}
    if tp_size == 1:
        assert counts == {}
    else:
        assert counts == ({"reduce_scatter": 1, "all_gather": 1} if ctx.sequence_parallel else {"all_reduce": 1})


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16], ids=str)
@pytest.mark.parametrize(("tp", "sequence_parallel"), LAYOUTS)
def test_embedding_equals_a_plain_one(tp: int, sequence_parallel: bool, dtype: torch.dtype) -> None:
    run_ranks(check_embedding, tp, tp, sequence_parallel, dtype)


def test_tokens_outside_the_vocabulary_are_refused() -> None:
    layer = VocabParallelEmbedding(PADDED, H, ParallelContext(Axis.single(), False), std=0.02, valid_rows=VOCAB, shared_over_pp=True)
    load(layer, weight=random((PADDED, H), torch.float32, 1))
    assert_near(layer(torch.tensor([[VOCAB - 1]]))[0, 0], layer.weight[VOCAB - 1].detach(), "last row")
    with pytest.raises(DataError, match="from 3 to 37, but the vocabulary has 37"):
        layer(torch.tensor([[3, VOCAB]]))
    with pytest.raises(DataError, match="from -1"):
        layer(torch.tensor([[-1, 2]]))
    info = named_parameter_info(layer)["weight"]
    assert (info.role, info.valid_rows, info.shared_over_pp) == ("embedding", VOCAB, True)
