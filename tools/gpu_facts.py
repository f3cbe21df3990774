"""What a card can do, and what ran on it: data sheets, measured matrix products, and torch.profiler's kernels sorted into kinds of work.

Kernels are known by their names: those of torch 2.11 to 2.13 with cuBLAS, cuDNN, CUTLASS and Triton, and of operators on a CPU. What no
rule knows is "other", so that a new name shows as such and not as something it is not.
"""

from __future__ import annotations

import re
import statistics
import time
from collections.abc import Mapping

import torch

__all__ = ["ATTENTION_OPS", "kernel_kind", "kernel_shares", "matmul_tflops", "peak_tflops", "synchronize"]

_PEAK_TFLOPS = {"H200": 989.4, "H100 PCIe": 756.0, "H100 NVL": 835.0, "H100": 989.4, "A100": 312.0}
"""Dense bf16, from the makers' data sheets; the first name that is part of the card's."""

ATTENTION_OPS = {
    "aten::_scaled_dot_product_flash_attention": "flash",
    "aten::_scaled_dot_product_cudnn_attention": "cuDNN",
    "aten::_scaled_dot_product_efficient_attention": "memory-efficient",
    "aten::_scaled_dot_product_attention_math": "math",
    "aten::_scaled_dot_product_flash_attention_for_cpu": "flash (CPU)",
}
"""Operators that F.scaled_dot_product_attention hands over to: {operator: what it is called}."""

_RULES = (
    ("communication", r"nccl"),
    ("matmul", r"^triton_tem_(?!.*flex_attention)"),
    ("elementwise, norm", r"^triton_(poi|red|per|for)_"),
    ("attention", r"flash|fmha|sdpa|scaled_dot_product|attention"),
    ("optimizer", r"adam|multi_tensor_apply|lpnorm|_foreach"),
    ("matmul", r"gemm|nvjet|cutlass|xmma|wgmma|splitk|gemv|aten::(mm|addmm|bmm|matmul|linear)\b|mkldnn"),
    ("memory, copies", r"memcpy|memset|copy|fill|cat(array|_)|aten::(cat|empty|zero_|split)|chunk_cat"),
    ("elementwise, norm", r"elementwise|norm|reduce|softmax|gather|scatter|index|embedding|triton|vectorized|functor|aten::\w+"),
)


def peak_tflops(card: str) -> float | None:
    """Of the card with this name; None where it is not known."""
    return next((value for name, value in _PEAK_TFLOPS.items() if name in card), None)


def synchronize(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def matmul_tflops(device: torch.device, size: int, repeats: int = 30) -> float:
    """Median rate of size^3 products in bf16."""
    a, b = (torch.randn(size, size, device=device, dtype=torch.bfloat16) for _ in "ab")
    out, seconds = torch.empty_like(a), []
    for _ in range(repeats + 5):
        synchronize(device)
        begin = time.perf_counter()
        torch.mm(a, b, out=out)
        synchronize(device)
        seconds.append(time.perf_counter() - begin)
    return 2 * size**3 / statistics.median(seconds[5:]) / 1e12


def kernel_kind(name: str) -> str:
    """Of the first rule that knows `name`; "other" where none does."""
    return next((kind for kind, pattern in _RULES if re.search(pattern, name, re.IGNORECASE)), "other")


def kernel_shares(times: Mapping[str, float]) -> dict[str, float]:
    """{kind: share of the sum of `times`}, all kinds, adding up to 1 but for rounding; empty where nothing took time."""
    total = sum(times.values())
    if total <= 0:
        return {}
    shares = dict.fromkeys([*(kind for kind, _ in _RULES), "other"], 0.0)
    for name, value in times.items():
        shares[kernel_kind(name)] += value / total
    return {kind: round(share, 4) for kind, share in shares.items()}
