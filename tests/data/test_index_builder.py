"""Index loops: C++ equals the reference, both equal a naive walk, Megatron's blends, and nothing overflows."""

from __future__ import annotations

import importlib
import json
import logging
from collections.abc import Callable
from pathlib import Path
from types import ModuleType

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from megalite.data import index_builder
from megalite.data.index_builder import (
    build_blending_indices,
    build_blending_indices_reference,
    build_exhaustive_blending_indices,
    build_exhaustive_blending_indices_reference,
    build_sample_index,
    build_sample_index_reference,
    legacy_random,
    native_builder,
)

GOLDEN = Path(__file__).parents[1] / "golden"
BLENDS = json.loads((GOLDEN / "blend.json").read_text())["cases"]


@pytest.fixture
def compiled() -> ModuleType:
    builder = native_builder()
    if builder is None:
        pytest.skip("the C++ index builder is not compiled here")
    return builder


@pytest.fixture(params=["native", "reference"])
def either(request: pytest.FixtureRequest) -> str:
    if request.param == "native":
        request.getfixturevalue("compiled")
    return request.param


def sample_builder(which: str) -> Callable[..., np.ndarray]:
    return build_sample_index if which == "native" else build_sample_index_reference


def naive(sizes: list[int], documents: list[int], seq_length: int, num_samples: int, extra: int) -> list[list[int]]:
    """Token by token: where the border token of every sample lies; past the end, the last document's end."""
    places = [[p, t] for p, document in enumerate(documents) for t in range(sizes[document])]
    short = [len(documents) - 1, sizes[documents[-1]] - extra]
    borders = [[0, 0]]
    for token in range(seq_length, num_samples * seq_length + 1, seq_length):
        if extra:
            borders.append(places[token] if token < len(places) else short)
        else:
            borders.append([places[token - 1][0], places[token - 1][1] + 1] if token <= len(places) else short)
    return borders


corpora = st.lists(st.integers(0, 9), min_size=1, max_size=8).flatmap(
    lambda sizes: st.tuples(st.just(sizes), st.lists(st.integers(0, len(sizes) - 1), min_size=1, max_size=12), st.sampled_from("iq"))
)


@settings(max_examples=300, deadline=None)
@given(corpora, st.integers(1, 7), st.integers(0, 25), st.booleans(), st.sampled_from("iq"))
def test_reference_equals_a_token_by_token_walk(
    corpus: tuple[list[int], list[int], str], seq_length: int, num_samples: int, extra: bool, document_type: str
) -> None:
    sizes, documents, size_type = corpus
    arrays = np.array(sizes, dtype=size_type), np.array(documents, dtype=document_type)
    result = build_sample_index_reference(*arrays, seq_length, num_samples, extra)
    assert result.tolist() == naive(sizes, documents, seq_length, num_samples, extra)


@settings(max_examples=300, deadline=None)
@given(corpora, st.integers(1, 7), st.integers(0, 25), st.booleans(), st.sampled_from("iq"))
def test_native_equals_reference(
    corpus: tuple[list[int], list[int], str], seq_length: int, num_samples: int, extra: bool, document_type: str
) -> None:
    builder = native_builder()
    if builder is None:
        pytest.skip("the C++ index builder is not compiled here")
    sizes, documents, size_type = corpus
    arrays = np.array(sizes, dtype=size_type), np.array(documents, dtype=document_type)
    expected = build_sample_index_reference(*arrays, seq_length, num_samples, extra)
    result = builder.build_sample_index(*arrays, seq_length, num_samples, extra)
    assert result.dtype == expected.dtype
    np.testing.assert_array_equal(result, expected)


@pytest.mark.parametrize("size_type", [np.int32, np.int64])
def test_more_tokens_than_int32_counts(either: str, size_type: type) -> None:
    """Requirement 20. Seven documents of about 2^31 tokens, no data: 1.5e10 tokens in all."""
    size, seq_length = 2**31 - 5, 1_000_003
    sizes = np.full(7, size, dtype=size_type)
    documents = np.array([3, 0, 6, 1, 2, 5, 4], dtype=np.int32)
    num_samples = (7 * size - 1) // seq_length
    result = sample_builder(either)(sizes, documents, seq_length, num_samples, True)
    tokens = result[:, 0].astype(np.int64) * size + result[:, 1]
    np.testing.assert_array_equal(tokens, np.arange(num_samples + 1) * seq_length)
    assert result.dtype == np.int32
    assert tokens[-1] > 2**33


def test_one_document_beyond_int32_needs_wide_offsets(either: str) -> None:
    result = sample_builder(either)(np.array([2**33 + 1]), np.zeros(1, dtype=np.int32), 2**30, 8, True)
    assert result.dtype == np.int64
    assert result[:, 1].tolist() == [n * 2**30 for n in range(9)]


