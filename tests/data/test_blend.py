"""Blends: Megatron's arrays and samples from real files, true counts, thousands of datasets, clear words at the start."""

from __future__ import annotations

import itertools
import json
import math
import resource
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from megalite.config import DataConfig, ModelConfig, RunConfig, TrainConfig
from megalite.config_data import parse_source
from megalite.data.blend import BlendedDataset, BlendIndices, blend_weighted, normalized, rounded_shares, sufficient_request
from megalite.data.corpora import Corpora
from megalite.data.dataset_meta import DatasetMeta, write_meta
from megalite.data.gpt_dataset import GPTDataset
from megalite.data.gpt_index import IndexSpec, plan_epochs
from megalite.data.indexed_writer import IndexedDatasetWriter
from megalite.data.mock import MockDataset
from megalite.data.splits import SPLIT_NAMES
from megalite.errors import ConfigError, DataError

GOLDEN = Path(__file__).parents[1] / "golden"
PIPELINE = json.loads((GOLDEN / "pipeline" / "pipeline.json").read_text())["cases"]
RULES = json.loads((GOLDEN / "splits_and_sizes.json").read_text())


def corpora(folder: Path, seed: int = 1234, **data: Any) -> Corpora:
    data = {"seq_length": 16, "data_cache_path": str(folder / "cache")} | data
    return Corpora(RunConfig(model=ModelConfig(vocab_size=1000), data=DataConfig(**data), train=TrainConfig(seed=seed)))


def write(prefix: Path, documents: list[list[int]]) -> str:
    with IndexedDatasetWriter(prefix, "uint16") as writer:
        for document in documents:
            writer.add_document(document)
    return str(prefix)


def write_meta_of(prefix: str, vocab_size: int, eod_id: int, max_id: int = 9) -> None:
    facts = dict(tokenizer="t", vocab_size=vocab_size, eod_id=eod_id, bos_id=None, append_eod=True, prepend_bos=False)
    counts = dict(documents=1, empty_documents=0, sequences=1, tokens=1, max_id=max_id, dtype="uint16")
    write_meta(prefix, DatasetMeta(**facts, **counts))


def in_golden(texts: list[str]) -> tuple[str, ...]:
    return tuple(str(GOLDEN / "pipeline" / text) if text.startswith("d") else text for text in texts)


@pytest.mark.parametrize("case", PIPELINE, ids=lambda case: case["key"])
def test_settings_give_the_samples_of_megatron(case: dict[str, Any], tmp_path: Path) -> None:
    """From a data path to index arrays, lengths and tokens: single, weighted, without weights, per split."""
    arrays = np.load(GOLDEN / "pipeline" / "pipeline.npz")
    if case["blend_per_split"] is None:
        sources = {"data_path": in_golden(case["blend"]), "split": case["split"]}
    else:
        sources = {f"{split}_data_path": in_golden(texts) for split, texts in zip(SPLIT_NAMES, case["blend_per_split"], strict=True)}
    data = corpora(tmp_path, case["random_seed"], seq_length=case["sequence_length"], **sources)
    for split, size in zip(SPLIT_NAMES, case["sizes"], strict=True):
        expected = case["splits"][split]
        if expected is None:
            continue
        dataset = data.split(split, size).dataset
        key = f"{case['key']}_{split}"
        assert len(dataset) == expected["len"], key
        parts = [dataset]
        if expected["class"] == "BlendedDataset":
            assert isinstance(dataset, BlendedDataset)
            for name in ("dataset_index", "dataset_sample_index"):
                assert getattr(dataset.indices, name).dtype == arrays[f"{key}_{name}"].dtype
                np.testing.assert_array_equal(getattr(dataset.indices, name), arrays[f"{key}_{name}"], err_msg=key)
            parts = dataset.datasets
        for number, part in enumerate(parts):
            assert isinstance(part, GPTDataset)
            for name, values in part.indices._asdict().items():
                np.testing.assert_array_equal(values, arrays[f"{key}_mid{number}_{name}"], err_msg=f"{key} {number}")
        for i, tokens in enumerate(arrays[f"{key}_first_samples"]):
            np.testing.assert_array_equal(dataset[i].tokens, tokens[:-1])
            np.testing.assert_array_equal(dataset[i].labels, tokens[1:])


@pytest.mark.parametrize("case", RULES["sizes"])
def test_targets_and_estimates_equal_megatron(case: dict[str, Any]) -> None:
    for column, num_samples in enumerate(case["targets"]):
        targets = rounded_shares(case["normalized"], num_samples)
        assert targets == [row[column] for row in case["target_result"]]
        estimates = [sufficient_request(target, 0, lambda request: request, case["surplus"]) for target in targets]
        assert estimates == [row[column] for row in case["result"]]


