"""What the pipeline settings of a run come to, and what is refused before it starts."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest

from megalite.config import RunConfig
from megalite.config_io import assign
from megalite.pipeline.from_config import evaluation_schedule, pipeline_violations, stage_costs, stage_specs, training_schedule
from megalite.pipeline.schedules import SCHEDULES, CostModel, v_placement, zb_auto
from megalite.pipeline.verify import verify
from megalite.validate import violations

MODEL = {
    "num_layers": 6,
    "hidden_size": 12,
    "num_attention_heads": 2,
    "vocab_size": 101,
    "seq_length": 8,
    "position_embedding_type": "rope",
}
BATCH = {"micro_batch_size": 1, "global_batch_size": 8, "mock_data": True, "max_position_embeddings": 8}


def run_config(**values: Any) -> RunConfig:
    return assign(RunConfig(), {**MODEL, **BATCH, **values})


def pipeline(schedule: str, pp: int = 2, vpp: int = 1, **values: Any) -> RunConfig:
    layout = {"pipeline_model_parallel_size": pp, "num_virtual_stages_per_pipeline_rank": vpp, "pipeline_schedule": schedule}
    return run_config(**layout, **values)


@pytest.mark.parametrize("name", SCHEDULES)
def test_every_name_validates_and_builds(name: str) -> None:
    config = pipeline(name, vpp=2 if name in ("interleaved-1f1b", "looped-bfs", "zb-v", "v-half", "v-min", "dualpipe-v") else 1)
    assert violations(config, 2) == []
    schedule = training_schedule(config.parallel, 8)
    evaluation = evaluation_schedule(schedule)
    verify(schedule)
    verify(evaluation)
    assert (schedule.name, evaluation.placement) == (name, schedule.placement)
    assert sum(spec.num_layers for spec in stage_specs(config, schedule)) == 6


def test_options_reach_the_schedule() -> None:
    grouped = pipeline("interleaved-1f1b", vpp=2, microbatch_group_size_per_virtual_pipeline_stage=4)
    assert [action.microbatch for action in training_schedule(grouped.parallel, 8).orders[0][:5]] == [0, 1, 2, 3, 0]
    timed = pipeline("zb-2p", pipeline_schedule_costs=(1.0, 2.0, 0.5, 0.25))
    assert training_schedule(timed.parallel, 8) == zb_auto(2, 8, 2, CostModel(1, 2, 0.5, 0.25))


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ({"microbatch_group_size_per_virtual_pipeline_stage": 3}, "group size .3. only means something to interleaved-1f1b"),
        ({"pipeline_schedule_costs": (1.0, 2.0)}, "has 2 numbers: give four"),
        ({"pipeline_schedule_costs": (1.0, -2.0, 1.0, 0.0)}, "input_grad is -2.0"),
        ({"pipeline_layer_split": (3, 3), "balance_pipeline_stages": True}, "pipeline_layer_split and balance_pipeline_stages"),
        ({"pipeline_model_parallel_layout": "Ett|tttmL"}, "multi-token prediction"),
        ({"pipeline_model_parallel_layout": "Ett|tttL"}, "places 5 layers, the model has 6: add 1"),
        ({"pipeline_model_parallel_layout": "Ett|tt|t|tL"}, "use --vpp 2"),
        ({"pipeline_schedule": "zb-v"}, r"two model chunks per rank in a V, got 1.*--vpp 2"),
        ({"pipeline_schedule": "mine.csv"}, "cannot read schedule mine.csv"),
    ],
)
def test_refused(values: dict[str, Any], message: str) -> None:
    found = violations(pipeline("1f1b", **{key: value for key, value in values.items() if key != "pipeline_schedule"}), 2)
    if "pipeline_schedule" in values:
        found = violations(pipeline(values["pipeline_schedule"]), 2)
    assert len(found) == 1
    assert re.search(message, found[0])


def test_schedules_of_the_user_are_proven(tmp_path: Path) -> None:
    table = tmp_path / "orders.csv"
    table.write_text("0F0,0F1,0B1,0B0\n1F0,1B0,1F1,1B1\n")
    (found,) = pipeline_violations(pipeline(str(table)), 2)
    assert "[3 B0]" in found
    table.write_text("0F0,0F1,0B0,0B1\n1F0,1B0,1F1,1B1\n")
    assert pipeline_violations(pipeline(str(table)), 2) == []
    assert "1 pipeline ranks" not in pipeline_violations(pipeline(str(table)), 4)[0]


def test_the_layout_string_and_the_balance_are_used() -> None:
    layout = pipeline("zb-v", vpp=2, pipeline_model_parallel_layout="Ett|ttt|t|L")
    schedule = training_schedule(layout.parallel, 8)
    assert [spec.num_layers for spec in stage_specs(layout, schedule)] == [2, 3, 1, 0]
    costs = stage_costs(layout)
    assert costs.head / costs.layer == pytest.approx(6 * 101 * 12 / (6 * layout.model.layer_matmul_weights + 12 * 12 * 8))
    balanced = pipeline("zb-v", vpp=2, balance_pipeline_stages=True, vocab_size=401)
    assert training_schedule(balanced.parallel, 8).placement == v_placement(2)
    # the head weighs 2.5 layers and lies on rank 0, with stages 0 and 3
    assert [spec.num_layers for spec in stage_specs(balanced, schedule)] == [2, 2, 2, 0]
    assert violations(balanced, 2) == []
    assert "cannot be balanced" in violations(pipeline("1f1b", pp=8, balance_pipeline_stages=True), 8)[0]


def test_a_wrong_batch_hides_only_what_depends_on_it() -> None:
    found = violations(pipeline("zb-v", global_batch_size=7, micro_batch_size=2), 2)
    assert len(found) == 2
    assert any("two model chunks" in text for text in found)