def test_the_result_is_int64_when_a_size_needs_it_even_if_it_is_not_read(either: str) -> None:
    assert sample_builder(either)(np.array([4, 2**31]), np.zeros(1, np.int32), 3, 1, True).dtype == np.int64
    assert sample_builder(either)(np.array([4, 2**31 - 1]), np.zeros(1, np.int32), 3, 1, True).dtype == np.int32


def test_unaligned_arrays_from_a_file_are_read() -> None:
    raw = np.frombuffer(b"\0\0" + np.array([3, 4, 5], dtype=np.int32).tobytes(), dtype=np.uint8)
    sizes = raw[2:].view(np.int32)
    assert not sizes.flags.aligned
    result = build_sample_index(sizes, np.arange(3, dtype=np.int32), 4, 2)
    assert result.tolist() == [[0, 0], [1, 1], [2, 1]]


@pytest.mark.parametrize(
    ("sizes", "documents", "seq_length", "num_samples"),
    [([3], [1], 2, 1), ([3], [-1], 2, 1), ([-3], [0], 2, 1), ([3], [0], 0, 1), ([3], [0], 2, -1), ([3], [], 2, 1)],
)
def test_bad_arguments_are_refused(either: str, sizes: list[int], documents: list[int], seq_length: int, num_samples: int) -> None:
    with pytest.raises(ValueError):
        sample_builder(either)(np.array(sizes, dtype=np.int32), np.array(documents, dtype=np.int32), seq_length, num_samples, True)


@pytest.mark.parametrize("case", BLENDS, ids=lambda case: case["key"])
def test_blends_equal_megatron(either: str, case: dict) -> None:
    arrays = np.load(GOLDEN / "blend.npz")
    native = either == "native"
    if case["kind"] == "weighted":
        build = build_blending_indices if native else build_blending_indices_reference
        dataset, sample = build(case["normalized"], case["size"])
    else:
        build = build_exhaustive_blending_indices if native else build_exhaustive_blending_indices_reference
        dataset, sample = build(case["sizes"])
    assert (dataset.dtype, sample.dtype) == (np.int16, np.int64)
    np.testing.assert_array_equal(dataset, arrays[f"{case['key']}_dataset_index"])
    np.testing.assert_array_equal(sample, arrays[f"{case['key']}_dataset_sample_index"])


@settings(max_examples=60, deadline=None)
@given(st.lists(st.integers(1, 1000), min_size=1, max_size=6), st.integers(0, 60), st.lists(st.integers(0, 9), min_size=1))
def test_native_blends_equal_the_reference(parts: list[int], size: int, sizes: list[int]) -> None:
    builder = native_builder()
    if builder is None:
        pytest.skip("the C++ index builder is not compiled here")
    weights = [part / sum(parts) for part in parts]
    for native, reference in (
        (builder.build_blending_indices(weights, size), build_blending_indices_reference(weights, size)),
        (builder.build_exhaustive_blending_indices(sizes), build_exhaustive_blending_indices_reference(sizes)),
    ):
        for one, other in zip(native, reference, strict=True):
            np.testing.assert_array_equal(one, other)


WEIGHTS: dict[str, Callable[[np.random.Generator, int], np.ndarray]] = {
    "random": lambda random, n: random.random(n),
    "equal": lambda random, n: np.ones(n),
    "few values and zero": lambda random, n: random.integers(0, 4, n).astype(float),
    "one unit in the last place apart": lambda random, n: 1 + random.integers(0, 3, n) * 2.0**-52,
    "powers of two": lambda random, n: 2.0 ** -random.integers(0, 40, n),
    "over nine orders": lambda random, n: 10 ** random.uniform(-9, 0, n),
}


@pytest.mark.parametrize("kind", WEIGHTS)
@pytest.mark.parametrize("num_datasets", [2, 17, 90])
@pytest.mark.parametrize("total", [1.0, 0.0, 1.3])
def test_native_blends_of_many_datasets_equal_the_reference(compiled: ModuleType, kind: str, num_datasets: int, total: float) -> None:
    """Requirement 25: ties, zeros; enough steps for chunks from guessed counts, which sums other than 1 make wrong guesses."""
    weights = WEIGHTS[kind](np.random.default_rng(num_datasets), num_datasets)
    weights = weights * (total / max(weights.sum(), 1e-300))
    size = 6001 if total == 1.0 or num_datasets == 2 else 700
    for native, reference in zip(
        compiled.build_blending_indices(weights, size), build_blending_indices_reference(weights, size), strict=True
    ):
        np.testing.assert_array_equal(native, reference)


@pytest.mark.parametrize("high", [2, 9, 200])
def test_native_blends_of_everything_equal_the_reference(compiled: ModuleType, high: int) -> None:
    sizes = np.random.default_rng(high).integers(0, high, 70).tolist()
    for native, reference in zip(
        compiled.build_exhaustive_blending_indices(sizes), build_exhaustive_blending_indices_reference(sizes), strict=True
    ):
        np.testing.assert_array_equal(native, reference)


