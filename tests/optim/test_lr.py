"""Learning rates, worked out by hand."""

from __future__ import annotations

import math

import pytest

from megalite.config import OptimConfig
from megalite.errors import ConfigError
from megalite.optim import lr_at


def rates(train_iters: int, steps: list[int], **settings: object) -> list[float]:
    config = OptimConfig(lr=1.0, min_lr=0.2, **settings)  # type: ignore[arg-type]
    return [lr_at(config, step, train_iters) for step in steps]


def test_constant_stays_after_warmup_and_past_the_end() -> None:
    steps = [0, 1, 3, 4, 9, 10, 1000]
    assert rates(10, steps, lr_decay_style="constant", lr_warmup_iters=4) == [0.25, 0.5, 1.0, 1.0, 1.0, 1.0, 1.0]


def test_linear() -> None:
    found = rates(10, [0, 1, 2, 3, 6, 9, 10, 11, 10**9], lr_decay_style="linear", lr_warmup_iters=2)
    assert found == pytest.approx([0.5, 1.0, 1.0, 0.9, 0.6, 0.3, 0.2, 0.2, 0.2])


def test_cosine() -> None:
    found = rates(100, [0, 2, 4, 5, 7, 8], lr_decay_style="cosine", lr_decay_iters=8)
    middle = 0.2 + 0.8 * 0.5
    assert found == pytest.approx(
        [1.0, 0.2 + 0.4 * (1 + math.sqrt(0.5)), middle, 0.2 + 0.4 * (1 + math.cos(5 * math.pi / 8)), 0.2304482, 0.2]
    )


@pytest.mark.parametrize(
    ("shape", "left"),
    [
        ("linear", [1.0, 0.75, 0.5, 0.25]),
        ("cosine", [1.0, 0.5 + 0.5 * math.sqrt(0.5), 0.5, 0.5 - 0.5 * math.sqrt(0.5)]),
        ("minus_sqrt", [1.0, 0.5, 1 - math.sqrt(0.5), 1 - math.sqrt(0.75)]),
    ],
)
def test_wsd_decays_in_the_last_steps_only(shape: str, left: list[float]) -> None:
    settings = {"lr_decay_style": "WSD", "lr_wsd_decay_iters": 4, "lr_wsd_decay_style": shape, "lr_warmup_iters": 2}
    assert rates(12, [0, 1, 2, 7], **settings) == [0.5, 1.0, 1.0, 1.0]
    assert rates(12, [8, 9, 10, 11, 12, 99], **settings) == pytest.approx([0.2 + 0.8 * part for part in left] + [0.2, 0.2])


def test_wsd_decay_longer_than_the_run_begins_after_warmup() -> None:
    settings = {"lr_decay_style": "WSD", "lr_wsd_decay_iters": 50, "lr_warmup_iters": 2}
    assert rates(10, [1, 2, 6, 10], **settings) == pytest.approx([1.0, 1.0, 0.6, 0.2])


def test_wsd_without_a_decay_falls_at_the_end() -> None:
    settings = {"lr_decay_style": "WSD", "lr_wsd_decay_iters": 0, "lr_warmup_iters": 2}
    assert rates(10, [0, 1, 2, 9, 10], **settings) == [0.5, 1.0, 1.0, 1.0, 0.2]


def test_wsd_without_its_length_names_the_flag() -> None:
    with pytest.raises(ConfigError, match="lr-wsd-decay-iters"):
        rates(10, [5], lr_decay_style="WSD")


def test_warmup_fraction_is_a_share_of_the_decay_steps() -> None:
    found = rates(1000, [0, 4, 5, 20], lr_decay_style="linear", lr_decay_iters=20, lr_warmup_fraction=0.25)
    assert found == pytest.approx([0.2, 1.0, 1.0, 0.2])


def test_warmup_as_long_as_the_run_never_divides_by_zero() -> None:
    assert rates(4, [0, 3, 4, 5], lr_decay_style="cosine", lr_warmup_iters=4) == [0.25, 1.0, 0.2, 0.2]
    assert rates(4, [3, 4, 7, 8], lr_decay_style="linear", lr_warmup_iters=8) == [0.5, 0.625, 1.0, 0.2]


