"""One measurement of tools/bench_data.py in a process of its own, so that the peak of memory is this case's alone.

    python -m megalite.testing.data_cases CASE ours|peer '{"num_documents": 1000, ...}'

A case prepares its input, which is not measured, and returns what is measured and a checksum of its result. Printed is
one JSON line: seconds, the growth of the resident set at its highest in MiB (mapped files count while they are
mapped), and the checksum. The peer is megatron-core, imported from `peer` in the settings without the rest of its
package, whose import takes longer than what is measured.
"""

from __future__ import annotations

import importlib
import json
import sys
import time
import zlib
from collections.abc import Callable
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import numpy as np

from megalite.data.gpt_dataset import GPTDataset
from megalite.data.gpt_index import IndexSpec, build_gpt_indices
from megalite.data.index_builder import build_blending_indices, build_exhaustive_blending_indices, build_sample_index
from megalite.data.indexed import DATA_OFFSET, HEADER, MAGIC, VERSION, IndexedDataset, bin_path, index_path
from megalite.data.indexed_writer import IndexedDatasetWriter

Case = tuple[Callable[[], Any], Callable[[Any], int]]
SEED = 1234
_UINT16_CODE = 8
_PACKAGES = ("megatron", "megatron.core", "megatron.core.datasets")


def document_sizes(num_documents: int, longest: int) -> np.ndarray:
    """Tokens per document, int32, from 1 to `longest`."""
    return np.random.RandomState(1).randint(1, longest + 1, num_documents).astype(np.int32)


def write_corpus(prefix: Path, sizes: np.ndarray) -> None:
    """A dataset of documents of one sequence each. The .bin file is sparse: its tokens are 0 and take no disk."""
    pointers = np.zeros(len(sizes), dtype=np.int64)
    np.cumsum(sizes[:-1], dtype=np.int64, out=pointers[1:])
    with index_path(prefix).open("wb") as file:
        file.write(MAGIC + HEADER.pack(VERSION, _UINT16_CODE, len(sizes), len(sizes) + 1))
        assert file.tell() == DATA_OFFSET
        for values in (sizes, 2 * pointers, np.arange(len(sizes) + 1, dtype=np.int64)):
            file.write(values.tobytes())
    with bin_path(prefix).open("wb") as file:
        file.truncate(2 * int(sizes.sum(dtype=np.int64)))


def peer_module(peer: str, name: str) -> ModuleType:
    """A module of megatron-core from the folder `peer`, without running the __init__ of its packages."""
    for package in _PACKAGES:
        if package not in sys.modules:
            module = ModuleType(package)
            module.__path__ = [str(Path(peer, *package.split(".")))]  # type: ignore[attr-defined]
            sys.modules[package] = module
    if name != "helpers":
        importlib.import_module("megatron.core.parallel_state")  # the other way round, its circular import fails
    return importlib.import_module(f"megatron.core.datasets.{name}")


def checksum(arrays: Any) -> int:
    """Of arrays with their types and shapes."""
    total = 0
    for values in arrays:
        total = zlib.crc32(f"{values.dtype.str}{values.shape}".encode(), total)
        total = zlib.crc32(np.ascontiguousarray(values).data, total)
    return total


def sample_index(side: str, given: SimpleNamespace) -> Case:
    sizes = document_sizes(given.num_documents, given.longest)
    documents = np.tile(np.arange(given.num_documents, dtype=np.int32), given.epochs)
    np.random.default_rng(2).shuffle(documents)
    tokens = int(sizes.sum(dtype=np.int64))
    if side == "peer":
        build = peer_module(given.peer, "helpers").build_sample_idx
        return lambda: build(sizes, documents, given.seq_length, given.epochs, tokens, True, True), lambda result: checksum([result])
    num_samples = (given.epochs * tokens - 1) // given.seq_length
    return lambda: build_sample_index(sizes, documents, given.seq_length, num_samples, True), lambda result: checksum([result])


def whole_build(side: str, given: SimpleNamespace) -> Case:
    """Document, sample and shuffle index in memory; the last of the epochs is needed by half and shuffled apart."""
    if side == "peer":
        start = _peer_dataset(given, cache="")
        return start, lambda data: checksum([data.document_index, data.sample_index, data.shuffle_index])
    indexed = IndexedDataset(given.prefix)
    spec = IndexSpec(given.seq_length, _wanted_samples(indexed.sizes, given), (0, len(indexed)), SEED)
    return lambda: build_gpt_indices(indexed.sizes, spec), checksum


def start_up(side: str, given: SimpleNamespace) -> Case:
    """From the files to a dataset that answers, with the cache in `cache`, which may be empty (cold) or filled (warm)."""
    if side == "peer":
        start = _peer_dataset(given, cache=given.cache)
        return start, lambda data: checksum([data.document_index, data.sample_index, data.shuffle_index])
    wanted = _wanted_samples(IndexedDataset(given.prefix).sizes, given)
    return lambda: _our_dataset(given, wanted), lambda data: checksum(data.indices)


def weighted_blend(side: str, given: SimpleNamespace) -> Case:
    weights = _weights(given)
    if side == "peer":
        build = peer_module(given.peer, "helpers").build_blending_indices
        return lambda: _filled(build, given.num_samples, list(weights), len(weights), given.num_samples, False), checksum
    return lambda: build_blending_indices(list(weights), given.num_samples), checksum


