"""What is drawn from, and text as it comes."""

from __future__ import annotations

import pytest
import torch

from megalite.generation import Sampling, TextStream
from megalite.generation.choice import choose

LOGITS = torch.tensor([0.0, 3.0, 1.0, 2.0])  # probabilities 0.03, 0.64, 0.09, 0.24


def drawn(num: int = 400, **settings: object) -> set[int]:
    generator = torch.Generator().manual_seed(1)
    sampling = Sampling(max_new_tokens=1, **settings)  # type: ignore[arg-type]
    return {choose(LOGITS, sampling, generator) for _ in range(num)}


@pytest.mark.parametrize(
    ("settings", "wanted"),
    [
        ({}, {0, 1, 2, 3}),
        ({"top_k": 2}, {1, 3}),
        ({"top_p": 0.7}, {1, 3}),
        ({"top_p": 0.64}, {1}),
        ({"top_p": 1e-9}, {1}),
        ({"top_p": 1.0}, {0, 1, 2, 3}),
        ({"min_p": 0.3}, {1, 3}),
        ({"min_p": 1.0}, {1}),
        ({"top_k": 3, "min_p": 0.1}, {1, 2, 3}),
    ],
)
def test_what_is_drawn_from(settings: dict[str, object], wanted: set[int]) -> None:
    assert drawn(**settings) == wanted


def test_the_penalty_makes_what_occurred_less_likely_on_both_sides_of_zero() -> None:
    greedy = Sampling(max_new_tokens=1, temperature=0, repetition_penalty=2.0)
    generator = torch.Generator()
    assert choose(LOGITS, greedy, generator, seen=[1]) == 3
    assert choose(torch.tensor([-1.0, -1.5]), greedy, generator, seen=[0, 7]) == 1
    assert choose(LOGITS, greedy, generator) == 1


def pieces(text: str, stops: tuple[str, ...] = ()) -> list[str]:
    """Shown after each byte of `text`, and at the end."""
    stream = TextStream(lambda ids: bytes(ids).decode("utf-8", errors="replace"), stops)
    return [*(stream.add(byte) for byte in text.encode()), stream.finish()]


def test_half_characters_are_never_shown() -> None:
    found = pieces("a\u00e9\U0001f600b")
    assert "".join(found) == "a\u00e9\U0001f600b"
    assert found == ["a", "", "\u00e9", "", "", "", "\U0001f600", "b", ""]


def test_what_stays_half_is_shown_at_the_end() -> None:
    stream = TextStream(lambda ids: bytes(ids).decode("utf-8", errors="replace"))
    assert stream.add(0xC3) == ""
    assert stream.finish() == "\N{REPLACEMENT CHARACTER}"


@pytest.mark.parametrize(
    ("stops", "shown"),
    [(("cd",), "ab"), (("x", "def"), "abc"), (("cx",), "abcdef"), (("efg",), "abcdef"), (("", "f"), "abcde"), (("bc", "ab"), "")],
)
def test_text_ends_before_a_stop_string_which_is_never_shown_in_part(stops: tuple[str, ...], shown: str) -> None:
    found = pieces("abcdef", stops)
    assert "".join(found) == shown
    for number in range(1, len(found)):
        assert shown.startswith("".join(found[:number]))