@pytest.mark.parametrize("case", RULES["blend_from_list"])
def test_lists_are_read_as_megatron_reads_them(case: dict[str, Any]) -> None:
    source = parse_source(tuple(case["args"]), "data_path")
    assert source is not None
    prefixes, weights = case["result"]
    assert (list(source.prefixes), source.weights) == (prefixes, None if weights is None else tuple(weights))


@pytest.mark.parametrize(
    ("texts", "words"),
    [
        (("0.5", "a", "b", "c"), ["mixes", "'b'"]),
        (("0", "a", "1", "b"), ["weight 0 of a", "leave the dataset out"]),
        (("-1", "a", "nan", "b"), ["weight -1 of a", "weight nan of b"]),
        (("0.5", " "), ["empty prefix"]),
    ],
)
def test_lists_that_mean_nothing_are_refused(texts: tuple[str, ...], words: list[str]) -> None:
    with pytest.raises(ConfigError) as caught:
        parse_source(texts, "data_path")
    for word in words:
        assert word in str(caught.value)


@settings(max_examples=80, deadline=None)
@given(
    sizes=st.lists(st.integers(1, 40), min_size=1, max_size=6),
    weights=st.lists(st.floats(1e-7, 1e3), min_size=6, max_size=6),
    num_samples=st.integers(1, 400),
    seq_length=st.integers(1, 9),
)
def test_any_weights_get_datasets_that_are_long_enough(sizes: list[int], weights: list[float], num_samples: int, seq_length: int) -> None:
    """Requirement 25: sized from the blend's counts. Where Megatron's estimate is enough it is kept."""
    shares = normalized(weights[: len(sizes)])
    targets = rounded_shares(shares, num_samples)
    counts = blend_weighted(shares, sum(targets)).counts(len(sizes))
    assert sum(counts) >= num_samples
    for tokens, target, count in zip(sizes, targets, counts, strict=True):

        def length_for(request: int, tokens: int = tokens) -> int:
            return plan_epochs(tokens, IndexSpec(seq_length, request, (0, 1), 0)).num_samples

        if tokens < 2 and count == 0:
            continue
        request = sufficient_request(target, count, length_for)
        estimate = math.ceil(target * 1.005)
        assert length_for(request) >= count
        assert request == (estimate if length_for(estimate) >= count else count)


def test_an_estimate_that_is_too_low_is_replaced_by_the_count() -> None:
    """Requirement 25: Megatron fails there with an IndexError in the middle of the run."""
    assert sufficient_request(10, 12, lambda request: request) == 12
    assert sufficient_request(10, 11, lambda request: request) == 11  # the estimate is 11 as well
    assert sufficient_request(10, 12, lambda request: request + 1) == 11
    indices = BlendIndices(np.array([0, 1, 1, 1, 1, 1], np.int16), np.arange(6))
    with pytest.raises(DataError, match="dataset 1 has 3 samples, the blend takes 5"):
        BlendedDataset([MockDataset(9, 4, 9), MockDataset(9, 4, 3)], indices)


def test_more_datasets_than_a_byte_counts_on_few_open_files(tmp_path: Path) -> None:
    """Requirement 25: 260 datasets, the first with nearly all of the weight, under a limit of 400 open files."""
    prefixes = [write(tmp_path / f"d{n}", [[n, n, n, 0], [n, 0]]) for n in range(260)]
    weights = ["1000", *["0.001"] * 259]
    path = tuple(itertools.chain.from_iterable(zip(weights, prefixes, strict=True)))
    limits = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (400, limits[1]))
    try:
        split = corpora(tmp_path, seq_length=3, data_path=path, split="1").split("train", 900)
        dataset = split.dataset
        assert isinstance(dataset, BlendedDataset)
        assert dataset.indices.dataset_index.dtype == np.int16
        assert len(dataset) >= 900
        for i in range(len(dataset)):
            assert set(dataset[i].tokens.tolist()) <= {0, int(dataset.indices.dataset_index[i])}
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, limits)
    assert sum(part.count for part in split.parts) == len(dataset)


def test_a_blend_is_cached_and_read_again(tmp_path: Path) -> None:
    shares = normalized([3, 1, 2])
    built, read, memory = (blend_weighted(shares, 100, folder) for folder in (tmp_path, tmp_path, None))
    for name in ("dataset_index", "dataset_sample_index"):
        np.testing.assert_array_equal(getattr(built, name), getattr(read, name))
        np.testing.assert_array_equal(getattr(built, name), getattr(memory, name))
    assert len(list(tmp_path.rglob("*.json"))) == 1
    blend_weighted(shares, 101, tmp_path)
    assert len(list(tmp_path.rglob("*.json"))) == 2


