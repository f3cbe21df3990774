"""Speed of generation on this machine's CPU against transformers' `generate`, with the same weights and the same tokens.

    python tools/bench_generate.py             batch 1 and 8, prompt 128, 256 new tokens, 3 rounds
    python tools/bench_generate.py --quick     a smaller model and fewer tokens, within a minute

The model has the shape of SmolLM2-135M with random weights, written by an export to a Hugging Face folder, which both sides' weights come
from. Greedy, fp32. Every round runs both, in turn; printed are medians and the ratio of speeds. Needs the extra `bench` (transformers).
The last line is JSON. Exits with 1 where the tokens differ. Nothing else should run meanwhile.
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
from megalite.grid import Axis
from megalite.model import build_stage
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


def bench(stage: Any, theirs: Any, batch: int, prompt: int, new: int, rounds: int) -> dict[str, Any]:
    generator = torch.Generator().manual_seed(2)
    ids = torch.randint(0, stage.config.known_vocab_size, (batch, prompt), generator=generator)
    sampling = Sampling(max_new_tokens=new, temperature=0)
    seconds: dict[str, list[float]] = {"ours": [], "theirs": []}
    tokens: dict[str, list[list[int]]] = {}
    for number in range(rounds + 1):  # the first one warms up
        begin = time.perf_counter()
        tokens["ours"] = generate_batch(stage, ids.tolist(), sampling)
        middle = time.perf_counter()
        with torch.no_grad():
            out = theirs.generate(
                ids, attention_mask=torch.ones_like(ids), max_new_tokens=new, min_new_tokens=new, do_sample=False, pad_token_id=0
            )
        end = time.perf_counter()
        tokens["theirs"] = out[:, prompt:].tolist()
        if number:
            seconds["ours"].append(middle - begin)
            seconds["theirs"].append(end - middle)
    medians = {who: batch * new / statistics.median(values) for who, values in seconds.items()}
    ratio = statistics.median(b / a for a, b in zip(seconds["ours"], seconds["theirs"], strict=True))
    same = sum(a == b for a, b in zip(tokens["ours"], tokens["theirs"], strict=True))
    return {"batch": batch, "prompt": prompt, "new": new, **{f"{w}_tokens_per_s": round(m, 1) for w, m in medians.items()},
            "ratio": round(ratio, 3), "equal_rows": same}  # fmt: skip


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="a smaller model and fewer tokens")
    parser.add_argument("--rounds", type=int, default=3, help="times that both run (default 3)")
    parser.add_argument("--threads", type=int, default=2, help="of torch (default 2)")
    options = parser.parse_args()
    try:
        from transformers import AutoModelForCausalLM
    except ImportError:
        print("error: transformers is not installed: pip install -e '.[bench]'", file=sys.stderr)
        return 2
    torch.set_num_threads(options.threads)
    prompt, new = (32, 48) if options.quick else (128, 256)
    with tempfile.TemporaryDirectory() as folder:
        ours, folder_hf = write_model(Path(folder), SMALL if options.quick else SMOLLM)
        stage, _ = load_model(ours)
        theirs = AutoModelForCausalLM.from_pretrained(folder_hf)
        cases = [bench(stage, theirs, batch, prompt, new, options.rounds) for batch in (1, 8)]
    for case in cases:
        print(f"batch {case['batch']}: {case['ours_tokens_per_s']} tokens/s, transformers {case['theirs_tokens_per_s']}, "
              f"ratio {case['ratio']}, equal rows {case['equal_rows']} of {case['batch']}")  # fmt: skip
    print(json.dumps({"model": "small" if options.quick else "SmolLM2-135M shape", "threads": options.threads, "cases": cases}))
    return 0 if all(case["equal_rows"] == case["batch"] for case in cases) else 1


if __name__ == "__main__":
    sys.exit(main())
