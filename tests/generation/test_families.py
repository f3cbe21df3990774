"""Real families from Hugging Face folders, read as they are: the same tokens in every layout as from whole forward passes.

Requirements 85 and 86 for GPT-2, Llama (bias, linear, dynamic, llama3 scaling), Mistral (window), Qwen2 (yarn) and Qwen3.
"""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from megalite.convert import load_any
from megalite.errors import CheckpointError
from megalite.generation import Sampling, generate_batch
from megalite.grid import Grid, GridShape
from tests.generation.helpers import plain_greedy
from tests.ranks import run_ranks

HF = Path(__file__).parents[1] / "golden" / "hf"
FAMILIES = ("gpt2", "llama_bias", "llama_dynamic", "llama_linear", "llama3_tied_short", "mistral_window", "qwen2_yarn", "qwen3")
IN_ALL_LAYOUTS = ("gpt2", "llama_dynamic", "mistral_window", "qwen3")
PROMPTS = [[3], [5, 60, 7, 7, 1, 9, 30], [11, 12, 13]]
NUM = 9


def tokens_of(families: tuple[str, ...], tp: int, pp: int) -> dict[str, list[list[list[int]]]]:
    """{family: greedy tokens, and drawn ones} in a world of tp x pp ranks."""
    grid = None if tp * pp == 1 else Grid.build(GridShape(tp=tp, pp=pp))
    found = {}
    for family in families:
        stage, _ = load_any(HF / family, grid=grid)
        axis = None if grid is None else grid.pp
        drawn = Sampling(max_new_tokens=NUM, temperature=0.8, top_k=20, seed=5)
        found[family] = [
            *generate_batch(stage, PROMPTS, Sampling(max_new_tokens=NUM, temperature=0), pp=axis),
            *generate_batch(stage, PROMPTS, drawn, seeds=[1, 2, 3], pp=axis),
        ]
    return found


@pytest.fixture(scope="module")
def alone() -> dict[str, list[list[list[int]]]]:
    return tokens_of(FAMILIES, 1, 1)


@pytest.mark.parametrize("family", FAMILIES)
def test_requirement_85_86_a_folder_is_read_as_it_is_and_gives_the_plain_tokens(family: str, alone: dict) -> None:
    stage, _ = load_any(HF / family)
    assert alone[family][: len(PROMPTS)] == [plain_greedy(stage, ids, NUM) for ids in PROMPTS]


@pytest.mark.parametrize(("tp", "pp"), [(2, 1), (1, 2), (2, 2)])
def test_every_layout_says_the_same(tp: int, pp: int, alone: dict) -> None:
    """Greedy and drawn; with fewer key/value heads than tp ranks as well."""
    for found in run_ranks(tokens_of, tp * pp, IN_ALL_LAYOUTS, tp, pp, timeout=120):
        assert found == {family: alone[family] for family in IN_ALL_LAYOUTS}


def damaged(pp: int) -> None:
    grid = Grid.build(GridShape(pp=pp))
    stage, _ = load_any(HF / "qwen3", grid=grid)
    if grid.pp.is_last:
        with torch.no_grad():
            next(iter(stage.layers.values())).attention_norm.weight.fill_(float("nan"))  # type: ignore[union-attr]
    with pytest.raises(Exception, match="after 1 tokens are not finite"):
        generate_batch(stage, PROMPTS[:1], Sampling(max_new_tokens=3), pp=grid.pp)


def test_logits_that_are_not_finite_end_all_stages() -> None:
    run_ranks(damaged, 2, 2)


def test_a_folder_that_is_nothing_is_refused(tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match="no complete checkpoint"):
        load_any(tmp_path)
