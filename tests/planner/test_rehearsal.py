"""What a stage keeps, against the formulas: Korthikanti et al. 2022 (arXiv:2205.05198) adapted to fused attention, and to layers here.

Letters: t tokens of this rank's share, h hidden, a query heads, k key/value heads, d head size, f ffn; 2 bytes per number in bf16.
"""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from megalite.config import ModelConfig
from megalite.config_numerics import MemoryConfig
from megalite.grid import Axis
from megalite.model import GPTStage
from megalite.pipeline.partition import StageSpec
from megalite.planner.rehearsal import BatchShape, rehearse
from megalite.planner.walk import StageMemory
from megalite.tensor_parallel.deferral import WeightGradQueue
from megalite.tensor_parallel.parameter import ParallelContext

S, B = 192, 3
LLAMA = ModelConfig(
    num_layers=6,
    hidden_size=96,
    num_attention_heads=8,
    num_query_groups=4,
    kv_channels=20,
    ffn_hidden_size=264,
    vocab_size=509,
    init_method_std=0.02,
)
GPT2 = replace(
    LLAMA,
    num_query_groups=None,
    normalization="LayerNorm",
    activation="gelu_tanh",
    add_bias_linear=True,
    position_embedding_type="none",
)


def stage_memory(
    model: ModelConfig,
    layers: int,
    *,
    tp: int = 1,
    memory: MemoryConfig | None = None,
    splits: bool = False,
    dtype: torch.dtype = torch.bfloat16,
) -> StageMemory:
    """Of a stage in the middle of a pipeline."""
    axis = Axis.single("tp") if tp == 1 else Axis.rehearsal("tp", tp)
    spec = StageSpec(stage=1, first_layer=1, num_layers=layers, has_embedding=False, has_head=False)

    def build(queue: WeightGradQueue | None) -> GPTStage:
        context = ParallelContext(tp=axis, sequence_parallel=tp > 1, device="meta", weight_grads=queue)
        return GPTStage(model, spec, context, num_stages=3, seed=1, memory=memory)

    shape = BatchShape(sequence=S, micro_batch=B, edge=(S // tp, B, model.hidden_size), dtype=dtype)
    return rehearse(build, shape, splits_backward=splits)


def per_layer(model: ModelConfig, **settings: object) -> int:
    """Bytes that one more layer keeps."""
    two, one = (stage_memory(model, layers, **settings).kept for layers in (2, 1))  # type: ignore[arg-type]
    return two - one


def llama_formula(model: ModelConfig, tp: int = 1, itemsize: int = 2) -> int:
    t, h, d, f = S * B, model.hidden_size, model.head_dim, model.ffn_size
    a, k = model.num_attention_heads, model.num_kv_heads
    residual = itemsize * 4 * t * h // tp + 2 * 4 * t // tp  # x, norm, x2, norm2; two statistics
    return residual + itemsize * t * d * (2 * a + 2 * k) // tp + 4 * t * a // tp + itemsize * 3 * t * f // tp


@pytest.mark.parametrize("tp", [1, 2, 4])
def test_llama_layer(tp: int) -> None:
    assert per_layer(LLAMA, tp=tp) == llama_formula(LLAMA, tp)


def test_llama_layer_in_fp32() -> None:
    assert per_layer(LLAMA, dtype=torch.float32) == llama_formula(LLAMA, itemsize=4)


def test_gpt2_layer() -> None:
    """With h = a d and f = 4 h: 32 t h bytes and the log-sum-exp; beside them the statistics and fp32 weights of two norms."""
    model = replace(GPT2, hidden_size=160, ffn_hidden_size=640)
    t, h, a = S * B, 160, 8
    beside = per_layer(model) - (32 * t * h + 4 * t * a)
    assert 0 < beside <= 4 * 4 * t + 4 * 4 * h


def test_full_recomputation_keeps_the_input() -> None:
    assert per_layer(LLAMA, memory=MemoryConfig(recompute_granularity="full")) == 2 * S * B * LLAMA.hidden_size


@pytest.mark.parametrize(
    ("modules", "saved"),
    [
        (("core_attn",), lambda t, m: 4 * t * m.num_attention_heads),
        (("mlp_act",), lambda t, m: 2 * t * m.ffn_size),
        (("norm",), lambda t, m: 2 * (2 * t * m.hidden_size + 4 * t)),
    ],
)
def test_selective_recomputation_saves(modules: tuple[str, ...], saved: object) -> None:
    memory = MemoryConfig(recompute_granularity="selective", recompute_modules=modules)
    assert per_layer(LLAMA) - per_layer(LLAMA, memory=memory) == saved(S * B, LLAMA)  # type: ignore[operator]


def test_a_split_backward_leaves_inputs_and_gradients_of_matrices() -> None:
    t, h, f = S * B, LLAMA.hidden_size, LLAMA.ffn_size
    q, kv = LLAMA.num_attention_heads * LLAMA.head_dim, LLAMA.num_kv_heads * LLAMA.head_dim
    inputs = 2 * t * (h + q + h + f)
    gradients = 2 * t * (q + 2 * kv + h + 2 * f + h)
    norms = 2 * 2 * h  # the weight gradients of the two norms, complete already
    one, two = (stage_memory(LLAMA, layers, splits=True).deferred for layers in (1, 2))
    assert two - one == inputs + gradients + norms


def test_memory_rises_at_least_to_what_is_kept() -> None:
    found = stage_memory(LLAMA, 2, splits=True)
    assert found.forward_rise >= found.kept > 0
    assert found.backward_rise > 0 and found.weight_rise > 0
