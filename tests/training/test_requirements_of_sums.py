"""What users of data parallelism have suffered: averages of averages, masks that cover everything, norms of a part, factors of the
world size. One test each, named by the requirement's number."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
import torch

from megalite.testing.layouts import Layout
from megalite.testing.parity import TrainedCase, build_in_this_world, compare, tiny_config, train_case
from megalite.training.loop import train_step
from tests.ranks import run_ranks


def masked_step(layout: Layout, micro_batch_size: int, seen: list[int]) -> tuple[float, float]:
    """Loss and gradient norm of a step in which sample i has `seen[i]` positions that bear a loss, the first ones."""
    config = tiny_config()
    config = replace(
        config,
        model=replace(config.model, num_layers=4),
        train=replace(config.train, micro_batch_size=micro_batch_size, global_batch_size=len(seen)),
    )
    run = build_in_this_world(layout.apply(config).resolve())
    run.train_loader = _Masked(run.train_loader, seen)  # type: ignore[assignment]
    record = train_step(run)
    return record.loss.item(), record.grad_norm.item()


class _Masked:
    """A loader whose samples bear losses at their first positions only."""

    def __init__(self, loader: object, seen: list[int]) -> None:
        self._loader, self._seen = loader, seen

    @property
    def batch_sizes(self) -> object:
        return self._loader.batch_sizes  # type: ignore[attr-defined]

    def next_step(self) -> list[object]:
        batches = self._loader.next_step()  # type: ignore[attr-defined]
        return [replace(batch, loss_mask=self._mask(batch)) for batch in batches]

    def _mask(self, batch: object) -> torch.Tensor:
        mask = torch.zeros_like(batch.loss_mask)  # type: ignore[attr-defined]
        for row in range(len(mask)):
            mask[row, : self._seen[batch.first_sample + row]] = 1  # type: ignore[attr-defined]
        return mask


UNEQUAL = [1, 16, 0, 3, 9, 2, 0, 0]


def test_requirement_52_unequal_masks_weigh_by_tokens_in_every_layout() -> None:
    """A mean of means would weigh a sample with one token like one with sixteen."""
    (reference,) = run_ranks(masked_step, 1, Layout(), 8, UNEQUAL)
    for layout, micro in ((Layout(), 1), (Layout(), 2), (Layout(dp=2), 1), (Layout(dp=4, zero=3), 2), (Layout(pp=2, dp=2, zero=1), 1)):
        for found in run_ranks(masked_step, layout.world_size, layout, micro, UNEQUAL):
            assert found == pytest.approx(reference, rel=2e-6), (str(layout), micro)


def test_requirement_52_the_loss_is_the_mean_over_all_tokens() -> None:
    """Not the mean of the samples' means: with 1 and 16 tokens the two differ."""
    (both,) = run_ranks(masked_step, 1, Layout(), 1, [1, 16])
    (few,) = run_ranks(masked_step, 1, Layout(), 1, [1, 0])
    (many,) = run_ranks(masked_step, 1, Layout(), 1, [0, 16])
    assert both[0] == pytest.approx((few[0] + 16 * many[0]) / 17, rel=1e-6)
    assert both[0] != pytest.approx((few[0] + many[0]) / 2, rel=1e-5)


def test_requirement_53_a_micro_batch_without_tokens_adds_nothing() -> None:
    (full,) = run_ranks(masked_step, 1, Layout(), 2, [5, 7, 0, 0])
    assert np.isfinite(full).all()
    for found in run_ranks(masked_step, 2, Layout(dp=2), 2, [5, 7, 0, 0]):
        assert found == pytest.approx(full, rel=2e-6)
    (nothing,) = run_ranks(masked_step, 1, Layout(), 2, [0, 0, 0, 0])
    assert nothing == (0.0, 0.0)


def whole(layout: Layout) -> TrainedCase:
    config = tiny_config()
    config = replace(config, model=replace(config.model, num_layers=4), train=replace(config.train, train_iters=2))
    return run_ranks(train_case, layout.world_size, config, layout, timeout=120)[0]


def test_requirements_54_and_55_one_norm_over_all_shards_in_which_every_parameter_counts_once() -> None:
    """Two key/value heads over tp 4 are held twice, norms four times, the tied embedding on two stages: the norm is the dense one."""
    dense = whole(Layout(tied=True))
    for layout in (
        Layout(tied=True, tp=4),
        Layout(tied=True, tp=2, pp=2, sequence_parallel=True),
        Layout(tied=True, pp=4, dp=2, zero=3),
    ):
        assert whole(layout).grad_norms == pytest.approx(dense.grad_norms, rel=1e-5), str(layout)


def test_requirement_56_plain_and_distributed_tensors_go_into_one_norm() -> None:
    """At tp 2 with ZeRO 3, parameters lie on two meshes, and at zero 0 on one: the logged norm is the whole one each time."""
    dense = whole(Layout())
    for layout in (Layout(tp=2, dp=2, zero=3), Layout(tp=2, dp=2)):
        assert whole(layout).grad_norms == pytest.approx(dense.grad_norms, rel=1e-5), str(layout)


def test_requirement_58_the_global_batch_is_the_setting_and_accumulation_follows() -> None:
    config = tiny_config()
    sizes = {
        (dp, micro): Layout(dp=dp).apply(replace(config, train=replace(config.train, micro_batch_size=micro)))
        for dp in (1, 2, 4)
        for micro in (1, 2)
    }
    for (dp, micro), laid_out in sizes.items():
        assert laid_out.global_batch(dp) == 16
        assert laid_out.num_microbatches(dp) == 16 // (dp * micro)
    reference = whole(Layout())
    assert compare(whole(Layout(dp=4)), reference).loss <= 1e-6
