"""Checkpoints of Megatron, in and out, against files that Megatron wrote.

The reference for values is the same model's Hugging Face folder, whose import is compared with stored logits in test_hf.py. Manifests hold
a hash of every tensor, so equal tables of tensors are equal tensors.
"""

from __future__ import annotations

import io
import json
import warnings
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp

from megalite.checkpoint import read_manifest
from megalite.config import ModelConfig, RunConfig
from megalite.convert import export_megatron, import_hf, import_megatron, model_from_file
from megalite.convert.megatron_config import arguments_of, model_from_arguments
from megalite.convert.megatron_dist import DistTensors
from megalite.convert.pickles import Inert, load_torch
from megalite.errors import CheckpointError, ConfigError

GOLDEN = Path(__file__).parents[1] / "golden"
THEIRS = {
    "torch_dist/gpt2_homog_tp1": "gpt2",
    "torch_dist/llama3_homog_tp2": "llama3",
    "torch_dist/llama3_nonhomog_tp1": "llama3",
    "torch_format/gpt2_tp1": "gpt2",
    "torch_format/llama3_tp2": "llama3",
    "torch_format/qwen2_tp2": "qwen2",
}
BOTH_WAYS = ("gpt2", "llama2", "llama3", "llama_bias", "llama_linear", "mistral_headdim", "mistral_window", "qwen2", "qwen3")
VOCAB = 99


