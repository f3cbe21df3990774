"""Pairs of answers: what is read, what is refused, and the order of the samples."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from megalite.data.chat_encoding import ChatEncoder
from megalite.data.preferences import PreferenceDataset, encode_preferences, read_preferences
from megalite.errors import DataError

SCORES = {"chosen_logp": -3.5, "rejected_logp": -4.0}


def write(folder: Path, records: list[Any]) -> str:
    path = folder / "pairs.jsonl"
    path.write_text("\n".join(record if isinstance(record, str) else json.dumps(record) for record in records) + "\n")
    return str(path)


def pair(number: int, **more: Any) -> dict[str, Any]:
    return {"prompt": f"question {number}", "chosen": "yes" * (number + 1), "rejected": "no", **SCORES, **more}


def dataset(folder: Path, records: list[Any], seq_length: int = 60, num_samples: int | None = None) -> PreferenceDataset:
    pairs, left_out = encode_preferences(read_preferences(write(folder, records)), ChatEncoder("bytes"), seq_length)
    return PreferenceDataset(pairs, seq_length=seq_length, num_samples=num_samples, seed=7, left_out=left_out)


def test_both_answers_of_a_pair_follow_each_other_with_their_scores(tmp_path: Path) -> None:
    data = dataset(tmp_path, [pair(number) for number in range(5)], num_samples=23)
    assert (len(data), data.num_epochs) == (30, 3)
    encoder, seen = ChatEncoder("bytes"), []
    for i in range(0, 30, 2):
        chosen, rejected = data[i], data[i + 1]
        assert (chosen.reference, rejected.reference) == (-3.5, -4.0)
        answers = [bytes(sample.labels[sample.loss_mask > 0][:-1].astype(np.uint8)).decode() for sample in (chosen, rejected)]
        assert answers[1].strip() == "no" and set(answers[0].strip()) == set("yes")
        seen.append(len(answers[0].strip()) // 3)
    epochs = [seen[0:5], seen[5:10], seen[10:15]]
    assert all(sorted(epoch) == [1, 2, 3, 4, 5] for epoch in epochs) and len(set(map(tuple, epochs))) > 1
    assert encoder.template.name


def test_earlier_answers_of_a_conversation_are_not_learned(tmp_path: Path) -> None:
    messages = [{"role": "user", "content": "a"}, {"role": "assistant", "content": "earlier"}, {"role": "user", "content": "b"}]
    data = dataset(tmp_path, [{"messages": messages, "chosen": "good", "rejected": "bad", **SCORES}])
    learned = bytes(data[0].labels[data[0].loss_mask > 0][:-1].astype(np.uint8)).decode()
    assert "good" in learned and "earlier" not in learned


def test_pairs_that_are_too_long_are_left_out_and_named(tmp_path: Path) -> None:
    data = dataset(tmp_path, [pair(0), pair(30)], seq_length=50)
    assert len(data) == 2
    assert data.lines("train")[1] == f"  1 pairs left out, too long ({tmp_path}/pairs.jsonl:2)"
    with pytest.raises(DataError, match=r"pairs.jsonl:2: an answer ends after \d+ tokens, a sequence of 50"):
        encode_preferences(read_preferences(write(tmp_path, [pair(0), pair(30)])), ChatEncoder("bytes"), 50, "refuse")
    with pytest.raises(DataError, match="none of the 1 pairs fits 11 tokens"):
        dataset(tmp_path, [pair(0)], seq_length=10)


@pytest.mark.parametrize(
    ("record", "words"),
    [
        ("{", "invalid JSON"),
        ("[]", "the record is no object"),
        ({"chosen": "a", "rejected": "b"}, "there is no prompt"),
        ({"prompt": "x", "chosen": "a"}, "rejected is no text"),
        ({"prompt": "x", "chosen": "", "rejected": "b"}, "chosen is no text"),
        (pair(0, chosen_logp=0.5), "chosen_logp is 0.5"),
        (pair(0, rejected_logp=None), "rejected_logp is None"),
        ({"messages": [3], "chosen": "a", "rejected": "b"}, "messages must be a list"),
    ],
)
def test_what_is_no_pair_is_named_with_its_line(record: Any, words: str, tmp_path: Path) -> None:
    with pytest.raises(DataError, match=rf"pairs.jsonl:2: {words}"):
        list(read_preferences(write(tmp_path, [pair(0), record])))


def test_pairs_without_scores_say_which_tool_gives_them(tmp_path: Path) -> None:
    with pytest.raises(DataError, match=r"tools/score_preferences\.py --load"):
        dataset(tmp_path, [{"prompt": "x", "chosen": "a", "rejected": "b"}])
    with pytest.raises(DataError, match="holds no pair"):
        list(read_preferences(write(tmp_path, [""])))
