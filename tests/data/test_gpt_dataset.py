"""Samples and their order: Megatron's arrays and items, masks by position, and clear words where there is no data."""

from __future__ import annotations

import doctest
import itertools
import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import megalite.data.gpt_dataset as module
from megalite.data.gpt_dataset import GPTDataset
from megalite.data.gpt_index import IndexSpec, build_gpt_indices, plan_epochs
from megalite.data.indexed import IndexedDataset
from megalite.data.splits import SPLIT_NAMES, split_ranges
from megalite.errors import ConfigError, DataError

GOLDEN = Path(__file__).parents[1] / "golden"
INDEX_CASES = json.loads((GOLDEN / "gpt_index.json").read_text())["cases"]
MASKS = json.loads((GOLDEN / "masks.json").read_text())
MASK_ARRAYS = np.load(GOLDEN / "masks.npz")
PIPELINE = json.loads((GOLDEN / "pipeline" / "pipeline.json").read_text())["cases"]
FIELDS = ("tokens", "labels", "loss_mask", "position_ids")


class Corpus:
    """An indexed dataset in memory."""

    path_prefix = "corpus"

    def __init__(self, sequences: list[list[int]], dtype: str = "int32") -> None:
        self._sequences = [np.array(ids, dtype=dtype) for ids in sequences]
        self.sizes = np.array([len(ids) for ids in sequences], dtype=np.int32)
        self.dtype = np.dtype(dtype)

    def __len__(self) -> int:
        return len(self._sequences)

    def get(self, i: int, offset: int = 0, length: int | None = None) -> np.ndarray:
        part = self._sequences[i][offset:] if length is None else self._sequences[i][offset : offset + length]
        assert length is None or len(part) == length, (i, offset, length)
        return part


def dataset(sequences: list[list[int]], seq_length: int, **options: Any) -> GPTDataset:
    settings = {"num_samples": None, "sequence_range": (0, len(sequences)), "seed": 1234, "split_name": "train"}
    return GPTDataset(Corpus(sequences), seq_length=seq_length, **(settings | options))


def drops_partial(case: dict[str, Any]) -> bool:
    """Megatron keeps a partial sample in validation sets only."""
    return case["split"] != "valid" or case["drop_last_partial_validation_sequence"]


def as_spec(case: dict[str, Any]) -> IndexSpec:
    indices = case["indices"]
    assert indices == list(range(indices[0], indices[-1] + 1))
    return IndexSpec(
        seq_length=case["sequence_length"],
        num_samples=case["num_samples"],
        sequence_range=(indices[0], indices[-1] + 1),
        seed=case["random_seed"],
        add_extra_token=case["add_extra_token"],
        drop_last_partial=drops_partial(case),
    )


def test_all_index_arrays_equal_megatron() -> None:
    arrays = np.load(GOLDEN / "gpt_index.npz")
    assert len(INDEX_CASES) == 182
    for case in INDEX_CASES:
        spec = as_spec(case)
        sizes = np.array(case["lengths"], dtype=np.int32)
        plan = plan_epochs(case["tokens_per_epoch"], spec)
        assert (plan.num_epochs, plan.num_samples) == (case["num_epochs"], case["len"]), case["key"]
        assert (plan.num_samples_before_last is not None) == bool(case["separate_final_epoch"]), case["key"]
        for name, found in build_gpt_indices(sizes, spec)._asdict().items():
            expected = arrays[f"{case['key']}_{name}"]
            assert found.dtype == expected.dtype, (case["key"], name)
            np.testing.assert_array_equal(found, expected, err_msg=f"{case['key']} {name}")


@pytest.mark.parametrize("case", PIPELINE, ids=lambda case: case["key"])
def test_real_files_give_the_arrays_of_megatron(case: dict[str, Any]) -> None:
    arrays = np.load(GOLDEN / "pipeline" / "pipeline.npz")
    num_compared = 0
    for split in SPLIT_NAMES:
        for number, part in enumerate((case["splits"][split] or {"mid": []})["mid"]):
            indexed = IndexedDataset(GOLDEN / "pipeline" / part["path"])
            low, high = part["indices"]
            if case["split"] is not None:
                assert split_ranges(case["split"], len(indexed))[split] == (low, high)
            data = GPTDataset(
                indexed,
                seq_length=case["sequence_length"],
                num_samples=part["num_samples"],
                sequence_range=(low, high),
                seed=case["random_seed"],
                split_name=split,
            )
            assert len(data) == part["len"]
            for name, found in data.indices._asdict().items():
                key = f"{case['key']}_{split}_mid{number}_{name}"
                np.testing.assert_array_equal(found, arrays[key], err_msg=key)
            num_compared += 1
    assert num_compared


