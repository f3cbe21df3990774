"""Runs on files: any layout reads the same blend, with documents kept apart, and evaluates it to the same numbers."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest

from megalite.config import DataConfig, ModelConfig, ParallelConfig, RunConfig, TrainConfig
from megalite.data.dataset_meta import DatasetMeta, write_meta
from megalite.data.indexed_writer import IndexedDatasetWriter
from megalite.grid import Grid, GridShape
from megalite.training.loop import evaluate, train_step
from megalite.training.setup import build_programs, build_run_on
from tests.ranks import run_ranks

VOCAB = 61
LAYOUTS = {
    "dp2": {},
    "tp2": dict(tensor_model_parallel_size=2),
    "pp2": dict(pipeline_model_parallel_size=2),
}


def write(prefix: Path, seed: int) -> str:
    """120 documents of 1 to 14 tokens that end with 0, and their side file."""
    random = np.random.default_rng(seed)
    with IndexedDatasetWriter(prefix, "uint16") as writer:
        for _ in range(120):
            writer.add_document([*random.integers(1, VOCAB, random.integers(0, 14)).tolist(), 0])
    facts = dict(tokenizer="t", vocab_size=VOCAB, eod_id=0, bos_id=None, append_eod=True, prepend_bos=False)
    counts = dict(documents=120, empty_documents=0, sequences=120, tokens=1, max_id=VOCAB - 1, dtype="uint16")
    write_meta(prefix, DatasetMeta(**facts, **counts))
    return str(prefix)


def run_on_files(paths: dict[str, tuple[str, ...]], layout: dict[str, int], micro_batch_size: int) -> list[float] | None:
    """Losses of validation, two steps, validation twice and test. First rank only."""
    masks: dict[str, Any] = dict(reset_attention_mask=True, reset_position_ids=True, eod_mask_loss=True)
    config = RunConfig(
        model=ModelConfig(num_layers=2, hidden_size=24, num_attention_heads=4, num_query_groups=2, ffn_hidden_size=40, vocab_size=VOCAB),
        parallel=ParallelConfig(**layout),
        data=DataConfig(seq_length=12, **paths, **masks),
        train=TrainConfig(micro_batch_size=micro_batch_size, global_batch_size=8, train_iters=2, eval_interval=1, eval_iters=3),
    ).resolve()
    world_size = int(np.prod(list(layout.values()), dtype=int)) if layout or micro_batch_size == 8 else 2
    grid = Grid.build(GridShape(**config.grid_sizes(world_size)))
    run = build_run_on(config, grid, *build_programs(config, world_size))
    assert run.valid_loader is not None and run.test_loader is not None
    losses = [evaluate(run, run.valid_loader)]
    for _ in range(2):
        run.metrics.add(train_step(run))
        losses += run.metrics.report()
    losses += [evaluate(run, loader) for loader in (run.valid_loader, run.valid_loader, run.test_loader)]
    run.train_loader.close()
    return losses if grid.rank == 0 else None


@pytest.fixture(scope="module")
def paths(tmp_path_factory: pytest.TempPathFactory) -> dict[str, tuple[str, ...]]:
    folder = tmp_path_factory.mktemp("data")
    a, b, c = (write(folder / name, seed) for seed, name in enumerate("abc"))
    return {"train_data_path": ("0.3", a, "0.7", b), "valid_data_path": (c,), "test_data_path": (a, b), "data_cache_path": str(folder)}  # type: ignore[dict-item]


@pytest.fixture(scope="module")
def alone(paths: dict[str, tuple[str, ...]]) -> list[float]:
    return run_ranks(run_on_files, 1, paths, {}, 8)[0]


def test_evaluation_reads_the_same_samples_every_time(alone: list[float]) -> None:
    """Requirement 34."""
    before, first, _, after, again, test = alone
    assert after == again
    assert len({before, after, test, first}) == 4


@pytest.mark.parametrize("name", LAYOUTS)
def test_a_layout_changes_no_loss(name: str, paths: dict[str, tuple[str, ...]], alone: list[float]) -> None:
    """Requirement 34: sums of losses over sums of tokens, although micro-batches and ranks hold unequal numbers of tokens."""
    np.testing.assert_allclose(run_ranks(run_on_files, 2, paths, LAYOUTS[name], 2)[0], alone, rtol=1e-5)
