"""Tiny models and batches for the tests of the model: every size differs from every other one."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor

from megalite.comm import all_reduce
from megalite.config import ModelConfig
from megalite.data.batch import MicroBatch
from megalite.grid import Axis
from megalite.model import GPTStage, build_stage
from megalite.pipeline.partition import split_layers
from megalite.tensor_parallel.parameter import ParallelContext, logical_name, named_parameter_info

SEED = 71
GPT_STYLE: dict[str, Any] = dict(
    normalization="LayerNorm", activation="gelu", position_embedding_type="learned_absolute", add_bias_linear=True
)


def tiny_config(**changes: Any) -> ModelConfig:
    """H 40, N 8, K 2, D 6, F 56, V 131 in 144 rows, P 17, 5 layers."""
    sizes: dict[str, Any] = dict(
        num_layers=5,
        hidden_size=40,
        num_attention_heads=8,
        num_query_groups=2,
        kv_channels=6,
        ffn_hidden_size=56,
        vocab_size=131,
        make_vocab_size_divisible_by=36,
        max_position_embeddings=17,
        init_method_std=0.2,
    )
    return ModelConfig(**{**sizes, **changes})


def tiny_batch(first_sample: int = 0, vocab_size: int = 131) -> MicroBatch:
    """B 3, S 12; the positions of one sequence start again in the middle, one in five positions bears no loss."""
    generator = torch.Generator().manual_seed(first_sample)
    tokens = torch.randint(vocab_size, (3, 13), generator=generator)
    positions = torch.arange(12).repeat(3, 1)
    positions[1, 7:] -= 7
    return MicroBatch(
        tokens=tokens[:, :-1],
        labels=tokens[:, 1:],
        loss_mask=(torch.rand(3, 12, generator=generator) < 0.8).float(),
        position_ids=positions,
        first_sample=first_sample,
    )


def tiny_documents(batch: MicroBatch) -> MicroBatch:
    """The batch with documents of 1 to 12 tokens, cut differently in each sequence."""
    starts = torch.zeros(3, 12, dtype=torch.int32)
    starts[0, [1, 5, 11]] = 1
    starts[1, 7] = 1
    return replace(batch, document_ids=starts.cumsum(1, dtype=torch.int32))


def tiny_stages(config: ModelConfig, num_stages: int = 1, tp: Axis | None = None, *, sequence_parallel: bool = False) -> list[GPTStage]:
    """All stages of the model, with initial values, on the CPU."""
    ctx = ParallelContext(tp=tp or Axis.single(), sequence_parallel=sequence_parallel, device="meta")
    return [
        build_stage(config, spec, ctx, num_stages=num_stages, seed=SEED, device="cpu")
        for spec in split_layers(config.num_layers, num_stages)
    ]


def full_parameters(stage: GPTStage) -> dict[str, Tensor]:
    """{logical name: whole parameter}; collective over tp."""
    infos = named_parameter_info(stage)
    return {logical_name(name, infos[name]): _full(p.detach()) for name, p in stage.named_parameters()}


def full_gradients(stage: GPTStage) -> dict[str, Tensor]:
    """{name: whole gradient}, those that are partial over tp summed; collective over tp."""
    grads = {}
    for name, info in named_parameter_info(stage).items():
        grad = stage.get_parameter(name).grad
        assert grad is not None, f"{name} has no gradient"
        if info.partial_over_tp and isinstance(grad, DTensor):
            total = all_reduce(grad.to_local(), stage.ctx.tp)
            grad = DTensor.from_local(total, grad.device_mesh, grad.placements, run_check=False)
        grads[name] = _full(grad)
    return grads


def _full(tensor: Tensor) -> Tensor:
    return tensor.full_tensor() if isinstance(tensor, DTensor) else tensor
