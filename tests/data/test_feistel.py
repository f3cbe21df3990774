"""The computed order: permutations, every sample once per epoch, no token twice, nothing that grows with epochs."""

from __future__ import annotations

import pickle
from collections import Counter
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from megalite.data.feistel import FeistelDataset, FeistelPermutation
from megalite.data.sample import SampleFormat
from megalite.errors import ConfigError, DataError
from tests.data.test_gpt_dataset import Corpus


def dataset(
    sequences: list[list[int]], seq_length: int, *, num_samples: int | None = None, seed: int = 1, **options: Any
) -> FeistelDataset:
    place = {"num_samples": num_samples, "sequence_range": (0, len(sequences)), "seed": seed, "split_name": "train"} | options
    return FeistelDataset(Corpus(sequences), SampleFormat(seq_length=seq_length), **place)


@settings(max_examples=80, deadline=None)
@given(st.integers(1, 150), st.integers(0, 2**64 - 1))
def test_a_permutation_of_any_size(size: int, key: int) -> None:
    order = FeistelPermutation(size, key)
    assert sorted(map(order, range(size))) == list(range(size))


def test_permutations_differ_and_look_random() -> None:
    """Over 500 keys, where 0 goes and whether 0 stays before 1 are as even as chance makes them (4 standard deviations)."""
    orders = [FeistelPermutation(10, key) for key in range(500)]
    places = Counter(order(0) for order in orders)
    assert all(abs(places[place] - 50) < 4 * (500 * 0.1 * 0.9) ** 0.5 for place in range(10))
    assert abs(sum(order(0) < order(1) for order in orders) - 250) < 4 * (500 * 0.25) ** 0.5
    big = FeistelPermutation(2**40 + 1, 3)
    assert len({big(i) for i in range(1000)}) == 1000


@settings(max_examples=60, deadline=None)
@given(
    lengths=st.lists(st.integers(0, 9), min_size=1, max_size=9),
    seq_length=st.integers(1, 6),
    seed=st.integers(0, 2**32 - 1),
    num_epochs=st.integers(1, 3),
)
def test_each_epoch_reads_each_sample_once(lengths: list[int], seq_length: int, seed: int, num_epochs: int) -> None:
    """Samples are consecutive tokens of the file; of an epoch, none overlap but for the shared label."""
    tokens = iter(range(1, sum(lengths) + 1))
    sequences = [[next(tokens) for _ in range(length)] for length in lengths]
    if sum(lengths) <= seq_length:
        with pytest.raises(DataError, match=f"one sample of sequence length {seq_length} needs {seq_length + 1}"):
            dataset(sequences, seq_length, seed=seed)
        return
    per_epoch = (sum(lengths) - 1) // seq_length
    data = dataset(sequences, seq_length, seed=seed, num_samples=num_epochs * per_epoch)
    assert data.samples_per_epoch == per_epoch
    for epoch in range(num_epochs):
        seen = []
        for i in range(epoch * per_epoch, (epoch + 1) * per_epoch):
            sample = data[i]
            first = int(sample.tokens[0])
            assert sample.tokens.tolist() == list(range(first, first + seq_length))
            assert sample.labels.tolist() == list(range(first + 1, first + seq_length + 1))
            assert sample.loss_mask.all()
            seen += sample.tokens.tolist()
        assert sorted(seen) == list(range(min(seen), min(seen) + per_epoch * seq_length))


def test_epochs_and_seeds_have_their_own_order_and_any_access_gives_the_same() -> None:
    sequences = [list(range(50 * n, 50 * n + 50)) for n in range(4)]
    data = dataset(sequences, 3, num_samples=132)
    firsts = [int(data[i].tokens[0]) for i in range(132)]
    assert firsts[:66] != firsts[66:]
    assert firsts[:66] != [int(dataset(sequences, 3, seed=2)[i].tokens[0]) for i in range(66)]
    assert [int(data[i].tokens[0]) for i in reversed(range(132))] == firsts[::-1]
    for i in (-1, 132):
        with pytest.raises(IndexError, match="which has 132"):
            data[i]


def test_a_part_of_the_sequences_and_its_masks() -> None:
    data = FeistelDataset(
        Corpus([[9, 9], [1, 2, 0], [3, 0], [9]]),
        SampleFormat(seq_length=4, eod_id=0, reset_position_ids=True, eod_mask_loss=True),
        num_samples=5,
        sequence_range=(1, 3),
        seed=7,
        split_name="valid",
    )
    for i in range(5):
        assert data[i].tokens.tolist() == [1, 2, 0, 3]
        assert data[i].loss_mask.tolist() == [1, 1, 0, 1]
        assert data[i].position_ids.tolist() == [0, 1, 2, 0]


def test_nothing_grows_with_the_number_of_samples() -> None:
    sequences = [[1, 2, 3, 0]] * 20
    small, large = (len(pickle.dumps(vars(dataset(sequences, 3, num_samples=count)))) for count in (10, 10**15))
    assert large - small < 32
    assert dataset(sequences, 3, num_samples=10**15)[10**15 - 1].tokens.shape == (3,)


def test_documents_beyond_two_to_the_31_tokens() -> None:
    """Requirement 20: positions are int64; three sequences of 2^31 - 1 tokens, no data."""

    class Huge:
        path_prefix, dtype, sizes = "huge", np.dtype("u2"), np.full(3, 2**31 - 1, dtype=np.int32)

        def __len__(self) -> int:
            return 3

        def get(self, i: int, offset: int = 0, length: int | None = None) -> np.ndarray:
            assert length is not None and offset >= 0 and offset + length <= self.sizes[i]
            return np.full(length, i + 1)

    place = {"num_samples": None, "sequence_range": (0, 3), "seed": 1, "split_name": "train"}
    data = FeistelDataset(Huge(), SampleFormat(seq_length=1000), **place)
    assert len(data) == (3 * (2**31 - 1) - 1) // 1000
    documents = Counter(int(data[i].tokens[0]) for i in range(60))
    assert set(documents) == {1, 2, 3}


def test_bad_settings_and_empty_data_are_refused() -> None:
    with pytest.raises(ConfigError, match="end-of-document id"):
        FeistelDataset(
            Corpus([[1, 2]]),
            SampleFormat(seq_length=1, reset_attention_mask=True),
            num_samples=None,
            sequence_range=(0, 1),
            seed=1,
            split_name="train",
        )
    with pytest.raises(DataError, match="none of its 1 sequences"):
        dataset([[1, 2]], 1, sequence_range=(1, 1))
