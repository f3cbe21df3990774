"""The run's datasets: files or pseudo-random tokens, split into training and validation samples.

Decisions
- The vocabulary comes from, in this order: `vocab_size`, the tokenizer, the dataset's side file; the data's largest id must fit.
- Training asks for all samples of the run up front, so that too little data is known at start-up.
- Validation reads the same `eval_iters` global batches every time.
- Each node's first rank builds the index cache, the others then find it; every rank reads its samples itself.
"""

from __future__ import annotations

from pathlib import Path

from megalite import comm
from megalite.config import RunConfig
from megalite.data.dataset_meta import DatasetMeta, read_meta
from megalite.data.gpt_dataset import GPTDataset
from megalite.data.indexed import IndexedDataset
from megalite.data.mock import MockDataset
from megalite.data.sample import SampleDataset
from megalite.data.splits import split_ranges
from megalite.data.tokenizer import build_tokenizer
from megalite.errors import ConfigError, DataError
from megalite.grid import Grid
from megalite.log import get_logger

__all__ = ["build_datasets", "resolve_vocab_size"]

_VALID_SEED_OFFSET = 1  # mock validation samples are not training samples


def resolve_vocab_size(config: RunConfig) -> RunConfig:
    """The run with its vocabulary known. Raises ConfigError or DataError."""
    data = config.data
    if data.mock_data:
        return config.resolve()
    if data.tokenizer_type is not None:
        return config.resolve(build_tokenizer(data.tokenizer_type, data.tokenizer_model).vocab_size)
    meta = read_meta(_prefix(config)) if data.data_path else None
    return config.resolve(None if meta is None else meta.vocab_size)


def build_datasets(config: RunConfig, global_batch_size: int, grid: Grid) -> tuple[SampleDataset, SampleDataset | None]:
    """Training and validation samples; validation is None without `eval_interval`. Collective over the world."""
    num_train = config.train.train_iters * global_batch_size
    num_valid = config.train.eval_iters * global_batch_size if config.train.eval_interval is not None else 0
    if config.data.mock_data:
        vocab_size, length, seed = config.model.known_vocab_size, config.data.seq_length, config.train.seed
        train = MockDataset(vocab_size, length, num_train, seed)
        return train, MockDataset(vocab_size, length, num_valid, seed + _VALID_SEED_OFFSET) if num_valid else None
    # All but the first rank wait, then read what it built. With node-local disks every rank builds for itself what it does not find.
    if grid.world.is_first:
        built = _file_datasets(config, num_train, num_valid)
        comm.barrier(grid.world)
        _describe(built, config)
        return built
    comm.barrier(grid.world)
    return _file_datasets(config, num_train, num_valid)


def _prefix(config: RunConfig) -> str:
    if len(config.data.data_path) != 1:
        raise ConfigError(
            f"data_path names {len(config.data.data_path)} datasets ({' '.join(config.data.data_path)}), "
            "but training reads one; preprocess the texts into one dataset (tools/preprocess_data.py takes several inputs)"
        )
    return config.data.data_path[0]


def _file_datasets(config: RunConfig, num_train: int, num_valid: int) -> tuple[GPTDataset, GPTDataset | None]:
    prefix = _prefix(config)
    indexed, meta = IndexedDataset(prefix), read_meta(prefix)
    _check_vocabulary(config, prefix, meta)
    ranges = split_ranges(config.data.split, len(indexed))
    cache = Path(config.data.data_cache_path) if config.data.data_cache_path else Path(f"{prefix}_index_cache")

    def build(split: str, num_samples: int) -> GPTDataset:
        sequences = ranges[split]  # type: ignore[index]
        if sequences is None or sequences[0] == sequences[1]:
            raise DataError(
                f"the {split} split of {prefix} is empty: split {config.data.split} of {len(indexed)} documents; give it a larger share, "
                "use data with more documents, or leave out --eval-interval"
            )
        return GPTDataset(
            indexed,
            seq_length=config.data.seq_length,
            num_samples=num_samples,
            sequence_range=sequences,
            seed=config.train.seed,
            split_name=split,
            cache_dir=cache,
            eod_id=None if meta is None else meta.eod_id,
            reset_position_ids=config.data.reset_position_ids,
            eod_mask_loss=config.data.eod_mask_loss,
        )

    return build("train", num_train), build("valid", num_valid) if num_valid else None


def _check_vocabulary(config: RunConfig, prefix: str, meta: DatasetMeta | None) -> None:
    """The largest id of the data must be a row of the embedding; files without a side file are trusted until an id is looked up."""
    vocab_size = config.model.known_vocab_size
    if meta is not None and meta.max_id >= vocab_size:
        raise DataError(
            f"{prefix} holds token {meta.max_id} (tokenizer {meta.tokenizer}, {meta.vocab_size} ids), but the model's vocab_size is "
            f"{vocab_size}: use the tokenizer that the data was made with, or --vocab-size {meta.vocab_size}"
        )


def _describe(built: tuple[GPTDataset, GPTDataset | None], config: RunConfig) -> None:
    train, valid = built
    parts = [f"{len(train):,} training samples ({_epochs(train)})"]
    if valid is not None:
        parts.append(f"{len(valid):,} validation samples ({_epochs(valid)})")
    get_logger().info(f"data: {' and '.join(parts)} of {config.data.seq_length} tokens for {config.train.train_iters:,} steps")


def _epochs(dataset: GPTDataset) -> str:
    documents = dataset.indices.document_index
    epochs = len(documents) // max(1, len(set(documents.tolist()))) if len(documents) < 1_000_000 else None
    return "many documents" if epochs is None else f"{epochs} epoch{'s' if epochs != 1 else ''}"
