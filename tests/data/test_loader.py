"""Batches: the same micro-batches in every layout, the right end, errors from the reading thread, and mock data."""

from __future__ import annotations

import itertools
import threading

import numpy as np
import pytest
import torch

from megalite.batch_sizes import BatchSizes
from megalite.data.loader import GlobalBatchLoader
from megalite.data.mock import MockDataset
from megalite.data.sample import Sample
from megalite.errors import ConfigError, DataError

FIELDS = ("tokens", "labels", "loss_mask", "position_ids")


class Numbers:
    """Sample i is full of i; reading `broken` fails."""

    def __init__(self, num_samples: int, broken: int = -1) -> None:
        self.num_samples, self.broken = num_samples, broken
        self.readers: set[str] = set()

    def __len__(self) -> int:
        return self.num_samples

    def __getitem__(self, i: int) -> Sample:
        assert 0 <= i < self.num_samples
        self.readers.add(threading.current_thread().name.split("_")[0])
        if i == self.broken:
            raise DataError(f"sample {i} is broken")
        values = np.full(5, i, dtype=np.int64)
        return Sample(values, values + 1000, np.ones(5, dtype=np.float32), np.arange(5, dtype=np.int64))


@pytest.mark.parametrize("num_workers", [0, 1, 3])
@pytest.mark.parametrize("dp_size", [1, 2, 3])
def test_every_layout_reads_the_same_micro_batches(dp_size: int, num_workers: int) -> None:
    data = MockDataset(vocab_size=31, seq_length=7, num_samples=40, seed=3, masked_fraction=0.4)
    for micro_batch_size in (1, 2):
        sizes = {
            "micro_batch_size": micro_batch_size,
            "global_batch_size": 12,
            "consumed_samples": 4,
            "num_workers": num_workers,
        }
        loaders = [GlobalBatchLoader(data, dp_rank=rank, dp_size=dp_size, **sizes) for rank in range(dp_size)]
        for step in range(3):
            found = {batch.index: batch for loader in loaders for batch in loader.next_step()}
            assert sorted(found) == list(range(12 // micro_batch_size))
            for k, batch in found.items():
                first = 4 + 12 * step + k * micro_batch_size
                assert batch.first_sample == first
                for name in FIELDS:
                    expected = np.stack([getattr(data[first + b], name) for b in range(micro_batch_size)])
                    np.testing.assert_array_equal(getattr(batch, name).numpy(), expected)
        for loader in loaders:
            assert loader.consumed_samples == 40
            loader.close()


def test_shapes_and_types() -> None:
    with GlobalBatchLoader(Numbers(6), micro_batch_size=3, global_batch_size=6) as loader:
        batches = loader.next_step()
    assert [batch.index for batch in batches] == [0, 1]
    for batch in batches:
        assert all(getattr(batch, name).shape == (3, 5) for name in FIELDS)
        assert [getattr(batch, name).dtype for name in FIELDS] == [torch.int64] * 2 + [torch.float32, torch.int64]
    assert batches[1].labels[:, 0].tolist() == [1003, 1004, 1005]


def test_resuming_continues_where_the_run_stopped_even_with_other_sizes() -> None:
    data = Numbers(24)
    whole = GlobalBatchLoader(data, micro_batch_size=2, global_batch_size=8, num_workers=0)
    steps = [[batch.tokens[:, 0].tolist() for batch in whole.next_step()] for _ in range(3)]
    resumed = GlobalBatchLoader(data, micro_batch_size=2, global_batch_size=8, consumed_samples=8)
    assert [[batch.tokens[:, 0].tolist() for batch in resumed.next_step()] for _ in range(2)] == steps[1:]
    resumed.close()
    parts = [GlobalBatchLoader(data, micro_batch_size=1, global_batch_size=8, dp_rank=r, dp_size=4, consumed_samples=16) for r in range(4)]
    read = {batch.index: int(batch.tokens[0, 0]) for loader in parts for batch in loader.next_step()}
    assert [read[k] for k in range(8)] == [i for samples in steps[2] for i in samples]


@pytest.mark.parametrize("num_workers", [0, 1, 3])
def test_the_end_of_the_data_is_an_error_with_numbers(num_workers: int) -> None:
    loader = GlobalBatchLoader(Numbers(11), micro_batch_size=1, global_batch_size=4, num_workers=num_workers)
    assert loader.num_steps_left == 2
    loader.next_step()
    loader.next_step()
    for _ in range(2):
        with pytest.raises(DataError, match="needs samples 8 to 12, but the dataset has 11"):
            loader.next_step()
    assert (loader.consumed_samples, loader.num_steps_left) == (8, 0)
    loader.close()


@pytest.mark.parametrize("num_workers", [0, 1, 3])
def test_an_error_while_reading_reaches_the_step_that_needs_the_sample(num_workers: int) -> None:
    loader = GlobalBatchLoader(Numbers(12, broken=6), micro_batch_size=1, global_batch_size=4, num_workers=num_workers)
    assert len(loader.next_step()) == 4
    for _ in range(2):
        with pytest.raises(DataError, match="sample 6 is broken"):
            loader.next_step()
    assert loader.consumed_samples == 4
    loader.close()


def test_reading_ahead_happens_in_a_thread_that_ends() -> None:
    before, data = threading.active_count(), Numbers(12)
    with GlobalBatchLoader(data, micro_batch_size=1, global_batch_size=4, num_workers=2) as loader:
        loader.next_step()
        loader.next_step()
        assert "megalite-data" in data.readers
        assert threading.active_count() <= before + 2
    assert threading.active_count() == before
    assert [batch.first_sample for batch in loader.next_step()] == [8, 9, 10, 11]


def test_a_changed_position_is_obeyed_although_another_step_was_read_ahead() -> None:
    with GlobalBatchLoader(Numbers(24), micro_batch_size=2, global_batch_size=4) as loader:
        loader.next_step()
        loader.consumed_samples = 12
        assert [batch.first_sample for batch in loader.next_step()] == [12, 14]
        assert loader.consumed_samples == 16


@pytest.mark.parametrize("num_workers", [0, 2])
def test_a_ramp_changes_how_many_samples_make_a_step_and_not_their_order(num_workers: int) -> None:
    sizes = BatchSizes(12, (4, 4, 20))  # 4 4 4 8 12 12 ...
    loaders = [
        GlobalBatchLoader(Numbers(44), micro_batch_size=2, global_batch_size=sizes, dp_rank=rank, dp_size=2, num_workers=num_workers)
        for rank in range(2)
    ]
    assert loaders[0].num_steps_left == 6
    for start, end in itertools.pairwise([0, 4, 8, 12, 20, 32, 44]):
        resumed = GlobalBatchLoader(Numbers(44), micro_batch_size=4, global_batch_size=sizes, consumed_samples=start, num_workers=0)
        batches = sorted((batch for loader in loaders for batch in loader.next_step()), key=lambda batch: batch.index)
        assert [i for batch in batches for i in batch.tokens[:, 0].tolist()] == list(range(start, end))
        assert [i for batch in resumed.next_step() for i in batch.tokens[:, 0].tolist()] == list(range(start, end))
    assert [loader.num_steps_left for loader in loaders] == [0, 0]
    for loader in loaders:
        loader.close()
    with pytest.raises(ConfigError, match="global batch of 4"):
        GlobalBatchLoader(Numbers(44), micro_batch_size=4, global_batch_size=sizes, dp_size=2)


def test_threads_end_when_the_step_fails() -> None:
    before = threading.active_count()

    def train() -> None:
        with GlobalBatchLoader(Numbers(400, broken=9), micro_batch_size=1, global_batch_size=8, num_workers=4) as loader:
            while True:
                loader.next_step()

    with pytest.raises(DataError, match="sample 9 is broken"):
        train()
    assert threading.active_count() == before


@pytest.mark.skipif(not torch.cuda.is_available(), reason="page-locked memory needs CUDA")
def test_tensors_for_a_gpu_are_page_locked() -> None:
    with GlobalBatchLoader(Numbers(8), micro_batch_size=2, global_batch_size=4, pin_memory=True) as loader:
        for batch in (*loader.next_step(), *loader.next_step()):
            assert all(getattr(batch, name).is_pinned() for name in FIELDS)
            assert torch.equal(batch.to(torch.device("cuda")).tokens.cpu(), batch.tokens)


def test_sizes_that_do_not_fit_are_refused() -> None:
    with pytest.raises(ConfigError, match="global batch of 6"):
        GlobalBatchLoader(Numbers(12), micro_batch_size=2, global_batch_size=6, dp_size=2)
    with pytest.raises(ConfigError, match="no data-parallel rank 2 of 2"):
        GlobalBatchLoader(Numbers(12), micro_batch_size=1, global_batch_size=6, dp_rank=2, dp_size=2)


def test_mock_samples_depend_on_seed_and_number_only() -> None:
    data, again = (MockDataset(vocab_size=13, seq_length=9, num_samples=n, seed=4) for n in (5, 50))
    other = MockDataset(vocab_size=13, seq_length=9, num_samples=5, seed=5)
    for i in reversed(range(5)):
        for name in FIELDS:
            np.testing.assert_array_equal(getattr(data[i], name), getattr(again[i], name))
        np.testing.assert_array_equal(data[i].labels[:-1], data[i].tokens[1:])
        assert data[i].loss_mask.all()
        assert not np.array_equal(data[i].tokens, other[i].tokens)
    assert not np.array_equal(data[0].tokens, data[1].tokens)
    data[0].tokens[:] = 0
    np.testing.assert_array_equal(data[0].tokens, again[0].tokens)
    assert len(list(iter(data))) == 5


def test_mock_tokens_can_be_learned() -> None:
    """One successor per id explains most labels, where chance is 1 in 17."""
    data = MockDataset(vocab_size=17, seq_length=50, num_samples=40, seed=0)
    counts = np.zeros((17, 17))
    for i in range(40):
        np.add.at(counts, (data[i].tokens, data[i].labels), 1)
    share = counts.max(axis=1).sum() / counts.sum()
    assert 0.75 < share < 0.95
    assert (counts.sum(axis=1) > 0).all()


def test_mock_masks_make_unequal_counts() -> None:
    data = MockDataset(vocab_size=17, seq_length=100, num_samples=50, masked_fraction=0.3)
    counts = [float(data[i].loss_mask.sum()) for i in range(50)]
    assert len(set(counts)) > 5
    assert 60 < np.mean(counts) < 80
    assert not MockDataset(5, 4, 1, masked_fraction=1.0)[0].loss_mask.any()


@pytest.mark.parametrize("arguments", [(0, 4, 1, 0), (5, 0, 1, 0), (5, 4, 0, 0), (5, 4, 1, -1)], ids=["vocab", "length", "samples", "seed"])
def test_mock_sizes_are_checked(arguments: tuple[int, int, int, int]) -> None:
    with pytest.raises(DataError, match="mock data"):
        MockDataset(*arguments)
    with pytest.raises(DataError, match="mock data"):
        MockDataset(5, 4, 1, masked_fraction=1.5)


def test_ids_beyond_the_vocabulary_are_refused_with_the_numbers() -> None:
    """Requirement 12: the data's ids must be rows of the embedding."""
    dataset = MockDataset(50, 8, 4)
    GlobalBatchLoader(dataset, micro_batch_size=2, global_batch_size=4, vocab_size=50).next_step()
    highest = max(int(dataset[i].tokens.max()) for i in range(2))
    loader = GlobalBatchLoader(dataset, micro_batch_size=2, global_batch_size=4, vocab_size=highest)
    with pytest.raises(DataError, match=f"samples 0 to 1 hold token ids from .* ids 0 to {highest - 1}"):
        loader.next_step()
