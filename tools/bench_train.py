"""Training speed on this machine's CPU: megalite on one rank against a plain PyTorch loop, and the same work on two ranks.

    python tools/bench_train.py                 small model, 5 rounds
    python tools/bench_train.py --rounds 3 --steps 4

Every round runs each contender once, in turn, so that drift of the machine hits all alike; printed are medians over rounds and ratios
to the plain loop. One rank uses 2 threads, two ranks 1 thread each. The last line is JSON. Nothing else should run meanwhile.
"""

from __future__ import annotations

import argparse
import json
import statistics
import time
from dataclasses import replace

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from megalite.config import DataConfig, ModelConfig, OptimConfig, RunConfig, TrainConfig
from megalite.data.mock import MockDataset
from megalite.testing.layouts import Layout
from megalite.testing.parity import build_in_this_world
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
    "megalite, dp 2": Layout(dp=2),
}
PLAIN = "plain PyTorch loop, one rank"


class PlainBlock(nn.Module):
    """The block of CONFIG, written as anybody would: RMSNorm, grouped-query attention with RoPE, SwiGLU."""

    def __init__(self, model: ModelConfig) -> None:
        super().__init__()
        hidden, self.heads, self.groups, self.size = model.hidden_size, model.num_attention_heads, model.num_kv_heads, model.head_dim
        self.norm1, self.norm2 = nn.RMSNorm(hidden, eps=model.norm_epsilon), nn.RMSNorm(hidden, eps=model.norm_epsilon)
        self.q = nn.Linear(hidden, self.heads * self.size, bias=False)
        self.k = nn.Linear(hidden, self.groups * self.size, bias=False)
        self.v = nn.Linear(hidden, self.groups * self.size, bias=False)
        self.o = nn.Linear(self.heads * self.size, hidden, bias=False)
        self.gate = nn.Linear(hidden, model.ffn_size, bias=False)
        self.up = nn.Linear(hidden, model.ffn_size, bias=False)
        self.down = nn.Linear(model.ffn_size, hidden, bias=False)

    def forward(self, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        batch, length, _ = x.shape
        y = self.norm1(x)
        q, k, v = (
            layer(y).view(batch, length, heads, self.size).transpose(1, 2)
            for layer, heads in ((self.q, self.heads), (self.k, self.groups), (self.v, self.groups))
        )
        q, k = rotate(q, cos, sin), rotate(k, cos, sin)
        y = F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True)
        x = x + self.o(y.transpose(1, 2).reshape(batch, length, -1))
        y = self.norm2(x)
        return x + self.down(F.silu(self.gate(y)) * self.up(y))


def rotate(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    a, b = x.chunk(2, dim=-1)
    return torch.cat((a * cos - b * sin, b * cos + a * sin), dim=-1)


class PlainModel(nn.Module):
    def __init__(self, model: ModelConfig, length: int) -> None:
        super().__init__()
        self.embedding = nn.Embedding(model.known_vocab_size, model.hidden_size)
        self.blocks = nn.ModuleList(PlainBlock(model) for _ in range(model.num_layers))
        self.norm = nn.RMSNorm(model.hidden_size, eps=model.norm_epsilon)
        self.head = nn.Linear(model.hidden_size, model.known_vocab_size, bias=False)
        frequencies = model.rotary_base ** (-torch.arange(0, model.head_dim, 2) / model.head_dim)
        angles = torch.arange(length)[:, None] * frequencies
        self.cos, self.sin = angles.cos(), angles.sin()

    def forward(self, tokens: Tensor, labels: Tensor) -> Tensor:
        x = self.embedding(tokens)
        for block in self.blocks:
            x = block(x, self.cos, self.sin)
        return F.cross_entropy(self.head(self.norm(x)).flatten(0, 1), labels.flatten())


def run_plain(config: RunConfig, steps: int, threads: int) -> float:
    """Median seconds of a step, without the first."""
    torch.set_num_threads(threads)
    model = PlainModel(config.model, config.data.seq_length)
    optimizer = torch.optim.AdamW(model.parameters(), lr=config.optim.lr, fused=True)
    size, micro = config.global_batch(1), config.train.micro_batch_size
    dataset = MockDataset(config.model.known_vocab_size, config.data.seq_length, (steps + 1) * size)
    seconds = []
    for step in range(steps + 1):
        begin = time.perf_counter()
        for first in range(0, size, micro):
            samples = [dataset[step * size + first + number] for number in range(micro)]
            tokens, labels = (torch.stack([torch.from_numpy(getattr(s, name)) for s in samples]) for name in ("tokens", "labels"))
            (model(tokens, labels) * micro / size).backward()
        nn.utils.clip_grad_norm_(model.parameters(), config.optim.clip_grad)
        optimizer.step()
        optimizer.zero_grad()
        seconds.append(time.perf_counter() - begin)
    return statistics.median(seconds[1:])


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
    parser.add_argument("--tiny", action="store_true", help="a model of no size, to see that everything runs; its figures say nothing")
    arguments = parser.parse_args()
    config = tiny(CONFIG) if arguments.tiny else CONFIG
    seconds: dict[str, list[float]] = {PLAIN: [], **{name: [] for name in LAYOUTS}}
    with RankPool(max_ranks=2) as pool:
        for _ in range(arguments.rounds):
            seconds[PLAIN] += pool.run(run_plain, 1, config, arguments.steps, 2, timeout=600)
            for name, layout in LAYOUTS.items():
                threads = 2 // layout.world_size
                seconds[name].append(max(pool.run(run_megalite, layout.world_size, config, layout, arguments.steps, threads, timeout=600)))
    medians = {name: statistics.median(values) for name, values in seconds.items()}
    tokens = config.global_batch(1) * config.data.seq_length
    print(f"{'':30s} {'s/step':>8s} {'tokens/s':>9s} {'speed against plain':>20s}")
    for name, median in medians.items():
        print(f"{name:30s} {median:8.3f} {tokens / median:9,.0f} {medians[PLAIN] / median:20.2f}")
    print(json.dumps({"seconds_per_step": medians, "speed_ratio": {name: medians[PLAIN] / m for name, m in medians.items()}}))


if __name__ == "__main__":
    main()
