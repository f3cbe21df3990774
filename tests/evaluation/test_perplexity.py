"""Perplexity: every token once, each weighing the same, in any windows and on any layout."""

from __future__ import annotations

import doctest
import math
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from megalite.convert import load_any
from megalite.errors import ConfigError, DataError, MegaliteError
from megalite.evaluation import Perplexity, Scorer, TokenStream, measure, perplexity
from megalite.evaluation.perplexity import windows
from megalite.grid import Grid, GridShape
from tests.generation.helpers import plain_logits, save_stage, tiny_run, tiny_stage
from tests.ranks import run_ranks

C = 11  # tokens that the tiny model reads
IDS = np.random.RandomState(0).randint(0, 257, size=38)


def scorer(batch_size: int = 3) -> Scorer:
    return Scorer(tiny_stage(tiny_run()).eval(), batch_size=batch_size)


def brute_force(ids: list[int], context: int, stride: int) -> list[float]:
    """The loss of every token but the first, by one forward pass of the model for each."""
    stage, losses, start = tiny_stage(tiny_run()).eval(), [], 0
    for place in range(1, len(ids)):
        while place > start + context:  # beyond what this window reads
            start += stride
        logits = plain_logits(stage, ids[start:place])
        losses.append(-float(torch.log_softmax(logits.double(), dim=-1)[ids[place]]))
    return losses


def test_documentation() -> None:
    assert doctest.testmod(perplexity).failed == 0


@settings(max_examples=200, deadline=None)
@given(st.integers(0, 60), st.integers(1, 12), st.data())
def test_every_token_is_predicted_exactly_once(num_tokens: int, context: int, data: st.DataObject) -> None:
    stride = data.draw(st.integers(1, context))
    found = list(windows(num_tokens, context, stride))
    counted = [place for window in found for place in range(window.counted, window.stop)]
    assert counted == [*range(num_tokens - 1)]
    assert all(0 < window.stop - window.start <= context for window in found)
    assert all(window.counted - window.start >= context - stride for window in found[1:])


@pytest.mark.parametrize(("context", "stride"), [(11, 11), (11, 4), (7, 7), (7, 1), (5, 3)])
def test_windows_that_do_not_divide_the_text(context: int, stride: int) -> None:
    expected = brute_force([256, *IDS.tolist()], context, stride)
    found = measure(scorer(), [TokenStream([IDS[:5], IDS[5:6], IDS[6:]], 256, num_bytes=31)], context=context, stride=stride)
    assert len(IDS) % stride != 0 or stride == 1
    assert found.num_tokens == len(expected) == len(IDS)
    assert found.total_loss == pytest.approx(sum(expected), rel=1e-5)
    assert found.perplexity == pytest.approx(math.exp(sum(expected) / len(IDS)), rel=1e-4)
    assert found.bits_per_byte == pytest.approx(sum(expected) / math.log(2) / 31, rel=1e-5)


def test_tokens_weigh_alike_whatever_window_or_document_they_are_in() -> None:
    """A mean of windows' or documents' means would be another number."""
    documents = [IDS[:12], IDS[12:14], IDS[14:17]]
    losses = [brute_force([256, *document.tolist()], C, C) for document in documents]
    everything = [loss for part in losses for loss in part]
    found = measure(scorer(2), [TokenStream([document], 256) for document in documents], context=C)
    assert found.loss == pytest.approx(np.mean(everything), rel=1e-5)
    assert found.loss != pytest.approx(np.mean([np.mean(part) for part in losses]), rel=1e-3)
    assert found.num_windows == 4
    assert found.bits_per_byte is None


def test_without_a_first_token_the_first_one_is_only_read() -> None:
    expected = brute_force(IDS.tolist(), C, C)
    found = measure(scorer(), [TokenStream([IDS], None, num_bytes=99)], context=C)
    assert (found.num_tokens, found.num_bytes) == (len(IDS) - 1, None)
    assert found.total_loss == pytest.approx(sum(expected), rel=1e-5)


def test_only_what_is_counted_counts() -> None:
    is_counted = np.arange(len(IDS)) % 3 == 1
    expected = [loss for loss, counts in zip(brute_force(IDS.tolist(), C, 4), is_counted[1:], strict=True) if counts]
    found = measure(scorer(), [TokenStream([IDS], None, is_counted=is_counted)], context=C, stride=4)
    assert found.num_tokens == len(expected)
    assert found.total_loss == pytest.approx(sum(expected), rel=1e-5)
    few = np.arange(len(IDS)) == 30
    assert measure(scorer(), [TokenStream([IDS], None, is_counted=few)], context=C).num_windows == 1


def test_errors() -> None:
    with pytest.raises(ConfigError, match="the model reads 11 tokens at once"):
        measure(scorer(), [TokenStream([IDS], 256)], context=12)
    with pytest.raises(ConfigError, match="stride must be from 1 to context"):
        measure(scorer(), [TokenStream([IDS], 256)], context=8, stride=9)
    with pytest.raises(ConfigError, match="batch_size is 0"):
        scorer(0)
    with pytest.raises(DataError, match="holds token 257, but the model's vocabulary has the ids 0 to 256"):
        measure(scorer(), [TokenStream([np.array([3, 257])], 256)], context=8)
    for streams in ([], [TokenStream([], None)], [TokenStream([IDS[:1]], None)]):
        with pytest.raises(DataError, match="no token to predict"):
            measure(scorer(), streams, context=8)


def test_losses_that_are_not_finite_are_an_error() -> None:
    stage = tiny_stage(tiny_run()).eval()
    with torch.no_grad():
        next(iter(stage.layers.values())).mlp.down_proj.weight.fill_(float("nan"))  # type: ignore[union-attr]
    with pytest.raises(MegaliteError, match="not finite"):
        measure(Scorer(stage), [TokenStream([IDS], 256)], context=8)


def test_a_perplexity_beyond_all_numbers() -> None:
    assert Perplexity(1e6, 10, 1).perplexity == math.inf


def figures_of(folder: str, tp: int, pp: int) -> list[float]:
    grid = Grid.build(GridShape(tp=tp, pp=pp), "cpu")
    stage, _ = load_any(folder, "cpu", grid)
    scorer = Scorer(stage, grid.pp, batch_size=3)
    found = measure(scorer, [TokenStream([IDS], 256)], context=9, stride=5)
    answers = scorer.likelihoods([([1, 2, 3], [4]), ([7], [8, 9, 10]), (IDS[:20].tolist(), [2, 3])])
    return [found.total_loss, *(answer.log_probability for answer in answers), *(float(answer.is_greedy) for answer in answers)]


def test_all_layouts_give_the_same_figures(tmp_path: Path) -> None:
    config = tiny_run(make_vocab_size_divisible_by=28)  # 280 rows, so that 2 divides them
    save_stage(tmp_path, tiny_stage(config), config)
    (expected,) = run_ranks(figures_of, 1, str(tmp_path), 1, 1)
    for found in run_ranks(figures_of, 4, str(tmp_path), 2, 2):
        assert found == pytest.approx(expected, rel=1e-5)
