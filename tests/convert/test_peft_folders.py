"""Folders of PEFT: what is written means what was read, settings choose as they do in PEFT, and what cannot be represented is refused."""

from __future__ import annotations

import json
import shutil
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from megalite.config import LoraConfig, ModelConfig, RunConfig
from megalite.convert import export_peft, import_peft, load_any
from megalite.convert.adapters import adapter_shapes, merged_tensors
from megalite.convert.base import open_base
from megalite.convert.hf_config import family_of
from megalite.convert.peft_export import peft_adapters, write_peft
from megalite.convert.peft_import import read_peft
from megalite.convert.writing import logical_shapes, write_weights
from megalite.errors import CheckpointError, ConfigError
from tests.convert.lora_cases import CASES, GOLDEN, base_of, import_all, logits_of, stored_run


@pytest.fixture(scope="module")
def imported(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return import_all(tmp_path_factory.mktemp("imported"))


@pytest.mark.parametrize("case", CASES)
def test_an_export_is_the_imported_folder_again(case: str, imported: Path, tmp_path: Path) -> None:
    """Tensor by tensor, bit by bit, and a configuration that gives every layer the same rank and scale."""
    out = export_peft(imported / case, tmp_path / "out")
    theirs, ours = (load_file(folder / "adapter_model.safetensors") for folder in (GOLDEN / "lora" / case, out))
    assert ours.keys() == theirs.keys()
    for name, value in theirs.items():
        assert torch.equal(ours[name], value), name
    model = stored_run(imported / case).model
    before, after = (read_peft(folder, model, family_of(model))[0] for folder in (GOLDEN / "lora" / case, out))
    assert before == after
    written = json.loads((out / "adapter_config.json").read_text())
    assert written["base_model_name_or_path"] == str(base_of(case).resolve())
    assert written["fan_in_fan_out"] == (case == "gpt2_all")


def random_adapters(family: str, lora: LoraConfig) -> tuple[ModelConfig, dict[str, Tensor]]:
    model = open_base(GOLDEN / "hf" / family).model
    made = torch.Generator().manual_seed(3)
    shapes = adapter_shapes(lora, model)
    return model, {name: torch.randn(shape, generator=made) + name.endswith("magnitude") for name, shape in shapes.items()}


ALL = LoraConfig(lora_r=3, lora_alpha=5.0, lora_targets=("all-linear",))
UNLIKE = {
    "block form": ("gpt2", ALL),
    "other ranks, scales and a gap": (
        "gpt2",
        replace(ALL, use_rslora=True, lora_ranks=("k_proj=2", r"layers\.1\.attention\.q_proj=0"), lora_alphas=("v_proj=7",)),
    ),
    "lengths of a part": (
        "gpt2",
        replace(ALL, use_dora=True, lora_targets=("q_proj", "v_proj"), lora_ranks=(r"layers\.0.*v_proj=0",)),
    ),
    "uneven": (
        "llama3",
        replace(
            ALL, use_dora=True, use_rslora=True, lora_ranks=("q_proj=5", "mlp=0", "layers.1.mlp.up_proj=4"), lora_alphas=("o_pr=2.25",)
        ),
    ),
    "dropped directions": ("llama3", replace(ALL, lora_average_rank=1.5, use_rslora=True)),
}


@pytest.mark.parametrize("name", UNLIKE)
def test_what_peft_says_otherwise_makes_the_same_weights(name: str, tmp_path: Path) -> None:
    family, lora = UNLIKE[name]
    model, adapters = random_adapters(family, lora)
    if lora.lora_average_rank is not None:
        for part in (part for part in adapters if part.endswith("adapter.b")):
            adapters[part][:, 1:] = 0 if "up_proj" in part else adapters[part][:, 1:]
    read = open_base(GOLDEN / "hf" / family).read
    write_peft(tmp_path, *peft_adapters(lora, adapters, model, family, lambda layer: read(f"{layer}.weight")))
    found, again = read_peft(tmp_path, model, family)
    base = {weight: read(weight) for weight in logical_shapes(model)}
    wanted, merged = merged_tensors(base, lora, adapters), merged_tensors(base, found, again)
    assert any(not torch.equal(base[weight], wanted[weight]) for weight in base)
    for weight, value in wanted.items():
        torch.testing.assert_close(merged[weight], value, atol=2e-5, rtol=0, msg=weight)
    if lora.lora_average_rank is not None:
        assert json.loads((tmp_path / "adapter_config.json").read_text())["rank_pattern"] == {"up_proj": 1}


@pytest.mark.parametrize("case", [*CASES, *(name for name in UNLIKE)])
def test_peft_loads_exports_and_computes_what_we_do(case: str, imported: Path, tmp_path: Path) -> None:
    peft = pytest.importorskip("peft")
    transformers = pytest.importorskip("transformers")
    source = imported / case if case in CASES else tmp_path / "adapters"
    family = CASES.get(case) or UNLIKE[case][0]
    if case not in CASES:
        model, adapters = random_adapters(family, UNLIKE[case][1])
        config = RunConfig(model=model, lora=replace(UNLIKE[case][1], lora_base=str(GOLDEN / "hf" / family)))
        shapes = {name: value.shape for name, value in adapters.items()}
        write_weights(source, config, shapes, lambda name: adapters[name].clone(), tmp_path)
    plain = transformers.AutoModelForCausalLM.from_pretrained(GOLDEN / "hf" / family, dtype=torch.float32)
    theirs = peft.PeftModel.from_pretrained(plain, export_peft(source, tmp_path / "out")).eval()
    tokens = torch.arange(48).view(2, 24)
    with torch.no_grad():
        wanted = theirs(tokens).logits
    torch.testing.assert_close(logits_of(load_any(source)[0], tokens, wanted.shape[-1]), wanted, atol=1e-4, rtol=1e-5)


def changed(tmp_path: Path, case: str, **changes: object) -> Path:
    """A copy of a stored folder with other settings; None removes one."""
    folder = tmp_path / "changed"
    shutil.copytree(GOLDEN / "lora" / case, folder)
    config = json.loads((folder / "adapter_config.json").read_text()) | changes
    (folder / "adapter_config.json").write_text(json.dumps({key: value for key, value in config.items() if value is not None}))
    return folder


@pytest.mark.parametrize(
    ("case", "base", "words"),
    [
        ("llama_bias_loraonly", "llama_bias", ["bias is 'lora_only'", "only 'none'"]),
        ("llama3_save_head", "llama3", ["modules_to_save (['lm_head', 'embed_tokens'])"]),
        ("mixtral_att", "mixtral", ["model_type 'mixtral' cannot be converted"]),
        ("mixtral_experts_per_expert", "llama3", ["names no linear layer of this model (llama)"]),
    ],
)
def test_adapters_that_cannot_be_represented_are_refused(case: str, base: str, words: list[str], tmp_path: Path) -> None:
    with pytest.raises(ConfigError) as caught:
        import_peft(GOLDEN / "lora" / case, tmp_path / "out", GOLDEN / "hf" / base)
    assert all(word in str(caught.value) for word in words)
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"use_qalora": True, "trainable_token_indices": [1], "new_key": 3}, ["use_qalora", "trainable_token_indices", "new_key (3)"]),
        ({"init_lora_weights": "pissa"}, ["init_lora_weights is 'pissa'"]),
        ({"peft_type": "IA3", "task_type": "SEQ_CLS"}, ["peft_type is 'IA3'", "task_type is 'SEQ_CLS'"]),
        ({"target_modules": ["q_proj", "v_proj", "lm_head"]}, ["names lm_head"]),
        ({"target_modules": r".*\.(embed_tokens|q_proj)"}, ["names model.embed_tokens"]),
        ({"target_modules": "(", "r": 0, "alpha_pattern": {"q": -1}}, ["target_modules '('", "r is 0", "alpha_pattern 'q' is -1"]),
        ({"peft_type": None}, ["peft_type is missing"]),
    ],
)
def test_settings_that_might_change_the_computation_are_refused(changes: dict[str, object], words: list[str], tmp_path: Path) -> None:
    with pytest.raises(ConfigError) as caught:
        import_peft(changed(tmp_path, "llama3_qv_r4", **changes), tmp_path / "out", base_of("llama3_qv_r4"))
    assert all(word in str(caught.value) for word in words)


