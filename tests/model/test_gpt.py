"""One rank: the model equals its formulas, and slices of it equal the whole."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from megalite.config import ModelConfig
from megalite.data.batch import MicroBatch
from megalite.grid import Axis
from megalite.model import GPTStage, build_stage, materialize
from megalite.pipeline.partition import StageSpec, split_layers
from megalite.tensor_parallel.parameter import ParallelContext, logical_name, named_parameter_info
from tests.model.helpers import GPT_STYLE, SEED, full_gradients, full_parameters, tiny_batch, tiny_config, tiny_stages
from tests.model.reference import reference_logits, reference_loss_sum

VARIANTS: dict[str, dict[str, Any]] = {
    "llama": {},
    "gpt2": GPT_STYLE,
    "tied": dict(untie_embeddings_and_output_weights=False, add_qkv_bias=True, num_query_groups=1),
    "partly_rotated": dict(rotary_percent=0.67, rotary_base=500.0, activation="gelu_tanh", num_query_groups=None),
    "no_positions": dict(position_embedding_type="none", activation="relu_squared", add_bias_linear=True),
}


def scrambled(stage: GPTStage) -> GPTStage:
    """Biases and norms away from their initial 0 and 1, so that a missing one is seen."""
    generator = torch.Generator().manual_seed(5)
    with torch.no_grad():
        for parameter in stage.parameters():
            if parameter.ndim == 1:
                parameter += 0.3 * torch.randn(parameter.shape, generator=generator)
    return stage


@pytest.mark.parametrize("name", VARIANTS)
def test_equals_the_plain_formulas(name: str) -> None:
    config, batch = tiny_config(**VARIANTS[name]), tiny_batch()
    stage = scrambled(tiny_stages(config)[0])
    params = {key: value.requires_grad_() for key, value in full_parameters(stage).items()}
    assert len(params) == len(list(stage.parameters()))

    logits = stage.logits(None, batch)
    assert logits.shape == (12, 3, 144)
    expected = reference_logits(params, config, batch.tokens, batch.position_ids)
    torch.testing.assert_close(logits[..., :131].transpose(0, 1), expected, atol=2e-5, rtol=1e-4)

    loss, expected_loss = stage(None, batch), reference_loss_sum(params, config, batch)
    assert loss.dtype == torch.float32
    assert loss.shape == ()
    torch.testing.assert_close(loss, expected_loss, atol=0, rtol=1e-6)
    loss.backward()
    expected_loss.backward()
    for key, grad in full_gradients(stage).items():
        expected_grad = params[key].grad
        assert expected_grad is not None
        torch.testing.assert_close(grad, expected_grad, atol=1e-4, rtol=1e-3, msg=lambda text, key=key: f"{key}: {text}")


def test_loss_leaves_out_masked_positions_and_the_padded_vocabulary() -> None:
    stage, batch = tiny_stages(tiny_config())[0], tiny_batch()
    other = torch.where(batch.loss_mask > 0, batch.labels, (batch.labels + 1) % 131)
    changed = MicroBatch(**{**vars(batch), "labels": other})
    assert (other != batch.labels).any()
    assert torch.equal(stage(None, batch), stage(None, changed))
    stage(None, batch).backward()
    assert stage.head is not None
    assert stage.head.output is not None
    grad = stage.head.output.weight.grad
    assert grad is not None
    assert torch.equal(grad[131:], torch.zeros(13, 40))
    assert (grad[:131].abs().sum(1) > 0).all()


@pytest.mark.parametrize("name", VARIANTS)
def test_number_of_parameters_is_the_configuration_s(name: str) -> None:
    config = tiny_config(**VARIANTS[name])
    for num_stages in (1, 3):
        count = 0
        for stage in tiny_stages(config, num_stages):
            for key, info in named_parameter_info(stage).items():
                shape = stage.get_parameter(key).shape
                rows = shape[0] if info.valid_rows is None else info.valid_rows
                count += 0 if info.copy_of else rows * (shape.numel() // shape[0])
        assert count == config.num_parameters()


def chain(stages: list[GPTStage], batch: MicroBatch) -> tuple[Tensor, dict[str, Tensor]]:
    """Loss and gradients of stages that run one after another, as a pipeline cuts the graph; copies are added up."""
    x, ends = None, []
    for stage in stages:
        out = stage(x, batch)
        ends.append((x, out))
        x = out.detach().requires_grad_()
    grad = None
    for start, out in reversed(ends):
        torch.autograd.backward(out, grad)
        grad = start.grad if start is not None else None
    grads: dict[str, Tensor] = {}
    for stage in stages:
        infos = named_parameter_info(stage)
        for name, value in full_gradients(stage).items():
            key = logical_name(name, infos[name])
            grads[key] = grads[key] + value if key in grads else value
    return ends[-1][1].detach(), grads


@pytest.mark.parametrize("num_stages", [2, 3])
@pytest.mark.parametrize("name", ["llama", "gpt2"])
def test_slices_equal_the_whole_bit_for_bit(name: str, num_stages: int) -> None:
    config = tiny_config(**VARIANTS[name], hidden_dropout=0.2, attention_dropout=0.1)
    whole_loss, whole_grads = chain(tiny_stages(config), tiny_batch(6))
    loss, grads = chain(tiny_stages(config, num_stages), tiny_batch(6))
    assert torch.equal(loss, whole_loss)
    assert grads.keys() == whole_grads.keys()
    assert all(torch.equal(grads[key], whole_grads[key]) for key in grads)


def test_slices_of_a_tied_model_hold_two_equal_copies() -> None:
    config = tiny_config(untie_embeddings_and_output_weights=False)
    stages = tiny_stages(config, 3)
    first, last = (named_parameter_info(stages[end]) for end in (0, -1))
    assert first["embedding.word.weight"].shared_over_pp
    assert last["head.output.weight"].shared_over_pp
    assert last["head.output.weight"].copy_of == "embedding.word.weight"
    assert torch.equal(stages[0].get_parameter("embedding.word.weight"), stages[-1].get_parameter("head.output.weight"))

    whole_loss, whole_grads = chain(tiny_stages(config), tiny_batch())
    loss, grads = chain(stages, tiny_batch())
    assert torch.equal(loss, whole_loss)
    for key, grad in whole_grads.items():
        torch.testing.assert_close(grads[key], grad, atol=1e-5, rtol=1e-5)


def test_an_empty_stage_passes_hidden_states_on() -> None:
    config, batch = tiny_config(), tiny_batch()
    specs = split_layers(5, 4, (0, 5, 0, 0))
    ctx = ParallelContext(tp=Axis.single(), sequence_parallel=False)
    stages = [build_stage(config, spec, ctx, num_stages=4, seed=SEED, device="cpu") for spec in specs]
    loss, grads = chain(stages, batch)
    whole_loss, whole_grads = chain(tiny_stages(config), batch)
    assert torch.equal(loss, whole_loss)
    assert all(torch.equal(grads[key], whole_grads[key]) for key in whole_grads)


def test_units_are_the_same_for_every_slicing_and_cover_all_parameters() -> None:
    names = {n: [name for s in tiny_stages(tiny_config(), n) for name, _ in s.units()] for n in (1, 2, 3)}
    assert names[1] == ["embedding", *(f"layers.{layer}" for layer in range(5)), "head"]
    assert names[1] == names[2] == names[3]
    for stage in tiny_stages(tiny_config(**GPT_STYLE), 2):
        for name, unit in stage.units():
            assert stage.get_submodule(name) is unit
        covered = {id(parameter) for _, unit in stage.units() for parameter in unit.parameters()}
        assert covered == {id(parameter) for parameter in stage.parameters()}


def test_ends_of_a_tied_stage_are_no_units() -> None:
    config = tiny_config(untie_embeddings_and_output_weights=False)
    assert [name for name, _ in tiny_stages(config)[0].units()] == [f"layers.{layer}" for layer in range(5)]
    names = [name for stage in tiny_stages(config, 2) for name, _ in stage.units()]
    assert names[0] == "embedding"
    assert names[-1] == "head"


def test_dropout_depends_on_the_sample_number_only() -> None:
    stage = tiny_stages(tiny_config(hidden_dropout=0.3, attention_dropout=0.3))[0]
    batch = tiny_batch()
    later = MicroBatch(**{**vars(batch), "first_sample": 8})
    loss = stage(None, batch)
    assert not torch.equal(stage(None, later), loss)
    torch.rand(3)
    assert torch.equal(stage(None, batch), loss)
    stage.eval()
    plain = tiny_stages(tiny_config())[0]
    assert torch.equal(stage(None, batch), plain(None, batch))
    assert torch.equal(stage(None, batch), stage(None, later))


@pytest.mark.parametrize("kind", ["hidden_dropout", "attention_dropout"])
def test_each_kind_of_dropout_acts(kind: str) -> None:
    losses = [tiny_stages(tiny_config(**{kind: p}))[0](None, tiny_batch()) for p in (0.0, 0.3)]
    assert not torch.equal(*losses)


def test_one_unit_after_another_can_be_materialised() -> None:
    config = tiny_config(untie_embeddings_and_output_weights=False, **GPT_STYLE)
    ctx = ParallelContext(tp=Axis.single(), sequence_parallel=False, device="meta")
    stage = GPTStage(config, StageSpec(0, 0, 5, True, True), ctx, num_stages=1, seed=SEED)
    assert all(parameter.is_meta for parameter in stage.parameters())
    for name, unit in stage.units():
        materialize(unit, f"{name}.", "cpu", SEED)
    left = {name for name, parameter in stage.named_parameters() if parameter.is_meta}
    assert left == {"embedding.word.weight", "embedding.position.weight", "head.norm.weight", "head.norm.bias"}
    with torch.no_grad():
        stage.get_parameter("layers.0.mlp.up_proj.weight").fill_(3.0)  # what is there must not be made again
    materialize(stage, "", "cpu", SEED)
    whole = full_parameters(tiny_stages(config)[0])
    for name, value in full_parameters(stage).items():
        expected = torch.full_like(value, 3.0) if name == "layers.0.mlp.up_proj.weight" else whole[name]
        assert torch.equal(value, expected), name


def test_initial_values_follow_the_configuration() -> None:
    config = tiny_config(hidden_size=96, ffn_hidden_size=200, add_bias_linear=True, num_layers=3)
    params = full_parameters(tiny_stages(config)[0])
    for name, value in params.items():
        if name.endswith("bias"):
            assert torch.equal(value, torch.zeros_like(value))
        elif "norm" in name:
            assert torch.equal(value, torch.ones_like(value))
        else:
            residual = name.split(".")[-2] in ("o_proj", "down_proj")
            std = value[:131].std() if value.shape[0] == 144 else value.std()
            assert std.item() == pytest.approx(0.2 / 6**0.5 if residual else 0.2, rel=0.05), name
    assert not torch.equal(params["layers.0.mlp.up_proj.weight"], params["layers.1.mlp.up_proj.weight"])


def test_bf16_keeps_the_loss_in_fp32() -> None:
    config, batch = tiny_config(), tiny_batch()
    exact = tiny_stages(config)[0](None, batch)
    first, last = (stage.to(torch.bfloat16) for stage in tiny_stages(config, 2))
    hidden = first(None, batch)
    assert hidden.dtype == torch.bfloat16
    assert last.logits(hidden, batch).dtype == torch.bfloat16
    loss = last(hidden, batch)
    assert loss.dtype == torch.float32
    torch.testing.assert_close(loss, exact, rtol=0.02, atol=0)


def test_learned_positions_need_a_length() -> None:
    from megalite.errors import ConfigError

    config: ModelConfig = tiny_config(position_embedding_type="learned_absolute", max_position_embeddings=None)
    with pytest.raises(ConfigError, match="max_position_embeddings"):
        tiny_stages(config)
