"""Stored adapters of PEFT, and the logits of models beside them."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from megalite import comm
from megalite.checkpoint import read_manifest
from megalite.config import RunConfig
from megalite.convert import import_peft
from megalite.data.batch import MicroBatch
from megalite.grid import Grid
from megalite.model import GPTStage

GOLDEN = Path(__file__).parents[1] / "golden"
CASES = {
    "gpt2_all": "gpt2",
    "llama3_all_r8_rslora": "llama3",
    "llama3_dora": "llama3",
    "llama3_layers": "llama3",
    "llama3_patterns": "llama3",
    "llama3_qv_r4": "llama3",
    "qwen3_all": "qwen3",
}


def base_of(case: str) -> Path:
    return GOLDEN / "hf" / CASES[case]


def import_all(folder: Path) -> Path:
    for case in CASES:
        import_peft(GOLDEN / "lora" / case, folder / case, base_of(case))
    return folder


def stored_run(folder: Path) -> RunConfig:
    return RunConfig.from_dict(read_manifest(folder / "step-0000000").config)


def batch_of(tokens: Tensor) -> MicroBatch:
    positions = torch.arange(tokens.shape[1]).expand_as(tokens)
    return MicroBatch(tokens=tokens, labels=tokens, loss_mask=torch.ones(tokens.shape), position_ids=positions, first_sample=0)


@torch.no_grad()
def logits_of(stage: GPTStage, tokens: Tensor, vocab_size: int, grid: Grid | None = None) -> Tensor:
    """[B, S, V] in every rank, of stages that follow the ranks of pp."""
    batch, x = batch_of(tokens), None
    for number in range(1 if grid is None else grid.pp.size):
        is_last = grid is None or number == grid.pp.size - 1
        if grid is None or grid.pp.rank == number:
            x = stage.logits(x, batch) if is_last else stage(x, batch)
        if grid is not None:
            width = stage.config.padded_vocab_size // grid.tp.size if is_last else stage.config.hidden_size
            x = x if grid.pp.rank == number else torch.zeros(tokens.shape[1], tokens.shape[0], width)
            x = comm.broadcast(x.contiguous(), grid.pp, number)  # type: ignore[union-attr]
    assert x is not None
    whole = x if grid is None else comm.all_gather(x, grid.tp, dim=2)
    return whole[..., :vocab_size].transpose(0, 1)


def difference(case: str, stage: GPTStage, grid: Grid | None = None) -> float:
    example = np.load(GOLDEN / "lora" / case / "io.npz")
    found = logits_of(stage, torch.from_numpy(example["input_ids"]).long(), example["logits"].shape[-1], grid)
    return float(np.abs(found.numpy() - example["logits"]).max())