def ranks_of(lora: LoraConfig) -> Iterator[tuple[str, int]]:
    for number in range(2):
        for part in ("attention.q_proj", "attention.v_proj", "mlp.up_proj", "mlp.down_proj"):
            if rank := lora.rank_of(f"layers.{number}.{part}"):
                yield f"{number}.{part.rpartition('.')[2]}", rank


@pytest.mark.parametrize(
    ("changes", "wanted"),
    [
        ({"target_modules": r"model\.layers\.1\.self_attn\.(q|v)_proj"}, {"1.q_proj": 4, "1.v_proj": 4}),
        ({"exclude_modules": ["layers.0.self_attn.q_proj"]}, {"0.v_proj": 4, "1.q_proj": 4, "1.v_proj": 4}),
        ({"layers_to_transform": 0}, {"0.q_proj": 4, "0.v_proj": 4}),
        ({"layers_to_transform": [1, 5], "layers_pattern": ["blocks", "layers"]}, {"1.q_proj": 4, "1.v_proj": 4}),
        # of two entries that fit the first counts, and an end must begin after a dot
        ({"rank_pattern": {"1.self_attn.v_proj": 9, "v_proj": 2, "_proj": 7}},
         {"0.q_proj": 4, "0.v_proj": 2, "1.q_proj": 4, "1.v_proj": 9}),
        ({"target_modules": "all-linear", "rank_pattern": {"mlp.*": 1}},
         {f"{n}.{p}": 1 if p in ("up_proj", "down_proj") else 4 for n in (0, 1) for p in ("q_proj", "v_proj", "up_proj", "down_proj")}),
    ],
)  # fmt: skip
def test_targets_and_patterns_choose_as_in_peft(changes: dict[str, object], wanted: dict[str, int], tmp_path: Path) -> None:
    folder = changed(tmp_path, "llama3_qv_r4", **changes)
    save_file({}, folder / "adapter_model.safetensors")
    model = open_base(base_of("llama3_qv_r4")).model
    lora, adapters = read_peft(folder, model, "llama")
    assert dict(ranks_of(lora)) == wanted
    assert adapters["layers.1.attention.q_proj.adapter.a"].std() > 0.05 if "1.q_proj" in wanted else True
    assert all(not value.any() for name, value in adapters.items() if name.endswith(".b"))


