"""Training speed on this machine's CPU: megalite against what its users would take instead, on the same model and data.

    python tools/bench_train.py                 small model, 5 rounds
    python tools/bench_train.py --quick         one rank against the plain loop, within a minute
    python tools/bench_train.py --rounds 3 --steps 4

One rank (2 threads): a plain PyTorch loop, transformers' Llama where the extra `bench` is installed. Two ranks (1 thread each): the plain
model under DDP, under FSDP2 (a unit per block) and under PyTorch's tensor-parallel plan (DTensor, with its loss over a cut vocabulary), and
megalite over tp, pp and dp with ZeRO 0, 1 and 3; tools/bench_pipeline.py compares pipelines. Every round runs each contender
once, in turn, so that drift of the machine hits all alike; printed are medians over rounds, and ratios as medians of the rounds' ratios.
The last line is JSON. Nothing else should run meanwhile.
"""

from __future__ import annotations

import argparse
import json
import statistics
import time
from contextlib import nullcontext
from dataclasses import replace
from importlib.util import find_spec

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor, Replicate, Shard
from torch.distributed.tensor.parallel import ColwiseParallel, ParallelStyle, RowwiseParallel, loss_parallel, parallelize_module

from megalite.config import DataConfig, ModelConfig, OptimConfig, RunConfig, TrainConfig
from megalite.data.mock import MockDataset
from megalite.testing.layouts import Layout
from megalite.testing.parity import build_in_this_world
from megalite.testing.plain_model import PlainBlock, PlainModel
from megalite.testing.rank_pool import RankPool
from megalite.training.loop import train_step

CONFIG = RunConfig(
    model=ModelConfig(
        vocab_size=8192,
        num_layers=8,
        hidden_size=256,
        num_attention_heads=8,
        num_query_groups=4,
        ffn_hidden_size=688,
    ),
    data=DataConfig(mock_data=True, seq_length=512),
    optim=OptimConfig(lr_decay_style="constant"),
    train=TrainConfig(micro_batch_size=4, global_batch_size=8, device="cpu"),
)
LAYOUTS = {
    "megalite, one rank": Layout(),
    "megalite, tp 2": Layout(tp=2, sequence_parallel=True),
    "megalite, pp 2": Layout(pp=2),
    "megalite, dp 2, zero 0": Layout(dp=2),
    "megalite, dp 2, zero 1": Layout(dp=2, zero=1),
    "megalite, dp 2, zero 3": Layout(dp=2, zero=3),
}
PLAIN = "plain PyTorch loop, one rank"
PEERS = {
    PLAIN: ("plain", 1),
    "transformers' Llama, one rank": ("transformers", 1),
    "DDP, 2 ranks": ("DDP", 2),
    "FSDP2, 2 ranks": ("FSDP2", 2),
    "DTensor plan, tp 2": ("DTensor", 2),
}
QUICK = (PLAIN, "megalite, one rank")


def run_plain(config: RunConfig, kind: str, steps: int, threads: int) -> float:
    """Median seconds of a step, without the first. In every rank. kind: plain, DDP, FSDP2 or transformers."""
    torch.set_num_threads(threads)
    world = dist.get_world_size() if dist.is_initialized() else 1
    model, params = build_peer(config, kind)
    # optimizer and norm take DTensors and plain tensors apart
    groups = [group for group in ([p for p in params if isinstance(p, DTensor) == cut] for cut in (False, True)) if group]
    optimizer = torch.optim.AdamW([{"params": group} for group in groups], lr=config.optim.lr, fused=True)
    dp = 1 if kind == "DTensor" else world
    size, micro = config.global_batch(dp) // dp, config.train.micro_batch_size
    dataset = MockDataset(config.model.known_vocab_size, config.data.seq_length, (steps + 1) * size)
    seconds = []
    for step in range(steps + 1):
        begin = time.perf_counter()
        for first in range(0, size, micro):
            samples = [dataset[step * size + first + number] for number in range(micro)]
            tokens, labels = (torch.stack([torch.from_numpy(getattr(s, name)) for s in samples]) for name in ("tokens", "labels"))
            is_last = first + micro == size
            with model.no_sync() if kind == "DDP" and not is_last else nullcontext():  # type: ignore[operator]
                if kind == "FSDP2":
                    model.set_requires_gradient_sync(is_last)  # type: ignore[operator]
                with loss_parallel() if kind == "DTensor" else nullcontext():
                    (model(tokens, labels) * micro / size).backward()
        clip(groups, config.optim.clip_grad)
        optimizer.step()
        optimizer.zero_grad()
        seconds.append(time.perf_counter() - begin)
    return statistics.median(seconds[1:])


