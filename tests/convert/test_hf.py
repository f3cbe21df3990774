"""Models of Hugging Face: what was imported computes the stored logits in every layout, and an export is the folder again.

The stored models have odd shapes (heads, key/value heads, their ratio and head size all differ where the family allows it), non-zero biases
and distinct layers, so that a permutation, a missing bias or a local layer number cannot pass.
"""

from __future__ import annotations

import json
import shutil
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors import safe_open
from safetensors.torch import load_file, save_file

from megalite import comm
from megalite.checkpoint import read_manifest
from megalite.config import RunConfig
from megalite.convert import export_hf, import_hf
from megalite.data.batch import MicroBatch
from megalite.errors import CheckpointError, ConfigError
from megalite.testing.layouts import Layout
from megalite.testing.parity import build_in_this_world
from megalite.training.checkpoints import load_run
from tests.ranks import run_ranks

GOLDEN = Path(__file__).parents[1] / "golden"
FAMILIES = (
    *("gpt2", "llama2", "llama3", "llama3_tied_short", "llama_bias", "llama_dynamic", "llama_linear"),
    *("mistral_headdim", "mistral_window", "qwen2", "qwen2_yarn", "qwen3"),
)


@pytest.fixture(scope="module")
def imported(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("imported")
    for family in FAMILIES:
        import_hf(GOLDEN / "hf" / family, folder / family)
    return folder


def logits_of(folder: Path, layout: Layout) -> dict[str, float]:
    """{family: largest difference from the stored logits}, through the training program's own loading. In every rank."""
    return {family: _difference(folder / family, GOLDEN / "hf" / family, layout) for family in FAMILIES}


def _difference(checkpoint: Path, golden: Path, layout: Layout) -> float:
    example = np.load(golden / "io.npz")
    tokens = torch.from_numpy(example["input_ids"]).long()
    config = RunConfig.from_dict(read_manifest(checkpoint / "step-0000000").config)
    config = replace(
        config,
        data=replace(config.data, mock_data=True, seq_length=tokens.shape[1], tokenizer_type=None, tokenizer_model=None),
        train=replace(config.train, device="cpu", micro_batch_size=2, global_batch_size=4, train_iters=1),
        output=replace(config.output, load=str(checkpoint), load_weights_only=True),
    )
    tied = not config.model.untie_embeddings_and_output_weights
    run = build_in_this_world(replace(layout, tied=tied).apply(config).resolve())
    load_run(run, checkpoint)
    for stage in run.stages.values():
        stage.eval()
    positions = torch.arange(tokens.shape[1]).expand_as(tokens)
    batch = MicroBatch(tokens=tokens, labels=tokens, loss_mask=torch.ones(tokens.shape), position_ids=positions, first_sample=0)
    x, schedule = None, run.eval_program.schedule
    with torch.no_grad():
        for number, owner in enumerate(schedule.placement):
            is_last = number == schedule.num_stages - 1
            width = config.model.padded_vocab_size // layout.tp if is_last else config.model.hidden_size
            length = tokens.shape[1] if is_last or not layout.sequence_parallel else tokens.shape[1] // layout.tp
            out = torch.zeros(length, tokens.shape[0], width)
            if run.grid.pp.rank == owner:
                stage = run.stages[number]
                out = stage.logits(x, batch) if is_last else stage(x, batch)
            x = comm.broadcast(out.contiguous(), run.grid.pp, owner)
    assert x is not None
    logits = comm.all_gather(x, run.grid.tp, dim=2)[..., : config.model.known_vocab_size].transpose(0, 1)
    run.train_loader.close()
    return float(np.abs(logits.numpy() - example["logits"]).max())


LAYOUTS = [Layout(), Layout(tp=2), Layout(pp=2), Layout(tp=2, pp=2, sequence_parallel=True)]


@pytest.mark.parametrize("layout", LAYOUTS, ids=str)
def test_requirements_76_81_83_imported_models_compute_the_stored_logits(imported: Path, layout: Layout) -> None:
    for found in run_ranks(logits_of, layout.world_size, imported, layout, timeout=180):
        assert {family: difference for family, difference in found.items() if difference > 1e-4} == {}


@pytest.mark.parametrize("family", FAMILIES)
def test_requirements_79_80_84_an_export_is_the_imported_folder_again(imported: Path, family: str, tmp_path: Path) -> None:
    """Tensor by tensor, bit by bit: no padding, no second head, no name more or less; configuration and companions beside them."""
    out = export_hf(imported / family, tmp_path / "out")
    theirs, ours = load_file(GOLDEN / "hf" / family / "model.safetensors"), load_file(out / "model.safetensors")
    assert ours.keys() == theirs.keys()
    for name, value in theirs.items():
        assert torch.equal(ours[name], value), name
    with safe_open(out / "model.safetensors", framework="pt") as file:
        assert file.metadata() == {"format": "pt"}
    kept, written = (json.loads((folder / "config.json").read_text()) for folder in (GOLDEN / "hf" / family, out))
    assert written == kept | {"torch_dtype": "float32"}
    assert (out / "generation_config.json").read_bytes() == (GOLDEN / "hf" / family / "generation_config.json").read_bytes()


@pytest.mark.parametrize("family", FAMILIES)
def test_requirements_78_82_a_written_configuration_says_what_was_read(imported: Path, family: str, tmp_path: Path) -> None:
    """Without the imported one beside it: scaling, eps and all else survive in the spelling of transformers 4, and both spellings agree."""
    lonely = tmp_path / "lonely"
    shutil.copytree(imported / family, lonely, ignore=shutil.ignore_patterns("hf"))
    out = export_hf(lonely, tmp_path / "out")
    again = import_hf(out, tmp_path / "again")
    written = json.loads((out / "config.json").read_text())
    assert (written["bos_token_id"], written["eos_token_id"]) == (None, None)  # not known, and no default of the family's
    models = [read_manifest(path).config["model"] for path in (imported / family / "step-0000000", again)]
    assert models[0] == models[1]
    older = tmp_path / "older"
    shutil.copytree(GOLDEN / "hf" / family, older)
    shutil.copyfile(older / "config_v4.json", older / "config.json")
    assert read_manifest(import_hf(older, tmp_path / "v4")).config["model"] == models[0]


def test_sharded_folders_are_read_by_their_index_and_written_with_one(imported: Path, tmp_path: Path) -> None:
    path = import_hf(GOLDEN / "hf_sharded" / "llama3", tmp_path / "in")
    one, other = (read_manifest(p).tensors for p in (path, imported / "llama3" / "step-0000000"))
    assert one == other
    out = export_hf(tmp_path / "in", tmp_path / "out", max_shard_bytes=20_000)
    index = json.loads((out / "model.safetensors.index.json").read_text())
    files = sorted({*index["weight_map"].values()})
    assert files[0].startswith("model-00001-of-0000")
    assert len(files) > 2
    found = {name: file for file in files for name in load_file(out / file)}
    assert found == index["weight_map"]
    assert read_manifest(import_hf(out, tmp_path / "again")).tensors == one


def test_requirement_84_a_fine_tuned_run_exports_the_tokenizer_that_it_was_imported_with(tmp_path: Path) -> None:
    """Its --save folder has no companions of its own; its settings name the imported ones."""
    folder = folder_with(tmp_path, "llama2")
    (folder / "tokenizer.json").write_text("{}")
    imported = import_hf(folder, tmp_path / "imported")
    shutil.copytree(imported, tmp_path / "tuned" / imported.name)
    out = export_hf(tmp_path / "tuned", tmp_path / "out")
    assert {path.name for path in out.iterdir()} >= {"config.json", "tokenizer.json", "generation_config.json", "model.safetensors"}


def test_half_precision_is_written_as_asked(imported: Path, tmp_path: Path) -> None:
    out = export_hf(imported / "qwen2", tmp_path / "out", dtype="bf16")
    theirs = load_file(GOLDEN / "hf" / "qwen2" / "model.safetensors")
    assert all(torch.equal(value, theirs[name].bfloat16()) for name, value in load_file(out / "model.safetensors").items())
    assert json.loads((out / "config.json").read_text())["dtype"] == "bfloat16"


def folder_with(tmp_path: Path, family: str, **changes: object) -> Path:
    folder = tmp_path / "changed"
    shutil.copytree(GOLDEN / "hf" / family, folder)
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(config | changes))
    return folder


