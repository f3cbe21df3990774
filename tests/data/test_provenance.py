"""Where the tokens of a step lie, and where a document is read: equal to what the loader returns, both ways."""

from __future__ import annotations

import json
import random
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from megalite.config import DataConfig, ModelConfig, RunConfig, TrainConfig
from megalite.data.corpora import Corpora
from megalite.data.feistel import FeistelPermutation
from megalite.data.indexed import IndexedDataset
from megalite.data.indexed_writer import IndexedDatasetWriter
from megalite.data.loader import GlobalBatchLoader, MicroBatchArrays
from megalite.data.provenance import Provenance, Use
from megalite.errors import ConfigError, DataError
from tools.provenance import main

LENGTH = 6


@contextmanager
def corpus(seed: int, names: str = "abc", dtype: str = "uint16") -> Iterator[Path]:
    """Datasets of documents of one, several or no sequences, some of them empty, in a folder."""
    with tempfile.TemporaryDirectory() as folder:
        random_numbers = random.Random(seed)
        for number, name in enumerate(names):
            with IndexedDatasetWriter(Path(folder) / name, dtype) as writer:
                for _ in range(random_numbers.randrange(9, 20)):
                    sizes = [random_numbers.choice((0, 1, 2, 5, 9, 23)) for _ in range(random_numbers.choice((0, 1, 1, 1, 3)))]
                    for size in sizes:
                        writer.add_sequence([300 * number + random_numbers.randrange(256) for _ in range(size)])
                    writer.end_document()
                writer.add_document(list(range(40)))
        yield Path(folder)


def config_for(folder: Path, data_path: tuple[str, ...], shuffle: str = "megatron", **train: Any) -> RunConfig:
    paths = tuple(str(folder / text) if text.isalpha() else text for text in data_path)
    data: dict[str, Any] = {"data_path": paths, "split": "7,3", "seq_length": LENGTH, "shuffle": shuffle}
    train = {"train_iters": 9, "micro_batch_size": 2, "global_batch_size": 8, "eval_interval": 4, "eval_iters": 2, "seed": 5} | train
    return RunConfig(
        model=ModelConfig(vocab_size=1000), data=DataConfig(**data, data_cache_path=str(folder / "cache")), train=TrainConfig(**train)
    )


def steps_of_the_loader(config: RunConfig, split: Any, dp_size: int) -> list[list[MicroBatchArrays]]:
    """The micro-batches of every global batch, read by `dp_size` ranks, in order."""
    dataset = Corpora(config).split(split, config.num_samples(8)[split]).dataset
    sizes = config.batch_sizes(1) if split == "train" else 8
    loaders = [
        GlobalBatchLoader(dataset, micro_batch_size=2, global_batch_size=sizes, dp_rank=rank, dp_size=dp_size) for rank in range(dp_size)
    ]
    num_steps = config.train.train_iters if split == "train" else config.train.eval_iters
    steps = [sorted((batch for loader in loaders for batch in loader.next_step()), key=lambda b: b.index) for _ in range(num_steps)]
    for loader in loaders:
        loader.close()
    return steps


def check_step(provenance: Provenance, step: int, batches: list[MicroBatchArrays], read: dict[str, np.ndarray]) -> list[Use]:
    """Compare with the loader by reading the .bin files at the bytes that the uses name."""
    uses = provenance.of_step(step)
    assert uses == [use for batch in batches for use in provenance.of_step(step, batch.index)]
    for batch in batches:
        for row in range(2):
            mine = [use for use in uses if (use.micro_batch, use.row) == (batch.index, row)]
            assert {(use.step, use.sample) for use in mine} == {(step, batch.first_sample + row)}
            parts = [read[use.dataset][use.first_byte : use.end_byte].view(np.uint16) for use in mine]
            assert [use.position for use in mine] == [sum(map(len, parts[:number])) for number in range(len(parts))]
            assert all((provenance.tokens(use) == part).all() for use, part in zip(mine, parts, strict=True))
            tokens = np.concatenate(parts).astype(np.int64)
            assert len(tokens) == LENGTH + 1
            assert batch.tokens[row].tolist() == tokens[:-1].tolist()
            assert batch.labels[row].tolist() == tokens[1:].tolist()
    return uses


SOURCES = [("a",), ("0.7", "a", "0.3", "b"), ("a", "b", "c"), ("2", "a", "1", "a", "1", "c")]


@given(
    seed=st.integers(0, 10_000),
    source=st.sampled_from(SOURCES),
    shuffle=st.sampled_from(["megatron", "feistel"]),
    split=st.sampled_from(["train", "valid"]),
    rampup=st.sampled_from([None, (4, 2, 9)]),
)
@settings(max_examples=25, deadline=None)
def test_both_directions_agree_with_the_loader(seed: int, source: tuple[str, ...], shuffle: str, split: Any, rampup: Any) -> None:
    iters = 2 if source == ("a", "b", "c") else 9  # without weights nothing is repeated
    with corpus(seed) as folder:
        config = config_for(folder, source, shuffle, train_iters=iters, rampup_batch_size=rampup, eval_iters=1 if iters == 2 else 2)
        try:
            steps = steps_of_the_loader(config, split, 1 if rampup else 2)
        except DataError:
            assume(False)  # too few tokens in a small split
        provenance = Provenance.of_run(RunConfig.from_toml(config.to_toml()), split)
        read = {str(folder / name): np.fromfile(folder / f"{name}.bin", dtype=np.uint8) for name in "abc"}
        uses = [use for number, batches in enumerate(steps, 1) for use in check_step(provenance, number, batches, read)]
        assert provenance.num_steps == len(steps)
        for prefix in {indexed.path_prefix for indexed in provenance.sources}:
            for document in range(len(IndexedDataset(prefix).document_indices) - 1):
                expected = [use for use in uses if (use.dataset, use.document) == (prefix, document)]
                assert provenance.of_document(document, prefix) == expected