def clip(groups: list[list[nn.Parameter]], most: float) -> None:
    """As `clip_grad_norm_` over all groups together."""
    norms = [nn.utils.get_total_norm([p.grad for p in group if p.grad is not None]) for group in groups]
    total = torch.stack([norm.full_tensor() if isinstance(norm, DTensor) else norm for norm in norms]).norm()
    for group in groups:
        nn.utils.clip_grads_with_norm_(group, most, total)


def build_peer(config: RunConfig, kind: str) -> tuple[nn.Module, list[nn.Parameter]]:
    """A function (tokens, labels) -> loss, and its parameters."""
    if kind == "transformers":
        model: nn.Module = TransformersLlama(config.model, config.data.seq_length)
        return model, list(model.parameters())
    model = PlainModel(config.model, config.data.seq_length)
    if kind == "DDP":
        model = nn.parallel.DistributedDataParallel(model, gradient_as_bucket_view=True)
    elif kind == "DTensor":
        cut_over_tp(model)
    elif kind == "FSDP2":
        mesh = init_device_mesh("cpu", (dist.get_world_size(),))
        for module in [*model.blocks, model]:
            fully_shard(module, mesh=mesh)
            module.set_force_sum_reduction_for_comms(True)  # type: ignore[operator]
            module.set_gradient_divide_factor(float(dist.get_world_size()))  # type: ignore[operator]
    return model, list(model.parameters())


def cut_over_tp(model: PlainModel) -> None:
    """The plan of PyTorch's tensor-parallel tutorial, without sequence parallelism: one reduction for each half of a block."""
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    columns, rows = ColwiseParallel(), RowwiseParallel()
    for block in model.blocks:
        assert isinstance(block, PlainBlock)
        block.heads, block.groups = block.heads // mesh.size(), block.groups // mesh.size()
        plan: dict[str, ParallelStyle] = {"q": columns, "k": columns, "v": columns, "gate": columns, "up": columns, "o": rows, "down": rows}
        parallelize_module(block, mesh, plan)
    ends: dict[str, ParallelStyle] = {
        "embedding": RowwiseParallel(input_layouts=Replicate()),
        "head": ColwiseParallel(output_layouts=Shard(-1), use_local_output=False),
    }
    parallelize_module(model, mesh, ends)


class TransformersLlama(nn.Module):
    """transformers' Llama as its users train it: labels are given to the model (it shifts them by one itself)."""

    def __init__(self, model: ModelConfig, length: int) -> None:
        from transformers import LlamaConfig, LlamaForCausalLM

        super().__init__()
        settings = LlamaConfig(
            vocab_size=model.known_vocab_size,
            hidden_size=model.hidden_size,
            intermediate_size=model.ffn_size,
            num_hidden_layers=model.num_layers,
            num_attention_heads=model.num_attention_heads,
            num_key_value_heads=model.num_kv_heads,
            max_position_embeddings=length,
            use_cache=False,
        )
        self.model = LlamaForCausalLM(settings)

    def forward(self, tokens: Tensor, labels: Tensor) -> Tensor:
        return self.model(input_ids=tokens, labels=labels).loss