@pytest.mark.parametrize(
    "case", [case for case in PIPELINE if case["key"] in ("single", "single_none_valid")], ids=lambda case: case["key"]
)
def test_real_files_give_the_samples_of_megatron(case: dict[str, Any]) -> None:
    arrays = np.load(GOLDEN / "pipeline" / "pipeline.npz")
    for split in SPLIT_NAMES:
        (part,) = case["splits"][split]["mid"]
        data = GPTDataset(
            IndexedDataset(GOLDEN / "pipeline" / part["path"]),
            seq_length=case["sequence_length"],
            num_samples=part["num_samples"],
            sequence_range=tuple(part["indices"]),
            seed=case["random_seed"],
            split_name=split,
        )
        for i, expected in enumerate(arrays[f"{case['key']}_{split}_first_samples"]):
            np.testing.assert_array_equal(data[i].tokens, expected[:-1])
            np.testing.assert_array_equal(data[i].labels, expected[1:])


def masks_dataset(case: dict[str, Any]) -> GPTDataset:
    return dataset(
        MASKS["sequences"],
        case["sequence_length"],
        num_samples=case["num_samples"],
        seed=MASKS["random_seed"],
        split_name=case["split"],
        eod_id=case["eod"],
        reset_position_ids=case["reset_position_ids"],
        reset_attention_mask=case["reset_attention_mask"],
        eod_mask_loss=case["eod_mask_loss"],
        add_extra_token=case["add_extra_token"],
        drop_last_partial=drops_partial(case),
    )


@pytest.mark.parametrize("case", [case for case in MASKS["cases"] if case["key"] != "pad_in_data"], ids=lambda case: case["key"])
def test_items_equal_megatron(case: dict[str, Any]) -> None:
    """Tokens, labels, loss mask, positions; and the attention mask that the document numbers stand for (requirement 33)."""
    data = masks_dataset(case)
    assert len(data) == case["len"]
    for i in range(len(data)):
        for name in FIELDS:
            expected = MASK_ARRAYS[f"{case['key']}_{name}"][i]
            found = getattr(data[i], name)
            assert found.dtype == expected.dtype
            np.testing.assert_array_equal(found, expected, err_msg=f"sample {i} {name}")
        ids, later = data[i].document_ids, np.triu(np.ones((case["sequence_length"],) * 2, dtype=bool), 1)
        assert (ids is not None) == case["reset_attention_mask"]
        hidden = later if ids is None else later | (ids[:, None] != ids[None, :])
        np.testing.assert_array_equal(hidden[None], MASK_ARRAYS[f"{case['key']}_attention_mask"][i], err_msg=f"sample {i}")


def test_an_id_is_never_masked_for_its_value() -> None:
    """Requirement 33, the one case that differs on purpose: Megatron turns a pad id inside the data into 0 and masks it, we read it."""
    case = next(case for case in MASKS["cases"] if case["key"] == "pad_in_data")
    data, pad, num_different = masks_dataset(case), case["pad"], 0
    for i in range(len(data)):
        sample = data[i]
        for name in ("tokens", "labels"):
            rewritten = np.where(getattr(sample, name) == pad, 0, getattr(sample, name))
            np.testing.assert_array_equal(rewritten, MASK_ARRAYS[f"pad_in_data_{name}"][i])
            num_different += int((getattr(sample, name) == pad).sum())
        assert sample.loss_mask.all()
    assert num_different >= 2


@settings(max_examples=150, deadline=None)
@given(
    lengths=st.lists(st.integers(0, 9), min_size=1, max_size=8).filter(lambda lengths: sum(lengths) > 1),
    seq_length=st.integers(1, 6),
    num_samples=st.integers(1, 30),
    extra=st.booleans(),
    drop=st.booleans(),
)
def test_the_stream_is_cut_without_gap_or_overlap(lengths: list[int], seq_length: int, num_samples: int, extra: bool, drop: bool) -> None:
    """Requirement 30: sample n of the stream is tokens n*L .. n*L + L, its label the token after; only the end is padded."""
    starts = np.cumsum([0, *lengths])
    sequences = [list(range(1 + a, 1 + b)) for a, b in itertools.pairwise(starts)]
    data = dataset(sequences, seq_length, num_samples=num_samples, add_extra_token=extra, drop_last_partial=drop)
    stream = [token for document in data.indices.document_index for token in sequences[document]]
    assert len(data) >= num_samples
    assert sorted(data.indices.shuffle_index) == list(range(len(data)))
    for i, n in enumerate(data.indices.shuffle_index.tolist()):
        read = stream[n * seq_length : (n + 1) * seq_length + extra]
        sample = data[i]
        padding = [0] * (seq_length - len(read[:seq_length]))
        assert sample.tokens.tolist() == read[:seq_length] + padding
        num_labels = len(read) - 1
        assert sample.labels.tolist() == read[1:] + [0] * (seq_length - num_labels)
        assert sample.loss_mask.tolist() == [1.0] * num_labels + [0.0] * (seq_length - num_labels)
        if n < len(data) - 1 and extra:
            assert num_labels == seq_length