@pytest.fixture(scope="module")
def ours(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("ours")
    for family in (*BOTH_WAYS, "llama_dynamic", "qwen2_yarn", "llama3_tied_short"):
        import_hf(GOLDEN / "hf" / family, folder / family)
    return folder


def tensors_of(folder: Path) -> dict[str, Any]:
    found = read_manifest(folder / "step-0000000").tensors
    assert all("hash" in facts for facts in found.values())
    return found


def model_of(folder: Path) -> ModelConfig:
    return RunConfig.from_dict(read_manifest(folder / "step-0000000").config).model


@pytest.mark.parametrize("theirs", THEIRS)
def test_requirements_76_77_80_81_what_megatron_wrote_becomes_the_same_model(theirs: str, ours: Path, tmp_path: Path) -> None:
    """From tp 1 and 2, stacked and by layer, one folder and a file per rank, with padded vocabularies of two sizes."""
    family = THEIRS[theirs]
    import_megatron(GOLDEN / theirs, tmp_path / "in", model=model_from_file(GOLDEN / "hf" / family))
    assert tensors_of(tmp_path / "in") == tensors_of(ours / family)


@pytest.mark.parametrize(("theirs", "family"), [("gpt2_homog_tp1", "gpt2"), ("llama3_homog_tp2", "llama3")])
def test_an_export_is_what_megatron_writes(theirs: str, family: str, ours: Path, tmp_path: Path) -> None:
    """Key by key, value by value, and every object that its loader asks for."""
    written = DistTensors(export_megatron(ours / family, tmp_path / "out"))
    stored = DistTensors(GOLDEN / "torch_dist" / theirs / "iter_0000007")
    assert written.names == stored.names
    for name in stored.names:
        assert torch.equal(written.read(name)[:VOCAB], stored.read(name)[:VOCAB]), name
    assert written._metadata.state_dict_metadata.keys() >= stored._metadata.state_dict_metadata.keys()
    shapes = {key: facts.size for key, facts in written._facts.items()}
    assert shapes["decoder.layers.self_attention.linear_qkv.weight"][0] == 2  # stacked


@pytest.mark.parametrize("family", BOTH_WAYS)
def test_requirements_78_82_settings_and_weights_survive_the_way_there_and_back(family: str, ours: Path, tmp_path: Path) -> None:
    export_megatron(ours / family, tmp_path / "out")
    import_megatron(tmp_path / "out", tmp_path / "back", vocab_size=VOCAB)
    assert tensors_of(tmp_path / "back") == tensors_of(ours / family)
    there, back = model_of(ours / family), model_of(tmp_path / "back")
    computed = ("num_kv_heads", "head_dim", "has_qkv_bias", "has_attention_output_bias", "has_mlp_bias")
    assert [getattr(there, name) for name in computed] == [getattr(back, name) for name in computed]
    spelled = ("num_query_groups", "kv_channels", "add_qkv_bias", "add_attention_output_bias", "add_mlp_bias", "add_bias_linear")
    same = {name: getattr(there, name) for name in spelled}
    assert replace(back, **same) == there


@pytest.mark.parametrize(
    ("family", "words"), [("llama_dynamic", "dynamic"), ("qwen2_yarn", "yarn"), ("llama3_tied_short", "original_length 16, which is 8192")]
)
def test_requirement_78_scaling_that_megatron_cannot_express_is_refused(family: str, words: str, ours: Path, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=words):
        export_megatron(ours / family, tmp_path / "out")
    assert not (tmp_path / "out").exists()


def test_gate_and_up_apart_and_settings_among_the_tensors_are_read(ours: Path, tmp_path: Path) -> None:
    """The form with one piece per tensor, and newer versions' place for settings."""
    stored = DistTensors(GOLDEN / "torch_dist" / "llama3_nonhomog_tp1" / "iter_0000007")
    state: dict[str, Any] = {}
    for name in stored.names:
        if name.endswith("linear_fc1.weight"):
            state[f"{name}_w"], state[f"{name}_v"] = (part.clone() for part in stored.read(name).chunk(2))
        else:
            state[name] = stored.read(name)
    arguments = arguments_of(model_of(ours / "llama3"), 32)
    state["common_state/shard_0_1"] = [{"args": arguments, "checkpoint_version": 3.0}]
    folder = tmp_path / "iter_0000001"
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", UserWarning)  # one process is meant
        dcp.save(state, checkpoint_id=str(folder), planner=dcp.DefaultSavePlanner(flatten_state_dict=False), no_dist=True)
    (folder / "metadata.json").write_text(json.dumps({"sharded_backend": "torch_dist", "something_newer": 1}))
    import_megatron(folder, tmp_path / "in", vocab_size=VOCAB)
    assert tensors_of(tmp_path / "in") == tensors_of(ours / "llama3")


def test_what_the_arguments_do_not_say_is_asked_for(tmp_path: Path) -> None:
    with pytest.raises(ConfigError) as caught:
        import_megatron(GOLDEN / "torch_format" / "gpt2_tp1", tmp_path / "in")
    for words in ("lack ffn_hidden_size", "--model-config", "padded vocabulary (112)", "--vocab-size"):
        assert words in str(caught.value)


def test_arguments_of_other_models_are_refused_by_name() -> None:
    arguments = vars(arguments_of(ModelConfig(vocab_size=VOCAB), 32))
    assert model_from_arguments(arguments, VOCAB).num_layers == 2
    strange = {"num_experts": 8, "multi_latent_attention": True, "position_embedding_type": "mrope", "softmax_type": "learnable"}
    with pytest.raises(ConfigError) as caught:
        model_from_arguments(arguments | strange, VOCAB)
    assert all(f"{name} is" in str(caught.value) for name in strange)


def test_norms_around_zero_become_norms_around_one(ours: Path, tmp_path: Path) -> None:
    """apply_layernorm_1p: norms multiply with 1 + weight there."""
    folder = export_megatron(ours / "llama3", tmp_path / "out")
    common = load_torch(folder / "common.pt")
    common["args"].apply_layernorm_1p = True
    torch.save(common, folder / "common.pt")
    import_megatron(tmp_path / "out", tmp_path / "in", vocab_size=VOCAB)
    changed_names = {name for name, facts in tensors_of(tmp_path / "in").items() if facts != tensors_of(ours / "llama3")[name]}
    assert changed_names == {name for name in tensors_of(ours / "llama3") if "norm" in name}


def test_other_formats_are_named(tmp_path: Path) -> None:
    (tmp_path / "zarr").mkdir()
    (tmp_path / "zarr" / "metadata.json").write_text(json.dumps({"sharded_backend": "zarr"}))
    with pytest.raises(CheckpointError, match="format 'zarr'"):
        DistTensors(tmp_path / "zarr")
    with pytest.raises(CheckpointError, match="neither a checkpoint of Megatron nor a folder of them"):
        import_megatron(tmp_path, tmp_path / "in")


class Danger:
    """Would write a file while it is read."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def __reduce__(self) -> tuple[Any, ...]:
        return Path.touch, (self.path,)


def test_no_code_of_a_file_is_run(tmp_path: Path) -> None:
    torch.save({"args": Danger(tmp_path / "touched"), "model": {"x": torch.arange(3)}}, tmp_path / "file.pt")
    found = load_torch(tmp_path / "file.pt")
    assert isinstance(found["args"], Inert)
    assert found["model"]["x"].tolist() == [0, 1, 2]
    assert not (tmp_path / "touched").exists()
    with pytest.raises(CheckpointError, match="cannot be read"):
        load_torch(io.BytesIO(b"no pickle"))
