"""The run's datasets on all ranks: files (`data/corpora.py`), conversations (`data/sft_dataset.py`) or pseudo-random tokens.

Decisions
- The vocabulary comes from, in this order: `vocab_size`, the tokenizer, the datasets' side files; the data's largest id must fit.
- Training asks for all samples of the run up front, so that too little data is known at start-up. A resumed run asks for what was
  consumed and for the steps that are left: the same number, unless the batch size has changed in between.
- Validation reads the same `eval_iters` global batches every time; a test set is read once, after the last step.
- The first rank builds what the index cache lacks; the others then find it. On a node that does not see the first rank's
  folder, whoever comes first builds it there and the others wait for it. Every rank reads its samples itself.
"""

from __future__ import annotations

from typing import Any, NamedTuple

from megalite import comm
from megalite.batch_sizes import BatchSizes
from megalite.config import RunConfig
from megalite.config_data import SplitName
from megalite.data.chat_encoding import ChatEncoder
from megalite.data.corpora import Corpora, Split, known_vocab_size
from megalite.data.mock import MockDataset
from megalite.data.preferences import PreferenceDataset, encode_preferences, read_preferences
from megalite.data.sample import SampleDataset
from megalite.data.sft_dataset import read_sft_dataset
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
    if config.data.sft_data_path is not None:
        return _conversations(config, num_samples, grid)
    if config.data.dpo_data_path is not None:
        return _preferences(config, num_samples, grid)
    if not grid.world.is_first:
        comm.barrier(grid.world)
    corpora = Corpora(config)
    splits = [corpora.split(name, count) for name, count in num_samples.items()]
    if grid.world.is_first:
        _describe(splits, config)
        comm.barrier(grid.world)
    return RunDatasets(**{split.name: split.dataset for split in splits})


def _conversations(config: RunConfig, num_samples: dict[SplitName, int], grid: Grid) -> RunDatasets:
    """Every rank encodes all conversations itself."""
    data = config.data
    assert data.sft_data_path is not None and data.tokenizer_type is not None  # validated
    encoder = ChatEncoder(data.tokenizer_type, data.tokenizer_model, data.chat_template)
    options: dict[str, Any] = dict(seq_length=data.seq_length, seed=config.train.seed, too_long=data.sft_too_long)
    train = read_sft_dataset(data.sft_data_path, encoder, num_samples=num_samples["train"], **options)
    valid = None
    if data.sft_valid_path is not None and "valid" in num_samples:
        valid = read_sft_dataset(data.sft_valid_path, encoder, num_samples=num_samples["valid"], **options)
    if grid.world.is_first:
        rows = [f"conversations for {config.train.train_iters:,} steps, chat template {encoder.template.name}", *train.lines("train")]
        get_logger().info("\n".join(rows + ([] if valid is None else valid.lines("valid"))))
    return RunDatasets(train, valid)


def _preferences(config: RunConfig, num_samples: dict[SplitName, int], grid: Grid) -> RunDatasets:
    """As `_conversations`."""
    data, seed = config.data, config.train.seed
    assert data.dpo_data_path is not None and data.tokenizer_type is not None  # validated
    encoder = ChatEncoder(data.tokenizer_type, data.tokenizer_model, data.chat_template)

    def read(path: str, samples: int) -> PreferenceDataset:
        pairs, left_out = encode_preferences(read_preferences(path), encoder, data.seq_length, data.sft_too_long)
        return PreferenceDataset(pairs, seq_length=data.seq_length, num_samples=samples, seed=seed, left_out=left_out)

    train = read(data.dpo_data_path, num_samples["train"])
    valid = None if data.dpo_valid_path is None or "valid" not in num_samples else read(data.dpo_valid_path, num_samples["valid"])
    if grid.world.is_first:
        rows = [f"preferences for {config.train.train_iters:,} steps, chat template {encoder.template.name}", *train.lines("train")]
        get_logger().info("\n".join(rows + ([] if valid is None else valid.lines("valid"))))
    return RunDatasets(train, valid)


def _describe(splits: list[Split], config: RunConfig) -> None:
    lines = [line for split in splits for line in split.lines()]
    get_logger().info("\n".join([f"data for {config.train.train_iters:,} steps, {config.data.shuffle} order", *lines]))