@pytest.mark.parametrize("dtype", [np.int32, np.uint32, np.int64])
def test_native_shuffles_equal_numpy(compiled: ModuleType, dtype: type) -> None:
    """Sizes around the powers of two, where the mask of a draw changes, and around the block of draws; one generator throughout."""
    for seed in (0, 1234, 2**32 - 1):
        native, numpy_random = legacy_random(seed), np.random.RandomState(seed)
        for size in (*range(10), 31, 32, 33, 63, 64, 65, 66, 127, 128, 129, 130, 1023, 1024, 1025, 20_000):
            values = np.arange(size, dtype=dtype)
            expected = values.copy()
            native.shuffle(values)
            numpy_random.shuffle(expected)
            np.testing.assert_array_equal(values, expected, err_msg=f"{size}")


def test_a_shuffle_takes_no_copy_and_no_other_type(compiled: ModuleType) -> None:
    random, values = compiled.LegacyRandom(1), np.arange(10, dtype=np.int32)
    for wrong in (values[::2], values.astype(np.float64), values.reshape(2, 5)):
        with pytest.raises((TypeError, ValueError)):
            random.shuffle(wrong)
    values.flags.writeable = False
    with pytest.raises(ValueError):
        random.shuffle(values)


@pytest.mark.parametrize("extra", [True, False])
def test_many_documents_are_cut_alike_by_several_threads(compiled: ModuleType, extra: bool) -> None:
    """More blocks of documents than one thread takes; also a document that does not exist, in the last block."""
    random = np.random.default_rng(5)
    sizes = random.integers(0, 40, 700_000).astype(np.int32)
    documents = random.permutation(len(sizes)).astype(np.int32)
    num_samples = (int(sizes.sum()) - extra) // 37 + 3
    expected = build_sample_index_reference(sizes, documents, 37, num_samples, extra)
    np.testing.assert_array_equal(compiled.build_sample_index(sizes, documents, 37, num_samples, extra), expected)
    documents[-2:] = len(sizes), -1
    with pytest.raises(ValueError, match=f"document_index.{len(sizes) - 2}. is {len(sizes)}"):
        compiled.build_sample_index(sizes, documents, 37, num_samples, extra)


def test_an_exhaustive_blend_uses_everything_once(either: str) -> None:
    native = either == "native"
    build = build_exhaustive_blending_indices if native else build_exhaustive_blending_indices_reference
    dataset, sample = build([10, 0, 4])
    assert sorted(zip(dataset.tolist(), sample.tolist(), strict=True)) == [
        *((0, i) for i in range(10)),
        *((2, i) for i in range(4)),
    ]


def test_native_blends_do_not_depend_on_how_the_work_is_cut(compiled: ModuleType) -> None:
    """A prefix is cut into other chunks than the whole, so it starts from other guesses."""
    weights = np.random.default_rng(3).random(40)
    weights /= weights.sum()
    whole = compiled.build_blending_indices(weights, 400_000)
    for size in (2_047, 2_561, 50_000, 399_999):
        for part, all_of_it in zip(compiled.build_blending_indices(weights, size), whole, strict=True):
            np.testing.assert_array_equal(part, all_of_it[:size])


def test_blends_refuse_bad_arguments(either: str) -> None:
    native = either == "native"
    weighted = build_blending_indices if native else build_blending_indices_reference
    exhaustive = build_exhaustive_blending_indices if native else build_exhaustive_blending_indices_reference
    bad_weights = [lambda weight=weight: weighted([0.5, weight], 3) for weight in (-0.1, float("nan"), float("inf"))]
    for call in (lambda: weighted([], 3), lambda: weighted([1.0], -1), lambda: exhaustive([3, -1]), *bad_weights):
        with pytest.raises(ValueError):
            call()


def test_without_the_extension_numpy_works_and_one_warning_says_so(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def missing(name: str) -> ModuleType:
        raise ImportError(f"No module named {name!r}")

    monkeypatch.setattr(importlib, "import_module", missing)
    monkeypatch.setattr(logging.getLogger("megalite"), "propagate", True)
    native_builder.cache_clear()
    try:
        with caplog.at_level(logging.WARNING, logger="megalite"):
            for _ in range(2):
                result = build_sample_index(np.array([3, 5]), np.array([1, 0]), 3, 2)
        assert result.tolist() == [[0, 0], [0, 3], [1, 1]]
        assert build_blending_indices([0.7, 0.3], 4)[0].tolist() == [0, 1, 0, 0]
    finally:
        index_builder.native_builder.cache_clear()
    assert len(caplog.records) == 1
    assert "slower" in caplog.text
    assert "pip install" in caplog.text