@pytest.mark.parametrize(
    ("family", "changes", "words"),
    [
        ("llama3", {"logit_scale": 0.5}, ["logit_scale (0.5) is not known here"]),
        ("llama3", {"hidden_act": "gelu", "new_key": 1}, ["hidden_act is 'gelu'", "new_key"]),
        ("llama3", {"rope_parameters": {"rope_type": "longrope", "rope_theta": 1e4}}, ["rope_type 'longrope'"]),
        ("llama3", {"rope_parameters": {"rope_type": "llama3", "rope_theta": 1e4, "factor": 2.0}}, ["needs original_max_position"]),
        ("gpt2", {"scale_attn_by_inverse_layer_idx": True}, ["scale_attn_by_inverse_layer_idx is True"]),
        ("qwen3", {"layer_types": ["sliding_attention", "full_attention"], "use_sliding_window": True, "sliding_window": 4}, ["alike"]),
    ],
)
def test_requirement_78_what_is_unknown_is_an_error(tmp_path: Path, family: str, changes: dict[str, object], words: list[str]) -> None:
    with pytest.raises(ConfigError) as caught:
        import_hf(folder_with(tmp_path, family, **changes), tmp_path / "out")
    assert all(word in str(caught.value) for word in words)
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize("family", ["mixtral", "gemma"])
def test_families_that_cannot_be_computed_are_refused(family: str, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=f"model_type '{family}' cannot be converted"):
        import_hf(GOLDEN / "hf" / family, tmp_path / "out")


def test_missing_and_extra_tensors_are_listed_together(tmp_path: Path) -> None:
    folder = folder_with(tmp_path, "llama3")
    tensors = load_file(folder / "model.safetensors")
    tensors["model.layers.7.mlp.up_proj.weight"] = tensors.pop("model.layers.1.mlp.up_proj.weight")
    save_file(tensors, folder / "model.safetensors")
    with pytest.raises(CheckpointError) as caught:
        import_hf(folder, tmp_path / "out")
    assert "model.layers.1.mlp.up_proj.weight is missing" in str(caught.value)
    assert "model.layers.7.mlp.up_proj.weight has no place" in str(caught.value)


def test_requirement_79_a_second_head_must_be_the_embedding(tmp_path: Path) -> None:
    folder = folder_with(tmp_path, "llama3_tied_short")
    tensors = load_file(folder / "model.safetensors")
    tensors["lm_head.weight"] = tensors["model.embed_tokens.weight"].clone()
    save_file(tensors, folder / "model.safetensors")
    import_hf(folder, tmp_path / "same")
    tensors["lm_head.weight"][3, 3] += 1
    save_file(tensors, folder / "model.safetensors")
    with pytest.raises(CheckpointError, match=r"lm_head\.weight differs from the embedding"):
        import_hf(folder, tmp_path / "other")


def test_nothing_is_written_over(imported: Path, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="--output"):
        import_hf(GOLDEN / "hf" / "gpt2", imported / "gpt2")
    (tmp_path / "file").write_text("mine")
    with pytest.raises(ConfigError, match="--output"):
        export_hf(imported / "gpt2", tmp_path)