def exhaustive_blend(side: str, given: SimpleNamespace) -> Case:
    counts = np.floor(_weights(given) * given.num_samples).astype(np.int64)
    if side == "peer":
        build = peer_module(given.peer, "helpers").build_exhaustive_blending_indices
        return lambda: _filled(build, int(counts.sum()), counts, len(counts)), checksum
    return lambda: build_exhaustive_blending_indices(counts.tolist()), checksum


def write_index(side: str, given: SimpleNamespace) -> Case:
    """Append a dataset of many documents to a new one, and finish that: its two files are the result."""
    target = f"{given.prefix}-copy-{side}"

    build: Any = peer_module(given.peer, "indexed_dataset").IndexedDatasetBuilder if side == "peer" else None

    def ours() -> None:
        with IndexedDatasetWriter(target, "uint16") as writer:
            writer.add_index(given.prefix)

    def peers() -> None:
        builder = build(str(bin_path(target)), dtype=np.uint16)
        builder.add_index(given.prefix)
        builder.finalize(str(index_path(target)))

    return peers if side == "peer" else ours, lambda _: zlib.crc32(index_path(target).read_bytes())


def get_item(side: str, given: SimpleNamespace) -> Case:
    """`repeats` samples, spread over the dataset."""
    dataset: Any = _peer_dataset(given, cache="")() if side == "peer" else _our_dataset(given, None)
    chosen = np.random.RandomState(3).randint(0, given.items, given.repeats).tolist()

    def read() -> int:
        total = 0
        for i in chosen:
            tokens = dataset[i]["tokens"] if side == "peer" else dataset[i].tokens
            total += len(tokens)
        return total

    read()  # the pages are mapped; on both sides
    return read, lambda result: result


def loader(side: str, given: SimpleNamespace) -> Case:
    """`repeats` samples as batches of tensors, nothing else going on."""
    from megalite.data.loader import GlobalBatchLoader

    assert side == "ours"
    dataset = _our_dataset(given, None)

    def read() -> int:
        total = 0
        sizes: dict[str, Any] = {"micro_batch_size": 4, "global_batch_size": 64, "vocab_size": 1 << 16}
        with GlobalBatchLoader(dataset, num_workers=given.num_workers, **sizes) as batches:
            for _ in range(given.repeats // 64):
                total += len(batches.next_step())
        return total

    return read, lambda result: result


CASES = {
    case.__name__: case for case in (sample_index, whole_build, start_up, weighted_blend, exhaustive_blend, write_index, get_item, loader)
}


def _our_dataset(given: SimpleNamespace, num_samples: int | None) -> GPTDataset:
    indexed = IndexedDataset(given.prefix)
    cache = Path(given.cache) if given.cache else None
    place = {"sequence_range": (0, len(indexed)), "seed": SEED, "split_name": "train", "cache_dir": cache}
    return GPTDataset(indexed, seq_length=given.seq_length, num_samples=num_samples, **place)


def _peer_dataset(given: SimpleNamespace, cache: str) -> Callable[[], Any]:
    datasets, indexed, utils = (peer_module(given.peer, name) for name in ("gpt_dataset", "indexed_dataset", "utils"))
    tokenizer = SimpleNamespace(vocab_size=1 << 16, eod=0, pad=-1, unique_identifiers={})
    flags = dict.fromkeys(("reset_position_ids", "reset_attention_mask", "eod_mask_loss", "create_attention_mask"), False)
    config = datasets.GPTDatasetConfig(
        random_seed=SEED,
        sequence_length=given.seq_length,
        blend=([given.prefix], None),
        split="1,0,0",
        path_to_cache=cache,
        tokenizer=tokenizer,
        **flags,
    )
    num_samples = _wanted_samples(IndexedDataset(given.prefix).sizes, given) if given.epochs > 1 else None

    def start() -> Any:
        low = indexed.IndexedDataset(given.prefix, multimodal=False, mmap=True)
        sequences = np.arange(len(low), dtype=np.int32)
        return datasets.GPTDataset(low, given.prefix, sequences, num_samples, utils.Split.train, config)

    return start


def _wanted_samples(sizes: np.ndarray, given: SimpleNamespace) -> int:
    """Samples that need half of the last epoch."""
    return int((given.epochs - 0.5) * int(sizes.sum(dtype=np.int64))) // given.seq_length


def _weights(given: SimpleNamespace) -> np.ndarray:
    """Shares as of real blends: a few large, many small."""
    weights = np.random.RandomState(4).lognormal(0.0, 1.5, given.num_datasets)
    return weights / weights.sum()


def _filled(build: Callable[..., None], size: int, *arguments: Any) -> tuple[np.ndarray, np.ndarray]:
    arrays = np.zeros(size, dtype=np.int16), np.zeros(size, dtype=np.int64)
    build(*arrays, *arguments)
    return arrays


def _status_mib(name: str) -> float:
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) for line in lines if line.startswith(name)) / 1024


def main(argv: list[str]) -> None:
    """Measure the case that is named, and print it."""
    name, side, settings = argv
    run, digest = CASES[name](side, SimpleNamespace(**json.loads(settings)))
    Path("/proc/self/clear_refs").write_text("5")  # the peak counts from here
    before, began = _status_mib("VmRSS"), time.perf_counter()
    result = run()
    seconds = time.perf_counter() - began
    figures = {"seconds": seconds, "peak_mib": max(0.0, _status_mib("VmHWM") - before), "checksum": digest(result)}
    sys.stdout.write(json.dumps(figures) + "\n")


if __name__ == "__main__":
    main(sys.argv[1:])