def test_the_property_is_not_about_nothing() -> None:
    """The corpora of the property have tokens enough for most cases, repeated documents, and samples of several documents."""
    with corpus(0) as folder:
        for source in SOURCES:
            provenance = Provenance.of_run(config_for(folder, source, train_iters=2 if source == ("a", "b", "c") else 9, eval_iters=1))
            assert max(len(provenance.of_sample(sample)) for sample in range(16)) >= 3
    with corpus(1) as folder:
        provenance = Provenance.of_run(config_for(folder, ("a",)))
        assert len({use.step for use in provenance.of_document(3)} | {use.step for use in provenance.of_document(5)}) >= 2


@pytest.mark.parametrize("size", [1, 2, 3, 17, 64, 1000])
def test_the_inverse_permutation(size: int) -> None:
    order = FeistelPermutation(size, 12345)
    assert [order.inverse(order(i)) for i in range(size)] == list(range(size))


def test_what_does_not_exist_is_refused_with_the_numbers() -> None:
    with corpus(3) as folder:
        config = config_for(folder, ("0.5", "a", "0.5", "b"))
        provenance = Provenance.of_run(config)
        for question, words in (
            (lambda: provenance.of_step(0), "steps 1 to 9"),
            (lambda: provenance.of_step(10), "steps 1 to 9"),
            (lambda: provenance.of_step(1, 4), "micro-batches 0 to 3, not 4"),
            (lambda: provenance.of_sample(72), "samples 0 to 71"),
            (lambda: provenance.of_document(1), "blends 2 datasets"),
            (lambda: provenance.of_document(1, "x"), "no dataset x"),
            (lambda: provenance.of_document(1000, str(folder / "a")), "not 1000"),
        ):
            with pytest.raises(DataError, match=words):
                question()
        with pytest.raises(ConfigError, match="does not read its test split"):
            Provenance.of_run(config, "test")
        with pytest.raises(ConfigError, match="--world-size"):
            Provenance.of_run(config_for(folder, ("a",), global_batch_size=None))


def asked(capsys: pytest.CaptureFixture[str], *arguments: object) -> tuple[list[str], dict[str, Any]]:
    assert main([*map(str, arguments)]) == 0
    lines = capsys.readouterr().out.splitlines()
    return lines[:-1], json.loads(lines[-1])


def test_the_tool_reads_a_saved_run(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    texts = [f"document {number} says {number * 'ha'}." for number in range(30)]
    with IndexedDatasetWriter(tmp_path / "a", "uint16") as writer:
        for text in texts:
            writer.add_document([*text.encode(), 256])
    (tmp_path / "config.toml").write_text(config_for(tmp_path, ("a",)).to_toml())
    lines, step = asked(capsys, tmp_path, "--step", 2, "--limit", 3, "--tokenizer-type", "bytes", "--decode")
    assert len(lines) == 1 + 2 * 3 + 1
    assert (step["asked"], step["steps"], step["samples"], step["tokens"]) == ({"step": 2}, [2], 8, 8 * (LENGTH + 1))
    use = step["uses"][0]
    raw = (tmp_path / "a.bin").read_bytes()[use["first_byte"] : use["end_byte"]]
    assert bytes(token for token in np.frombuffer(raw, np.uint16) if token < 256).decode() == use["text"]
    assert use["text"] in texts[use["document"]]
    _, document = asked(capsys, tmp_path / "config.toml", "--document", use["document"])
    assert {name: use[name] for name in Use._fields} in document["uses"]
    assert {row["document"] for row in document["uses"]} == {use["document"]}
    _, valid = asked(capsys, tmp_path, "--document", 29, "--split", "valid")
    assert valid["evaluated_after_steps"] == [4, 8, 9]
    assert asked(capsys, tmp_path, "--document", 29)[1]["uses"] == []


def test_a_run_that_was_continued_with_another_batch_size_is_refused(capsys: pytest.CaptureFixture[str]) -> None:
    with corpus(3) as folder:
        (folder / "config.toml").write_text(config_for(folder, ("a",), rampup_batch_size=(4, 2, 9)).to_toml())
        records = [{"step": 1, "consumed_samples": 4, "loss": 1.0}, {"step": 1, "valid_loss": 1.0}, {"step": 2, "consumed_samples": 8}]
        metrics = folder / "metrics.jsonl"
        metrics.write_text("".join(json.dumps(record) + "\n" for record in records) + '{"step": 3, "cons')
        assert main([str(folder), "--step", "2"]) == 0
        metrics.write_text(json.dumps({"step": 3, "consumed_samples": 24}) + "\n")
        assert main([str(folder), "--step", "2"]) == 1
        assert "24 samples were consumed after step 3, by the configuration it would be 14" in capsys.readouterr().err


def test_the_tools_errors_are_one_line(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    assert main([str(tmp_path), "--step", "1"]) == 2
    assert "config.toml" in capsys.readouterr().err
    with corpus(3) as folder:
        (folder / "config.toml").write_text(config_for(folder, ("a",)).to_toml())
        assert main([str(folder), "--step", "99"]) == 1
        assert main([str(folder), "--step", "1", "--decode"]) == 2
    assert capsys.readouterr().err.count("\n") == 2
