"""Older checkpoints of Megatron: a file per rank, other names, other orders of rows; and the rows of its joint matrices."""

from __future__ import annotations

import argparse
import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from megalite.checkpoint import read_manifest
from megalite.convert import import_hf, import_megatron, model_from_file
from megalite.convert.megatron_legacy import LegacyTensors, reordered_qkv
from megalite.convert.megatron_names import Rows
from megalite.convert.pickles import load_torch
from megalite.errors import CheckpointError

GOLDEN = Path(__file__).parents[1] / "golden"
Split = Callable[[str], tuple[int, str, str]]
"""Of a tensor's name: (pp rank, chunk, name there)."""


@pytest.fixture(scope="module")
def expected(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """Hashes of GPT-2's tensors."""
    path = import_hf(GOLDEN / "hf" / "gpt2", tmp_path_factory.mktemp("expected") / "gpt2")
    return read_manifest(path).tensors


def read_gpt2(folder: Path, out: Path) -> dict[str, Any]:
    return read_manifest(import_megatron(folder, out, model=model_from_file(GOLDEN / "hf" / "gpt2"))).tensors


def test_old_orders_of_qkv_are_put_right() -> None:
    stored = np.load(GOLDEN / "qkv_version.npz")
    value, heads = torch.from_numpy(stored["stored"]), int(stored["heads"])
    for version in (0, 1):
        assert np.array_equal(reordered_qkv(value, heads, version).numpy(), stored[f"from_version{version}"])


def test_requirement_77_channels_that_turn_in_pairs_are_put_in_halves() -> None:
    for case in json.loads((GOLDEN / "rope_permute.json").read_text()):
        heads, size = case["num_heads"], case["head_dim"]
        rows = Rows(heads, heads, size, size, turns_in_pairs=True)
        pairs = torch.tensor(case["gather_half_to_interleaved"])  # row i of theirs is this one of ours
        assert rows.halved(pairs[:, None]).flatten().tolist() == list(range(heads * size))
    half = Rows(1, 1, 6, 4, turns_in_pairs=True)  # two channels are not rotated
    assert half.halved(torch.tensor([0, 2, 1, 3, 4, 5])[:, None]).flatten().tolist() == [0, 1, 2, 3, 4, 5]


def test_requirement_76_rows_of_the_joint_matrix() -> None:
    for case in json.loads((GOLDEN / "qkv_rows.json").read_text()):
        rows = Rows(case["num_heads"], case["num_groups"], case["head_dim"], 0)
        theirs = torch.arange(len(case["rows"]))
        for part in "qkv":
            found = [case["rows"][i] for i in rows.take(theirs, part).tolist()]
            heads = case["num_heads"] if part == "q" else case["num_groups"]
            assert found == [f"{part}{head}.{channel}" for head in range(heads) for channel in range(case["head_dim"])]
        assert torch.equal(rows.join_qkv(*(rows.take(theirs, part) for part in "qkv")), theirs)


def legacy_names(name: str) -> str:
    """Core's names as they were before it."""
    for now, then in (
        ("decoder.final_layernorm", "language_model.encoder.final_norm"),
        ("decoder.", "language_model.encoder."),
        ("output_layer", "language_model.output_layer"),
        ("embedding.", "language_model.embedding."),
        ("input_layernorm", "input_norm"),
        ("pre_mlp_layernorm", "post_attention_norm"),
        ("linear_qkv", "query_key_value"),
        ("linear_proj", "dense"),
        ("linear_fc1", "dense_h_to_4h"),
        ("linear_fc2", "dense_4h_to_h"),
    ):
        if now in name:
            name = name.replace(now, then)
    return name


def write_ranks(folder: Path, split: Split, version: float, change: Callable[[str, Tensor], Tensor]) -> None:
    """GPT-2's file again, over pipeline ranks and chunks as `split` says."""
    stored = load_torch(GOLDEN / "torch_format" / "gpt2_tp1" / "iter_0000007" / "mp_rank_00" / "model_optim_rng.pt")
    ranks: dict[int, dict[str, Any]] = {}
    for name, value in stored["model"].items():
        if isinstance(value, Tensor):
            rank, chunk, there = split(name)
            common = {"args": argparse.Namespace(), "checkpoint_version": version}
            ranks.setdefault(rank, common).setdefault(chunk, {})[there] = change(name, value)
    for rank, content in ranks.items():
        path = folder / f"mp_rank_00_{rank:03d}" / "model_optim_rng.pt"
        path.parent.mkdir(parents=True)
        torch.save(content, path)


@pytest.mark.parametrize("chunk", ["model", "model1"])
def test_requirement_81_layers_of_later_stages_keep_their_global_numbers(chunk: str, expected: dict[str, Any], tmp_path: Path) -> None:
    """Two pipeline ranks, and two virtual stages on one of them: each counts its layers from 0. Names are those from before the core."""

    def split(name: str) -> tuple[int, str, str]:
        is_late = "layers.1." in name or "final" in name
        there = legacy_names(name.replace("layers.1.", "layers.0."))
        late = (1, "model", there) if chunk == "model" else (0, "model1", there)
        return late if is_late else (0, "model" if chunk == "model" else "model0", there)

    def old_order(name: str, value: Tensor) -> Tensor:  # version 0: [3, heads, size]
        return value.unflatten(0, (4, 3, -1)).transpose(0, 1).flatten(0, 2) if "linear_qkv" in name else value

    write_ranks(tmp_path / "iter_0000005", split, 0, old_order)
    (tmp_path / "latest_checkpointed_iteration.txt").write_text("5\n")
    assert read_gpt2(tmp_path, tmp_path / "in") == expected


def changed(tmp_path: Path, change: Callable[[dict[str, Any]], None]) -> Path:
    """GPT-2's file with a change."""
    shutil.copytree(GOLDEN / "torch_format" / "gpt2_tp1", tmp_path / "changed")
    path = tmp_path / "changed" / "iter_0000007" / "mp_rank_00" / "model_optim_rng.pt"
    content = load_torch(path)
    change(content["model"])
    torch.save(content, path.with_suffix(".new"))
    path.with_suffix(".new").rename(path)
    return tmp_path / "changed"


def test_requirement_79_a_tied_head_s_copy_must_be_the_embedding(expected: dict[str, Any], tmp_path: Path) -> None:
    def add_copy(weights: dict[str, Any]) -> None:
        weights["output_layer.weight"] = weights["embedding.word_embeddings.weight"].clone()

    assert read_gpt2(changed(tmp_path, add_copy), tmp_path / "in") == expected
    shutil.rmtree(tmp_path / "changed")

    def add_other(weights: dict[str, Any]) -> None:
        weights["output_layer.weight"] = weights["embedding.word_embeddings.weight"] + 1

    with pytest.raises(CheckpointError, match="differs from the embedding"):
        read_gpt2(changed(tmp_path, add_other), tmp_path / "other")


def test_missing_and_extra_tensors_are_listed_together(tmp_path: Path) -> None:
    def move(weights: dict[str, Any]) -> None:
        weights["decoder.layers.1.mlp.extra.weight"] = weights.pop("decoder.layers.1.mlp.linear_fc2.weight")

    with pytest.raises(CheckpointError) as caught:
        read_gpt2(changed(tmp_path, move), tmp_path / "in")
    assert "linear_fc2.weight is missing" in str(caught.value)
    assert "extra.weight has no place" in str(caught.value)


def test_missing_ranks_are_named(tmp_path: Path) -> None:
    shutil.copytree(GOLDEN / "torch_format" / "llama3_tp2" / "iter_0000007", tmp_path / "ranks")
    shutil.rmtree(tmp_path / "ranks" / "mp_rank_00")
    with pytest.raises(CheckpointError, match=r"lacks the files of \(tp, pp\) ranks \[\(0, 0\)\]"):
        LegacyTensors(tmp_path / "ranks")