def run_megalite(config: RunConfig, layout: Layout, steps: int, threads: int) -> float:
    """Median seconds of a step, without the first. In every rank."""
    torch.set_num_threads(threads)
    config = layout.apply(config).resolve()
    config = replace(config, train=replace(config.train, train_iters=steps + 1))
    run = build_in_this_world(config, timeout_s=300)
    seconds = []
    for _ in range(steps + 1):
        begin = time.perf_counter()
        train_step(run)
        seconds.append(time.perf_counter() - begin)
    run.train_loader.close()
    return statistics.median(seconds[1:])


def tiny(config: RunConfig) -> RunConfig:
    model = replace(
        config.model, vocab_size=128, num_layers=2, hidden_size=32, num_attention_heads=4, num_query_groups=2, ffn_hidden_size=48
    )
    return replace(config, model=model, data=replace(config.data, seq_length=16))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=5, help="times that every contender runs (default 5)")
    parser.add_argument("--steps", type=int, default=4, help="measured steps of one run (default 4)")
    parser.add_argument("--quick", action="store_true", help="one rank against the plain loop only, 2 rounds, within a minute")
    parser.add_argument("--tiny", action="store_true", help="a model of no size, to see that everything runs; its figures say nothing")
    arguments = parser.parse_args()
    config = tiny(CONFIG) if arguments.tiny else CONFIG
    names = [name for name in (*PEERS, *LAYOUTS) if not arguments.quick or name in QUICK]
    if find_spec("transformers") is None:
        names = [name for name in names if not name.startswith("transformers")]
    seconds: dict[str, list[float]] = {name: [] for name in names}
    with RankPool(max_ranks=2) as pool:
        for _ in range(2 if arguments.quick else arguments.rounds):
            for name in names:
                seconds[name].append(run_once(pool, config, name, 2 if arguments.quick else arguments.steps))
    medians = {name: statistics.median(values) for name, values in seconds.items()}
    tokens = config.global_batch(1) * config.data.seq_length
    print(f"{'':30s} {'s/step':>8s} {'tokens/s':>9s} {'speed against plain':>20s}")
    for name, median in medians.items():
        print(f"{name:30s} {median:8.3f} {tokens / median:9,.0f} {medians[PLAIN] / median:20.2f}")
    ratios = {name: statistics.median(a / b for a, b in zip(seconds[PLAIN], values, strict=True)) for name, values in seconds.items()}
    print(json.dumps({"seconds_per_step": medians, "speed_ratio": ratios, "step_time_over_peer": against_peers(seconds)}))


def run_once(pool: RankPool, config: RunConfig, name: str, steps: int) -> float:
    """Seconds of a step, of the slowest rank."""
    if name in PEERS:
        kind, ranks = PEERS[name]
        return max(pool.run(run_plain, ranks, config, kind, steps, 2 // ranks, timeout=600))
    layout = LAYOUTS[name]
    return max(pool.run(run_megalite, layout.world_size, config, layout, steps, 2 // layout.world_size, timeout=600))


def against_peers(seconds: dict[str, list[float]]) -> dict[str, float]:
    """Median over rounds of our step time over that of the peer that does the same."""
    pairs = {
        "tp 2 over DTensor": ("megalite, tp 2", "DTensor plan, tp 2"),
        "zero 0 over DDP": ("megalite, dp 2, zero 0", "DDP, 2 ranks"),
        "zero 1 over DDP": ("megalite, dp 2, zero 1", "DDP, 2 ranks"),
        "zero 3 over FSDP2": ("megalite, dp 2, zero 3", "FSDP2, 2 ranks"),
    }
    return {
        name: round(statistics.median(a / b for a, b in zip(seconds[ours], seconds[theirs], strict=True)), 3)
        for name, (ours, theirs) in pairs.items()
        if ours in seconds and theirs in seconds
    }


if __name__ == "__main__":
    main()