def test_a_chosen_layer_without_tensors_changes_nothing(tmp_path: Path) -> None:
    folder = changed(tmp_path, "llama3_dora")
    tensors = load_file(folder / "adapter_model.safetensors")
    save_file(
        {name: value for name, value in tensors.items() if "layers.0.self_attn.q_proj" not in name}, folder / "adapter_model.safetensors"
    )
    opened = open_base(base_of("llama3_dora"))
    name = "layers.0.attention.q_proj.weight"
    lora, adapters = read_peft(folder, opened.model, "llama", lambda layer: opened.read(f"{layer}.weight"))
    merged = merged_tensors({name: opened.read(name)}, lora, adapters)
    torch.testing.assert_close(merged[name], opened.read(name))
    with pytest.raises(ConfigError, match="the lengths of DoRA begin"):
        read_peft(folder, opened.model, "llama")


def test_tensors_that_are_missing_too_many_or_of_another_shape_are_listed_together(tmp_path: Path) -> None:
    folder = changed(tmp_path, "llama3_qv_r4")
    tensors = load_file(folder / "adapter_model.safetensors")
    front = "base_model.model.model.layers"
    del tensors[f"{front}.0.self_attn.q_proj.lora_B.weight"]
    tensors[f"{front}.1.self_attn.q_proj.lora_A.weight"] = torch.zeros(5, 32)
    tensors[f"{front}.7.self_attn.q_proj.lora_A.weight"] = torch.zeros(4, 32)
    save_file(tensors, folder / "adapter_model.safetensors")
    with pytest.raises(CheckpointError) as caught:
        import_peft(folder, tmp_path / "out", base_of("llama3_qv_r4"))
    for words in (
        "0.self_attn.q_proj.lora_B.weight is missing",
        "7.self_attn.q_proj.lora_A.weight has no place",
        "[5, 32], [4, 32] is wanted",
    ):
        assert words in str(caught.value)
    assert not (tmp_path / "out").exists()


def test_pickles_and_empty_folders_are_refused_with_a_remedy(tmp_path: Path) -> None:
    folder = changed(tmp_path, "llama3_qv_r4")
    (folder / "adapter_model.safetensors").rename(folder / "adapter_model.bin")
    with pytest.raises(ConfigError, match="call save_pretrained"):
        import_peft(folder, tmp_path / "out", base_of("llama3_qv_r4"))
    with pytest.raises(ConfigError, match=r"has no adapter_config\.json"):
        import_peft(tmp_path, tmp_path / "out", base_of("llama3_qv_r4"))
