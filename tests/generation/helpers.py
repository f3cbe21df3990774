"""A tiny untrained model as a checkpoint that one rank wrote."""

from __future__ import annotations

import warnings
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from megalite.checkpoint import Manifest, save_checkpoint
from megalite.checkpoint.store import describe
from megalite.config import DataConfig, ModelConfig, RunConfig
from megalite.data.batch import MicroBatch
from megalite.grid import Axis
from megalite.model import GPTStage, build_stage
from megalite.pipeline.partition import split_layers
from megalite.tensor_parallel.parameter import ParallelContext, logical_name, named_parameter_info

SEQ_LENGTH = 11


def tiny_run(**changes: Any) -> RunConfig:
    """V 257 in 275 rows (25 x 11), H 24, N 4, K 2, F 56, S 11, 3 layers; the bytes tokenizer."""
    sizes: dict[str, Any] = dict(
        num_layers=3,
        hidden_size=24,
        num_attention_heads=4,
        num_query_groups=2,
        ffn_hidden_size=56,
        vocab_size=257,
        make_vocab_size_divisible_by=25,
        init_method_std=0.4,
    )
    model = ModelConfig(**{**sizes, **changes})
    return RunConfig(model=model, data=DataConfig(seq_length=SEQ_LENGTH, tokenizer_type="bytes")).resolve()


def tiny_stage(config: RunConfig, seed: int = 5) -> GPTStage:
    """The whole model on one rank, with initial values."""
    ctx = ParallelContext(tp=Axis.single(), sequence_parallel=False)
    spec = split_layers(config.model.num_layers, 1)[0]
    return build_stage(config.model, spec, ctx, num_stages=1, seed=seed, device="cpu")


@torch.no_grad()
def plain_logits(stage: GPTStage, sequence: list[int]) -> Tensor:
    """Logits [V] of the token after `sequence` by the model's own forward pass over its newest tokens."""
    longest = stage.config.max_position_embeddings
    window = sequence if longest is None else sequence[-longest:]
    tokens = torch.tensor([window])
    batch = MicroBatch(
        tokens=tokens,
        labels=torch.zeros_like(tokens),
        loss_mask=torch.zeros_like(tokens, dtype=torch.float32),
        position_ids=torch.arange(tokens.shape[1])[None],
        first_sample=0,
    )
    return stage.logits(None, batch)[-1, 0, : stage.config.known_vocab_size]


def plain_greedy(stage: GPTStage, ids: list[int], num: int) -> list[int]:
    """The likeliest continuation, every token from the whole sequence before it."""
    sequence = list(ids)
    for _ in range(num):
        sequence.append(int(plain_logits(stage, sequence).argmax()))
    return sequence[len(ids) :]


def save_stage(folder: Path, stage: GPTStage, config: RunConfig, **data: Any) -> Path:
    """`folder` as the --save folder of a run that stopped at step 7, without optimizer state."""
    config = replace(config, data=replace(config.data, **data))
    infos = named_parameter_info(stage)
    tensors = {f"model.{logical_name(name, infos[name])}": p.detach() for name, p in stage.named_parameters()}
    named = {name: describe(tensor) for name, tensor in tensors.items()}
    manifest = Manifest(step=7, consumed_samples=70, config=config.to_dict(), tensors=named)
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="torch.distributed is disabled")  # one process is what is meant
        return save_checkpoint(folder, tensors, manifest, Axis.single("world"))
