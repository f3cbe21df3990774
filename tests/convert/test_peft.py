"""Adapters of PEFT in and out: merged they compute the logits that PEFT stored, and what is written means the same.

The stored adapters have large values in all tensors, so a wrong scale, layer, order of rows or a missing one cannot pass.
"""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from megalite.checkpoint import read_manifest
from megalite.config import LoraConfig
from megalite.convert import export_hf, export_megatron, export_peft, import_hf, import_megatron, import_peft, load_any
from megalite.errors import CheckpointError, ConfigError
from megalite.grid import Grid, GridShape
from megalite.testing.layouts import Layout
from megalite.testing.parity import build_in_this_world
from megalite.training.checkpoints import load_run
from megalite.training.frozen import load_base
from tests.convert.lora_cases import CASES, GOLDEN, base_of, difference, import_all, stored_run
from tests.ranks import run_ranks

IN_LAYOUTS = ("gpt2_all", "llama3_dora", "llama3_patterns")


@pytest.fixture(scope="module")
def imported(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return import_all(tmp_path_factory.mktemp("imported"))


@pytest.mark.parametrize("case", CASES)
def test_merged_adapters_compute_the_stored_logits(case: str, imported: Path, tmp_path: Path) -> None:
    stage, settings = load_any(imported / case)
    assert settings.lora == LoraConfig()
    assert difference(case, stage) < 1e-4
    whole, _ = load_any(export_hf(imported / case, tmp_path / "hf"))
    assert difference(case, whole) < 1e-4
    assert (tmp_path / "hf" / "generation_config.json").read_bytes() == (base_of(case) / "generation_config.json").read_bytes()


def merged_in_parts(folder: Path, tp: int, pp: int) -> dict[str, float]:
    grid = Grid.build(GridShape(tp=tp, pp=pp))
    return {case: difference(case, load_any(folder / case, grid=grid)[0], grid) for case in IN_LAYOUTS}


@pytest.mark.parametrize(("tp", "pp"), [(2, 2), (4, 1)])
def test_every_rank_merges_what_it_holds(tp: int, pp: int, imported: Path) -> None:
    """Rows and columns that are cut, and with tp 4 the key/value heads that are not; DoRA's lengths are those of whole rows."""
    for found in run_ranks(merged_in_parts, tp * pp, imported, tp, pp, timeout=120):
        assert {case: value for case, value in found.items() if value > 1e-4} == {}


def trained_on(folder: Path, layout: Layout) -> float:
    """The difference from the stored logits of a run that would train the imported adapters on, not merged."""
    config = stored_run(folder / "adapters")
    config = replace(
        config,
        data=replace(config.data, mock_data=True, seq_length=24, tokenizer_type=None, tokenizer_model=None),
        train=replace(config.train, device="cpu", micro_batch_size=1, global_batch_size=2, train_iters=1),
        output=replace(config.output, load=str(folder / "adapters"), load_weights_only=True),
    )
    run = build_in_this_world(layout.apply(config).resolve())
    load_base(run)
    load_run(run, folder / "adapters")
    run.train_loader.close()
    stage = run.stages[run.grid.pp.rank].eval()
    return difference("llama3_dora", stage, run.grid)


def test_a_run_loads_imported_adapters_beside_their_base(tmp_path: Path) -> None:
    import_hf(base_of("llama3_dora"), tmp_path / "base")
    import_peft(GOLDEN / "lora" / "llama3_dora", tmp_path / "adapters", tmp_path / "base")
    assert stored_run(tmp_path / "adapters").lora.lora_base == str((tmp_path / "base").resolve())
    assert all(found < 1e-4 for found in run_ranks(trained_on, 4, tmp_path, Layout(tp=2, pp=2), timeout=60))


def test_merging_takes_another_base_only_if_it_is_the_same_model(imported: Path, tmp_path: Path) -> None:
    """The run's base may have moved, or be a folder of Hugging Face in place of its import."""
    import_hf(base_of("llama3_qv_r4"), tmp_path / "base")
    import_peft(GOLDEN / "lora" / "llama3_qv_r4", tmp_path / "adapters", tmp_path / "base")
    (tmp_path / "base").rename(tmp_path / "moved")
    with pytest.raises(CheckpointError, match="convert with --base DIR"):
        load_any(tmp_path / "adapters")
    outs = [
        export_hf(tmp_path / "adapters", tmp_path / f"out{i}", base=base)
        for i, base in enumerate((tmp_path / "moved", base_of("llama3_dora")))
    ]
    first, second = (load_file(out / "model.safetensors") for out in outs)
    assert all(torch.equal(first[name], second[name]) for name in first)
    with pytest.raises(CheckpointError, match="add_qkv_bias True in the checkpoint"):
        export_hf(tmp_path / "adapters", tmp_path / "other", base=GOLDEN / "hf" / "llama_bias")
    with pytest.raises(CheckpointError, match="holds adapters, not a whole model"):
        export_hf(tmp_path / "adapters", tmp_path / "other", base=imported / "llama3_qv_r4")
    with pytest.raises(ConfigError, match="--base is for adapters"):
        export_hf(tmp_path / "moved", tmp_path / "other", base=base_of("llama3_dora"))
    with pytest.raises(CheckpointError, match="holds a whole model and no adapters"):
        export_peft(tmp_path / "moved", tmp_path / "other")


def test_megatron_gets_the_merged_model(imported: Path, tmp_path: Path) -> None:
    release = export_megatron(imported / "gpt2_all", tmp_path / "megatron")
    back = import_megatron(release.parent, tmp_path / "back", vocab_size=99)
    again = import_hf(export_hf(imported / "gpt2_all", tmp_path / "hf"), tmp_path / "again")
    one, other = ({name: facts["hash"] for name, facts in read_manifest(path).tensors.items()} for path in (back, again))
    assert one == other
