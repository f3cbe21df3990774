"""The run's datasets on all ranks: files (`data/corpora.py`) or pseudo-random tokens.

Decisions
- The vocabulary comes from, in this order: `vocab_size`, the tokenizer, the datasets' side files; the data's largest id must fit.
- Training asks for all samples of the run up front, so that too little data is known at start-up. A resumed run asks for what was
  consumed and for the steps that are left: the same number, unless the batch size has changed in between.
- Validation reads the same `eval_iters` global batches every time; a test set is read once, after the last step.
- The first rank builds what the index cache lacks; the others then find it. On a node that does not see the first rank's
  folder, whoever comes first builds it there and the others wait for it. Every rank reads its samples itself.
"""

from __future__ import annotations

from typing import NamedTuple

from megalite import comm
from megalite.batch_sizes import BatchSizes
from megalite.config import RunConfig
from megalite.data.corpora import Corpora, Split, known_vocab_size
from megalite.data.mock import MockDataset
from megalite.data.sample import SampleDataset
from megalite.grid import Grid
from megalite.log import get_logger
from megalite.training.state import TrainState

__all__ = ["RunDatasets", "build_datasets", "resolve_vocab_size", "training_samples"]

_VALID_SEED_OFFSET = 1  # mock validation samples are not training samples


class RunDatasets(NamedTuple):
    """The samples of a run; `valid` is None without `eval_interval`, `test` without `test_data_path`."""

    train: SampleDataset
    valid: SampleDataset | None = None
    test: SampleDataset | None = None


def resolve_vocab_size(config: RunConfig) -> RunConfig:
    """The run with its vocabulary known. Raises ConfigError or DataError."""
    return config.resolve(None if config.data.mock_data else known_vocab_size(config))


def training_samples(sizes: BatchSizes, start: TrainState, train_iters: int) -> int:
    """Samples up to the end of the last step of a run that goes on from `start`."""
    consumed = start.consumed_samples
    for step in range(start.step, train_iters):
        size = sizes.at(consumed)
        if size == sizes.full:  # it stays so
            return consumed + (train_iters - step) * size
        consumed += size
    return consumed


def build_datasets(config: RunConfig, sizes: BatchSizes, grid: Grid, start: TrainState) -> RunDatasets:
    """Training and validation samples of a run that goes on from `start`. Collective over the world. Raises ConfigError or DataError."""
    num_samples = config.num_samples(sizes.full)
    num_samples["train"] = training_samples(sizes, start, config.train.train_iters)
    if config.data.mock_data:
        vocab_size, length, seed = config.model.known_vocab_size, config.data.seq_length, config.train.seed
        train = MockDataset(vocab_size, length, num_samples["train"], seed)
        if "valid" not in num_samples:
            return RunDatasets(train)
        return RunDatasets(train, MockDataset(vocab_size, length, num_samples["valid"], seed + _VALID_SEED_OFFSET))
    if not grid.world.is_first:
        comm.barrier(grid.world)
    corpora = Corpora(config)
    splits = [corpora.split(name, count) for name, count in num_samples.items()]
    if grid.world.is_first:
        _describe(splits, config)
        comm.barrier(grid.world)
    return RunDatasets(**{split.name: split.dataset for split in splits})


def _describe(splits: list[Split], config: RunConfig) -> None:
    lines = [line for split in splits for line in split.lines()]
    get_logger().info("\n".join([f"data for {config.train.train_iters:,} steps, {config.data.shuffle} order", *lines]))
