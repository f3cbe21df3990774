"""Adapters compute what their formula says: beside the weights, or merged into them."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from megalite.config import LoraConfig, ModelConfig
from megalite.data.batch import MicroBatch
from megalite.grid import Axis
from megalite.model import GPTStage
from megalite.model.adapters import add_adapters, begin_magnitudes
from megalite.model.materialize import materialize
from megalite.pipeline.partition import split_layers
from megalite.tensor_parallel.lora import Adapter
from megalite.tensor_parallel.parameter import ParallelContext

MODEL = ModelConfig(
    num_layers=2,
    hidden_size=24,
    num_attention_heads=4,
    num_query_groups=2,
    kv_channels=10,
    ffn_hidden_size=44,
    vocab_size=61,
    max_position_embeddings=12,
    add_bias_linear=True,
)
LORA = LoraConfig(lora_r=3, lora_alpha=5.0, lora_targets=("all-linear",), lora_ranks=("layers.1.mlp=2",), lora_alphas=("q_proj=9",))
CASES = [
    LORA,
    replace(LORA, use_rslora=True, lora_targets=("k_proj", "down_proj"), lora_ranks=()),
    replace(LORA, use_dora=True, lora_dropout=0.3),
]


def make_stage(model: ModelConfig, lora: LoraConfig) -> GPTStage:
    ctx = ParallelContext(tp=Axis.single(), sequence_parallel=False, device="meta")
    stage = GPTStage(model, split_layers(model.num_layers, 1)[0], ctx, num_stages=1, seed=3)
    add_adapters(stage, lora)
    materialize(stage, "", "cpu", 3)
    begin_magnitudes(stage)
    return stage


def adapters_of(stage: GPTStage) -> dict[str, Adapter]:
    return {name.removesuffix(".adapter"): module for name, module in stage.named_modules() if isinstance(module, Adapter)}


def batch() -> MicroBatch:
    tokens = torch.arange(22).view(2, 11) * 7 % MODEL.known_vocab_size
    return MicroBatch(
        tokens=tokens,
        labels=tokens.roll(-1, 1),
        loss_mask=torch.ones(tokens.shape),
        position_ids=torch.arange(tokens.shape[1]).expand_as(tokens),
        first_sample=0,
    )


@torch.no_grad()
def scatter_(stage: GPTStage) -> None:
    """Give all adapters values that matter."""
    generator = torch.Generator().manual_seed(5)
    for adapter in adapters_of(stage).values():
        for parameter in adapter.parameters():
            parameter.add_(torch.randn(parameter.shape, generator=generator), alpha=0.3)


@pytest.mark.parametrize("activation", ["swiglu", "gelu"])
@pytest.mark.parametrize("lora", CASES, ids=["lora", "rslora", "dora"])
def test_adapters_give_the_logits_of_merged_weights(lora: LoraConfig, activation: str) -> None:
    model = replace(MODEL, activation=activation)
    stage, plain = make_stage(model, lora), make_stage(model, LoraConfig())
    tokens = batch()
    with torch.no_grad():
        assert torch.allclose(stage.eval().logits(None, tokens), plain.eval().logits(None, tokens), atol=1e-6), "B starts as 0"
        scatter_(stage)
        expected_ranks = {name: lora.rank_of(name) for name, module in stage.named_modules() if hasattr(module, "adapter_shape")}
        assert {name: adapter.settings.rank for name, adapter in adapters_of(stage).items()} == {
            name: rank for name, rank in expected_ranks.items() if rank
        }
        for name, adapter in adapters_of(stage).items():
            weight = plain.get_parameter(f"{name}.weight")
            merged = weight + lora.scale_of(name) * adapter.b @ adapter.a
            if adapter.magnitude is not None:
                merged *= (adapter.magnitude / merged.norm(dim=1))[:, None]
            weight.copy_(merged)
        torch.testing.assert_close(stage.logits(None, tokens), plain.logits(None, tokens), atol=2e-5, rtol=0)


def test_only_adapters_are_trained_and_their_gradients_are_those_of_the_formula() -> None:
    stage = make_stage(MODEL, LORA)
    scatter_(stage)
    assert all(parameter.requires_grad == (".adapter." in name) for name, parameter in stage.named_parameters())
    stage(None, batch()).backward()
    name = "layers.0.attention.o_proj"
    got = adapters_of(stage)[name]
    plain = make_stage(MODEL, LoraConfig())
    with torch.no_grad():
        for other, adapter in adapters_of(stage).items():
            plain.get_parameter(f"{other}.weight").add_(adapter.b @ adapter.a, alpha=LORA.scale_of(other))
    plain(None, batch()).backward()
    dw, scale = plain.get_parameter(f"{name}.weight").grad, LORA.scale_of(name)
    assert dw is not None and got.a.grad is not None and got.b.grad is not None
    torch.testing.assert_close(got.a.grad, scale * got.b.detach().T @ dw, atol=1e-4, rtol=1e-4)
    torch.testing.assert_close(got.b.grad, scale * dw @ got.a.detach().T, atol=1e-4, rtol=1e-4)


def test_dropout_belongs_to_training_and_to_a_place() -> None:
    lora = replace(LORA, lora_dropout=0.5)
    stage = make_stage(MODEL, lora)
    scatter_(stage)
    with torch.no_grad():
        first, again = stage.train()(None, batch()), stage(None, batch())
        assert torch.equal(first, again), "the same micro-batch draws the same masks"
        assert not torch.equal(first, stage.eval()(None, batch()))
        other = stage.train()(None, replace(batch(), first_sample=4))
        assert not torch.equal(first, other)