def test_the_separate_last_epoch_can_be_chosen() -> None:
    """Requirement 31: the 80 percent rule is the default, and only that."""
    sequences = [[i] * 3 for i in range(10)]
    options = {"num_samples": 16, "seed": 5}  # 30 tokens an epoch, 14 samples of 2 a pass: the second pass is cut short
    rule, forced, never = (dataset(sequences, 2, separate_last_epoch=choice, **options).indices for choice in (None, True, False))
    for one, other in zip(rule, forced, strict=True):
        np.testing.assert_array_equal(one, other)
    first_pass = sorted(rule.document_index[:10].tolist())
    assert first_pass == list(range(10))
    assert sorted(never.document_index[:10].tolist()) != first_pass
    assert sorted(rule.shuffle_index[:14].tolist()) == list(range(14))
    assert sorted(never.shuffle_index[:14].tolist()) != list(range(14))


def test_samples_do_not_depend_on_what_was_read_or_changed_before() -> None:
    """Requirement 32."""
    masks = dict(eod_mask_loss=True, reset_position_ids=True, reset_attention_mask=True)
    data = dataset([[1, 2, 0], [3, 4, 5, 6, 7, 0]], 3, eod_id=0, **masks)
    fields = (*FIELDS, "document_ids")
    first = {name: getattr(data[0], name).copy() for name in fields}
    for name in fields:
        getattr(data[0], name)[:] = 99
        getattr(data[1], name)[:] = 99
    for name in fields:
        np.testing.assert_array_equal(getattr(data[0], name), first[name])


def test_a_corpus_shorter_than_one_sample_is_repeated_or_refused() -> None:
    data = dataset([[1, 2, 3]], 7, num_samples=4)
    assert len(data) >= 4
    assert data[0].tokens.tolist()[:3] in ([1, 2, 3], [2, 3, 1], [3, 1, 2])
    assert data[3].loss_mask.all()
    with pytest.raises(DataError, match=r"train split of corpus: .* hold 3 tokens, .* sequence length 7 needs 8"):
        dataset([[1, 2, 3]], 7)
    for sequences in ([[]], [[], []]):
        with pytest.raises(DataError, match="hold 0 tokens"):
            dataset(sequences, 7, num_samples=4)


def test_an_empty_split_is_refused_with_the_number_of_sequences() -> None:
    with pytest.raises(DataError, match="valid split of corpus: none of its 2 sequences"):
        dataset([[1, 2], [3, 4]], 1, sequence_range=(2, 2), split_name="valid")
    for bad in ((0, 3), (-1, 2), (2, 1)):
        with pytest.raises(DataError, match="it has 2"):
            dataset([[1, 2], [3, 4]], 1, sequence_range=bad)


def test_settings_that_make_no_sense_are_all_named() -> None:
    with pytest.raises(ConfigError) as caught:
        dataset([[1, 2, 3]], 0, num_samples=-1, seed=-5, eod_mask_loss=True)
    assert len(caught.value.violations) == 4
    for word in ("length is 0", "-1 samples", "seed is -5", "end-of-document id"):
        assert word in str(caught.value)


def test_numbers_that_are_no_ids_are_refused() -> None:
    with pytest.raises(DataError, match="float32"):
        GPTDataset(
            Corpus([[1, 2, 3]], "float32"),
            seq_length=1,
            num_samples=None,
            sequence_range=(0, 1),
            seed=0,
            split_name="train",
        )


def test_samples_beyond_the_end_are_refused() -> None:
    data = dataset([[1, 2, 3]], 1)
    assert len(list(iter(data))) == 2
    for i in (-1, 2):
        with pytest.raises(IndexError, match="which has 2"):
            data[i]


def test_fake_sizes_beyond_two_to_the_31_tokens() -> None:
    """Requirement 20. Index arrays need no data: five sequences of 2^30 tokens, read twice."""
    seq_length = 2**20 + 7
    spec = IndexSpec(seq_length, 6000, (0, 5), seed=3)
    indices = build_gpt_indices(np.full(5, 2**30, dtype=np.int32), spec)
    tokens = indices.sample_index[:, 0].astype(np.int64) * 2**30 + indices.sample_index[:, 1]
    np.testing.assert_array_equal(tokens, np.arange(len(tokens)) * seq_length)
    assert len(indices.document_index) == 10
    assert len(indices.shuffle_index) == (10 * 2**30 - 1) // seq_length


def test_the_example_in_the_documentation() -> None:
    result = doctest.testmod(module)
    assert result.attempted >= 9
    assert result.failed == 0