def test_the_start_says_share_samples_and_epochs(tmp_path: Path) -> None:
    """Requirement 26: a weight is a share of the samples, and epochs follow from it."""
    a, b = write(tmp_path / "a", [list(range(1, 11))] * 4), write(tmp_path / "b", [list(range(1, 11))] * 2)
    split = corpora(tmp_path, seq_length=4, data_path=("3", a, "1", b), split="1").split("train", 40)
    title, _, first, second = split.lines()
    assert title == "train: 40 samples of 4 tokens"
    assert first.split() == ["75.00%", "30", "3.00", "4", "40", a]
    assert second.split() == ["25.00%", "10", "2.00", "2", "20", b]


def test_empty_splits_are_all_named_with_their_documents(tmp_path: Path) -> None:
    """Requirement 28: 969,30,1 of 10 documents leaves none for validation, which is said before the first step."""
    prefixes = [write(tmp_path / name, [[1, 2, 3, 0]] * 10) for name in "ab"]
    data = corpora(tmp_path, data_path=("1", prefixes[0], "2", prefixes[1]))
    assert len(data.split("train", 5).dataset) >= 5
    with pytest.raises(DataError) as caught:
        data.split("valid", 5)
    for word in ("2 of 2 datasets", f"{prefixes[0]} is empty", f"{prefixes[1]} is empty", "of 10 documents", "--eval-interval"):
        assert word in str(caught.value)


def test_too_little_data_is_repeated_or_refused_with_numbers(tmp_path: Path) -> None:
    """Requirement 29: one dataset or weights repeat; without weights everything is read once."""
    a, b = write(tmp_path / "a", [[1, 2, 3, 0]]), write(tmp_path / "b", [[5] * 20])
    assert len(corpora(tmp_path, seq_length=9, split="1", data_path=(a,)).split("train", 7).dataset) >= 7
    assert len(corpora(tmp_path, seq_length=9, split="1", data_path=("9", a, "1", b)).split("train", 70).dataset) >= 70
    with pytest.raises(DataError, match=r"needs 9 samples, but 2 datasets without weights have 7 in all"):
        corpora(tmp_path, seq_length=3, split="1", data_path=(a, b)).split("train", 9)
    with pytest.raises(DataError, match=r"hold 4 tokens, one sample of sequence length 9 needs 10"):
        corpora(tmp_path, seq_length=9, split="1", data_path=(a, b)).split("train", 2)
    with pytest.raises(DataError, match="no valid data"):
        corpora(tmp_path, train_data_path=(a,)).split("valid", 2)


def test_datasets_of_two_tokenizers_are_not_mixed(tmp_path: Path) -> None:
    a, b = write(tmp_path / "a", [[1, 2, 3, 0]]), write(tmp_path / "b", [[5, 6, 7, 0]])
    write_meta_of(a, 50, 0)
    corpora(tmp_path, seq_length=3, split="1", data_path=(a, b)).split("train", 2)
    write_meta_of(b, 60, 0)
    with pytest.raises(DataError, match=r"different tokenizers: .*50 ids.*60 ids"):
        corpora(tmp_path, seq_length=3, split="1", data_path=(a, b)).split("train", 2)
    write_meta_of(b, 50, 0, max_id=1000)
    with pytest.raises(DataError, match="holds token 1000"):
        corpora(tmp_path, seq_length=3, split="1", data_path=(a, b)).split("train", 2)


def test_the_end_of_document_comes_from_the_side_file_or_the_tokenizer(tmp_path: Path) -> None:
    prefix = write(tmp_path / "a", [[1, 2, 7, 4, 5, 6]])
    options: dict[str, Any] = dict(seq_length=5, split="1", data_path=(prefix,), reset_attention_mask=True, eod_mask_loss=True)
    with pytest.raises(ConfigError, match="end-of-document id"):
        corpora(tmp_path, **options).split("train", 1)
    write_meta_of(prefix, 50, 7)
    sample = corpora(tmp_path, **options).split("train", 1).dataset[0]
    assert sample.document_ids is not None
    assert sample.document_ids.tolist() == [0, 0, 0, 1, 1]
    assert sample.loss_mask.tolist() == [1, 1, 0, 1, 1]
    other = replace(DataConfig(**options), tokenizer_type="bytes")  # its end of document does not occur in the data
    Path(f"{prefix}.meta.json").unlink()
    sample = Corpora(RunConfig(data=other, model=ModelConfig(vocab_size=300))).split("train", 1).dataset[0]
    assert sample.loss_mask.all()
