"""Logits of small models that another implementation wrote: weights go in by name, logits agree."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor

from megalite.config import ModelConfig
from megalite.data.batch import MicroBatch
from tests.model.helpers import tiny_stages

GOLDEN = Path(__file__).parents[1] / "golden" / "hf"

LLAMA_NAMES = {
    "attention_norm": "input_layernorm",
    "mlp_norm": "post_attention_layernorm",
    **{f"attention.{part}_proj": f"self_attn.{part}_proj" for part in "qkvo"},
    **{f"mlp.{part}_proj": f"mlp.{part}_proj" for part in ("gate", "up", "down")},
}
SIZES: dict[str, Any] = dict(
    hidden_size=32, num_attention_heads=4, vocab_size=99, make_vocab_size_divisible_by=10, max_position_embeddings=64
)
MODELS: dict[str, dict[str, Any]] = {
    "mistral_headdim": dict(num_query_groups=2, kv_channels=16, ffn_hidden_size=48, rotary_base=1e6),
    "qwen2": dict(
        num_query_groups=2,
        ffn_hidden_size=48,
        rotary_base=1e6,
        norm_epsilon=1e-6,
        add_qkv_bias=True,
        untie_embeddings_and_output_weights=False,
    ),
    "gpt2": dict(
        normalization="LayerNorm",
        activation="gelu_tanh",
        position_embedding_type="learned_absolute",
        add_bias_linear=True,
        untie_embeddings_and_output_weights=False,
    ),
}


def llama_weights(weights: dict[str, Tensor]) -> dict[str, Tensor]:
    """Our names; q, k, v stand alone in these files, and linear weights are [out, in] as ours."""
    ours = {
        "embedding.word.weight": weights["model.embed_tokens.weight"],
        "head.norm.weight": weights["model.norm.weight"],
    }
    if "lm_head.weight" in weights:
        ours["head.output.weight"] = weights["lm_head.weight"]
    for layer in range(2):
        for our, their in LLAMA_NAMES.items():
            for kind in ("weight", "bias"):
                value = weights.get(f"model.layers.{layer}.{their}.{kind}")
                if value is not None:
                    ours[f"layers.{layer}.{our}.{kind}"] = value
    return ours


def gpt2_weights(weights: dict[str, Tensor]) -> dict[str, Tensor]:
    """Our names; linear weights are [in, out] there, and q, k, v one after another in one tensor."""
    ours = {"embedding.word.weight": weights["transformer.wte.weight"]}
    ours["embedding.position.weight"] = weights["transformer.wpe.weight"]
    for kind in ("weight", "bias"):
        ours[f"head.norm.{kind}"] = weights[f"transformer.ln_f.{kind}"]
        for layer in range(2):
            theirs, name = f"transformer.h.{layer}", f"layers.{layer}"
            ours[f"{name}.attention_norm.{kind}"] = weights[f"{theirs}.ln_1.{kind}"]
            ours[f"{name}.mlp_norm.{kind}"] = weights[f"{theirs}.ln_2.{kind}"]
            qkv = weights[f"{theirs}.attn.c_attn.{kind}"].t().chunk(3)
            for part, value in zip("qkv", qkv, strict=True):
                ours[f"{name}.attention.{part}_proj.{kind}"] = value
            ours[f"{name}.attention.o_proj.{kind}"] = weights[f"{theirs}.attn.c_proj.{kind}"].t()
            ours[f"{name}.mlp.up_proj.{kind}"] = weights[f"{theirs}.mlp.c_fc.{kind}"].t()
            ours[f"{name}.mlp.down_proj.{kind}"] = weights[f"{theirs}.mlp.c_proj.{kind}"].t()
    return ours


@pytest.mark.parametrize("name", MODELS)
def test_logits_agree_with_the_other_implementation(name: str) -> None:
    stage = tiny_stages(ModelConfig(**SIZES, **MODELS[name]))[0].eval()
    weights = load_file(GOLDEN / name / "model.safetensors")
    ours = gpt2_weights(weights) if name == "gpt2" else llama_weights(weights)
    params = dict(stage.named_parameters())
    assert ours.keys() == params.keys()
    with torch.no_grad():
        for key, value in ours.items():
            rows = params[key][:99] if "embedding.word" in key or "head.output" in key else params[key]
            assert rows.shape == value.shape, key
            rows.copy_(value)

    example = np.load(GOLDEN / name / "io.npz")
    tokens = torch.from_numpy(example["input_ids"]).long()
    positions = torch.arange(tokens.shape[1]).expand_as(tokens)
    batch = MicroBatch(tokens=tokens, labels=tokens, loss_mask=torch.ones(tokens.shape), position_ids=positions, first_sample=0)
    with torch.no_grad():
        logits = stage.logits(None, batch)[..., :99].transpose(0, 1)
    np.testing.assert_allclose(logits.numpy(), example["logits"], atol=1e-4, rtol=0)
