"""Speed of generation on this machine's CPU against transformers' `generate`, with the same weights and the same tokens.

    python tools/bench_generate.py             batch 1 and 8, prompt 128, 256 new tokens, 3 rounds
    python tools/bench_generate.py --quick     a smaller model and fewer tokens, within a minute

The model has the shape of SmolLM2-135M with random weights, written by an export to a Hugging Face folder, which both sides' weights come
from. Greedy, fp32. Every round runs both, in turn; printed are medians and the ratio of speeds. Then our other numbers of bits: weights in
bf16, and the cache in int8, whose texts are others. "of limit": a step's time if it did nothing but read all weights once, over its real
time; the speed of reading is measured by summing up a memory of that size. Needs the extra `bench` (transformers).
The last line is JSON. Exits with 1 where the tokens differ or batch 1 is not twice as fast (--at-least). Nothing else should run meanwhile.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
import tempfile
import time
import warnings
from pathlib import Path
from typing import Any

import torch

from megalite.checkpoint import Manifest, save_checkpoint
from megalite.checkpoint.store import describe
from megalite.checkpoint.whole_model import load_model
from megalite.config import DataConfig, ModelConfig, RunConfig
from megalite.convert import export_hf
from megalite.generation import Sampling, generate_batch
from megalite.generation.decoder import Decoder
from megalite.grid import Axis
from megalite.model import GPTStage, build_stage
from megalite.pipeline.partition import split_layers
from megalite.tensor_parallel.parameter import ParallelContext, logical_name, named_parameter_info

SMOLLM = ModelConfig(
    num_layers=30,
    hidden_size=576,
    num_attention_heads=9,
    num_query_groups=3,
    ffn_hidden_size=1536,
    vocab_size=49152,
    max_position_embeddings=8192,
    rotary_base=1e5,
    untie_embeddings_and_output_weights=False,
    init_method_std=0.04,  # logits far enough apart that rounding changes no choice
)
SMALL = ModelConfig(num_layers=8, hidden_size=256, num_attention_heads=8, num_query_groups=4, ffn_hidden_size=688, vocab_size=8192,
                    max_position_embeddings=2048, init_method_std=0.08)  # fmt: skip


def write_model(folder: Path, model: ModelConfig) -> tuple[Path, Path]:
    """(a megalite checkpoint, a Hugging Face folder) with the same random weights."""
    context = ParallelContext(tp=Axis.single(), sequence_parallel=False)
    stage = build_stage(model, split_layers(model.num_layers, 1)[0], context, num_stages=1, seed=1, device="cpu")
    infos = named_parameter_info(stage)
    tensors = {f"model.{logical_name(name, infos[name])}": value.detach() for name, value in stage.named_parameters()}
    config = RunConfig(model=model, data=DataConfig(seq_length=512))
    named = {name: describe(tensor) for name, tensor in tensors.items()}
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="torch.distributed is disabled", category=UserWarning)  # one process is what is meant
        manifest = Manifest(step=0, consumed_samples=0, config=config.to_dict(), tensors=named)
        save_checkpoint(folder / "ours", tensors, manifest, Axis.single("world"))
    return folder / "ours", export_hf(folder / "ours", folder / "theirs")


def bench(stage: GPTStage, theirs: Any, batch: int, prompt: int, new: int, rounds: int) -> dict[str, Any]:
    ids = prompts_of(stage, batch, prompt)
    sampling = Sampling(max_new_tokens=new, temperature=0)
    options = dict(max_new_tokens=new, min_new_tokens=new, do_sample=False, pad_token_id=0)
    seconds: dict[str, list[float]] = {"ours": [], "theirs": []}
    tokens: dict[str, list[list[int]]] = {}
    with torch.no_grad():
        theirs.generate(ids, attention_mask=torch.ones_like(ids), **{**options, "max_new_tokens": 2, "min_new_tokens": 2})  # warms up
        generate_batch(stage, ids.tolist(), Sampling(max_new_tokens=2, temperature=0))
        for _ in range(rounds):
            begin = time.perf_counter()
            tokens["ours"] = generate_batch(stage, ids.tolist(), sampling)
            middle = time.perf_counter()
            out = theirs.generate(ids, attention_mask=torch.ones_like(ids), **options)
            end = time.perf_counter()
            tokens["theirs"] = out[:, prompt:].tolist()
            seconds["ours"].append(middle - begin)
            seconds["theirs"].append(end - middle)
    medians = {who: batch * new / statistics.median(values) for who, values in seconds.items()}
    ratios = [b / a for a, b in zip(seconds["ours"], seconds["theirs"], strict=True)]
    same = sum(a == b for a, b in zip(tokens["ours"], tokens["theirs"], strict=True))
    return {
        "batch": batch,
        "prompt": prompt,
        "new": new,
        **{f"{who}_tokens_per_s": round(median, 1) for who, median in medians.items()},
        "ratio": round(statistics.median(ratios), 3),
        "ratios": [round(ratio, 3) for ratio in ratios],
        "equal_rows": same,
    }


def bench_steps(stage: GPTStage, batch: int, prompt: int, new: int, *, int8: bool, reading: float) -> dict[str, Any]:
    """Steps alone. reading: bytes per second."""
    decoder = Decoder(stage)
    cache = decoder.new_cache(batch, prompt + new, int8=int8)
    for row, ids in enumerate(prompts_of(stage, batch, prompt).tolist()):
        decoder.prefill(cache, row, ids)
    times = []
    for number in range(new):
        begin = time.perf_counter()
        decoder.step(cache, [number] * batch)
        times.append(time.perf_counter() - begin)
    step = statistics.median(times)
    least = sum(parameter.nbytes for parameter in stage.parameters()) / reading
    dtype = str(next(stage.parameters()).dtype).removeprefix("torch.")
    return {
        "batch": batch,
        "weights": dtype,
        "cache": "int8" if int8 else dtype,
        "native": decoder.native is not None,
        "ms_per_step": round(step * 1e3, 2),
        "tokens_per_s": round(batch / step, 1),
        "of_limit": round(least / step, 3),
        "cache_mb": round(cache.num_bytes / 1e6, 1),
    }


def reading_speed(num_bytes: int) -> float:
    """Bytes per second of the fastest of five sums over a memory of this size."""
    memory, times = torch.ones(num_bytes // 4), []
    for _ in range(5):
        begin = time.perf_counter()
        memory.sum()
        times.append(time.perf_counter() - begin)
    return memory.nbytes / min(times)


def prompts_of(stage: GPTStage, batch: int, prompt: int) -> torch.Tensor:
    return torch.randint(0, stage.config.known_vocab_size, (batch, prompt), generator=torch.Generator().manual_seed(2))


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="a smaller model and fewer tokens")
    parser.add_argument("--rounds", type=int, help="times that both run (default 3; 2 with --quick)")
    parser.add_argument("--threads", type=int, help="of torch (default 2; 1 with --quick, which bears a busy machine better)")
    parser.add_argument("--new", type=int, help="new tokens (default 256; 48 with --quick)")
    parser.add_argument("--at-least", type=float, help="ratio at batch 1 (default 2; none with --quick)")
    options = parser.parse_args()
    try:
        from transformers import AutoModelForCausalLM
    except ImportError:
        print("error: transformers is not installed: pip install -e '.[bench]'", file=sys.stderr)
        return 2
    threads, rounds = options.threads or (1 if options.quick else 2), options.rounds or (2 if options.quick else 3)
    torch.set_num_threads(threads)
    prompt, new = (32, options.new or 48) if options.quick else (128, options.new or 256)
    with tempfile.TemporaryDirectory() as folder:
        ours, folder_hf = write_model(Path(folder), SMALL if options.quick else SMOLLM)
        stage, _ = load_model(ours)
        theirs = AutoModelForCausalLM.from_pretrained(folder_hf)
    cases = []
    for batch in (1, 8):
        case = bench(stage, theirs, batch, prompt, new, rounds)
        cases.append(case)
        print(f"batch {batch}: {case['ours_tokens_per_s']} tokens/s, transformers {case['theirs_tokens_per_s']}, "
              f"ratio {case['ratio']} of {case['ratios']}, equal rows {case['equal_rows']} of {batch}", flush=True)  # fmt: skip
    reading = reading_speed(sum(parameter.nbytes for parameter in stage.parameters()))
    steps = []
    for dtype in (torch.float32, torch.bfloat16):
        stage = stage.to(dtype)
        for batch, int8 in ((1, False), (1, True), (8, False), (8, True)):
            steps.append(bench_steps(stage, batch, prompt, min(new, 40), int8=int8, reading=reading))
            print("  ".join(f"{name} {value}" for name, value in steps[-1].items()), flush=True)
    model = "small" if options.quick else "SmolLM2-135M shape"
    figures = {"model": model, "threads": threads, "reading_gb_per_s": round(reading / 1e9, 1), "cases": cases, "steps": steps}
    print(json.dumps(figures))
    wanted = options.at_least if options.at_least is not None else 0.0 if options.quick else 2.0
    return 0 if all(case["equal_rows"] == case["batch"] for case in cases) and cases[0]["ratio"] >= wanted else 1


if __name__ == "__main__":
    sys.exit(main())