@pytest.mark.parametrize("style", ["linear", "cosine", "WSD"])
def test_rates_stay_between_the_ends_and_never_rise_after_warmup(style: str) -> None:
    found = rates(37, list(range(60)), lr_decay_style=style, lr_warmup_iters=5, lr_wsd_decay_iters=11)
    assert all(0.2 <= rate <= 1.0 for rate in found[5:])
    assert found[5:] == sorted(found[5:], reverse=True)
    assert found[:5] == [0.2, 0.4, 0.6, 0.8, 1.0]


def test_inverse_square_root_falls_from_the_warmup_and_stops_at_min_lr() -> None:
    settings = {"lr_decay_style": "inverse-square-root", "lr_warmup_iters": 4}
    found = rates(1000, [0, 3, 4, 9, 16, 64, 100, 101, 999, 1000, 5000], **settings)
    assert found == pytest.approx([0.25, 1.0, 1.0, 2 / 3, 0.5, 0.25, 0.2, 0.2, 0.2, 0.2, 0.2])
    assert rates(1000, [0, 1, 4], lr_decay_style="inverse-square-root") == pytest.approx([1.0, 1.0, 0.5])
    assert rates(10, [8, 9, 10], **settings) == pytest.approx([math.sqrt(0.5), 2 / 3, 0.2])  # the end is the end


def test_wsd_exponential_halves_and_reaches_the_end() -> None:
    settings = {"lr_decay_style": "WSD", "lr_wsd_decay_iters": 4, "lr_wsd_decay_style": "exponential"}
    left = [1.0, 2 * 0.5**0.25 - 1, 2 * 0.5**0.5 - 1, 2 * 0.5**0.75 - 1, 0.0]
    assert rates(12, [7, 8, 9, 10, 11, 12], **settings) == pytest.approx([1.0] + [0.2 + 0.8 * part for part in left])


@pytest.mark.parametrize("style", ["linear", "cosine", "WSD", "inverse-square-root"])
def test_times_in_samples_are_times_in_steps_of_the_full_batch(style: str) -> None:
    in_steps = {"lr_warmup_iters": 3, "lr_decay_iters": 20}
    in_samples = {"lr_warmup_samples": 24, "lr_decay_samples": 160}
    if style == "WSD":
        in_steps["lr_wsd_decay_iters"], in_samples["lr_wsd_decay_samples"] = 5, 40
    steps = list(range(25))
    expected = rates(100, steps, lr_decay_style=style, **in_steps)
    config = OptimConfig(lr=1.0, min_lr=0.2, lr_decay_style=style, **in_samples)  # type: ignore[arg-type]
    assert [lr_at(config, step, 100, batch_size=8) for step in steps] == expected


def test_samples_that_are_no_whole_steps_are_not_rounded() -> None:
    config = OptimConfig(lr=1.0, min_lr=0.0, lr_decay_style="linear", lr_warmup_samples=20, lr_decay_samples=100)
    found = [lr_at(config, step, 99, batch_size=8) for step in (0, 1, 2, 3, 12, 13)]
    assert found == pytest.approx([0.4, 0.8, 1.0, 0.95, 0.05, 0.0])


@pytest.mark.parametrize("style", ["constant", "linear", "cosine", "inverse-square-root", "WSD"])
@pytest.mark.parametrize("last", ["linear", "cosine", "minus_sqrt", "exponential"])
def test_requirement_64_rates_are_clamped_beyond_the_end(style: str, last: str) -> None:
    settings = {"lr_decay_style": style, "lr_wsd_decay_style": last, "lr_wsd_decay_iters": 7, "lr_warmup_iters": 3, "lr_decay_iters": 20}
    expected = 1.0 if style == "constant" else 0.2
    assert rates(50, [20, 21, 49, 50, 1000, 10**12], **settings) == [expected] * 6
