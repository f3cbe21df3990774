"""Fine-tuning samples: packing, masks, order, and that packed conversations lose what they lose alone."""

from __future__ import annotations

import doctest
import json
import re
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from megalite.config import DataConfig, RunConfig, TrainConfig
from megalite.data import packing
from megalite.data.batch import MicroBatch
from megalite.data.chat import Conversation
from megalite.data.chat_encoding import ChatEncoder
from megalite.data.loader import GlobalBatchLoader
from megalite.data.packing import first_fit
from megalite.data.sample import Sample
from megalite.data.sft_dataset import EncodedChats, SFTDataset, encode_chats
from megalite.errors import ConfigError, DataError
from megalite.model import GPTStage
from megalite.testing.layouts import Layout
from megalite.testing.parity import Tolerance, TrainedCase, bitwise_differences, compare, tiny_config, train_case
from megalite.validate_training import data_violations
from tests.generation.helpers import tiny_run, tiny_stage
from tests.ranks import run_ranks

SEQ = 13


def chats(lengths: list[int], answers: int = 2) -> EncodedChats:
    """Conversations with ids 1000 c + 0, 1, ...; the last `answers` tokens are the answer."""
    ids = [np.arange(length, dtype=np.int32) + 1000 * number for number, length in enumerate(lengths)]
    is_answer = [np.arange(length) >= length - answers for length in lengths]
    return EncodedChats(np.concatenate(ids), np.concatenate(is_answer), np.cumsum([0, *lengths]))


def dataset(lengths: list[int], num_samples: int | None = None, seed: int = 3) -> SFTDataset:
    return SFTDataset(chats(lengths), seq_length=SEQ, num_samples=num_samples, seed=seed)


def as_lists(sample: Sample) -> list[list[float]]:
    assert sample.document_ids is not None
    parts = (sample.tokens, sample.labels, sample.loss_mask, sample.position_ids, sample.document_ids)
    return [part.tolist() for part in parts]


def test_documentation() -> None:
    assert doctest.testmod(packing).failed == 0


@settings(max_examples=60, deadline=None)
@given(st.lists(st.integers(1, 9), max_size=40), st.integers(9, 12))
def test_first_fit_is_what_a_plain_search_gives(lengths: list[int], size: int) -> None:
    bins: list[list[int]] = []
    for piece, length in enumerate(lengths):
        found = next((held for held in bins if sum(lengths[other] for other in held) + length <= size), None)
        if found is None:
            bins.append([piece])
        else:
            found.append(piece)
    assert first_fit(lengths, size) == bins


def test_a_sample_token_by_token() -> None:
    """Conversations of 5 and 8 tokens: 4 and 7 positions, and two of padding."""
    data = dataset([5, 8])
    sample, order = data[0], data.conversations(0)
    assert len(data) == 1
    assert sorted(order) == [0, 1]
    by_number = {number: position for position, number in enumerate(order)}
    five = slice(0, 4) if by_number[0] == 0 else slice(7, 11)
    eight = slice(0, 7) if by_number[1] == 0 else slice(4, 11)
    assert sample.tokens[five].tolist() == [0, 1, 2, 3]
    assert sample.labels[five].tolist() == [1, 2, 3, 4]
    assert sample.loss_mask[five].tolist() == [0, 0, 1, 1]
    assert sample.tokens[eight].tolist() == [*range(1000, 1007)]
    assert sample.labels[eight].tolist() == [*range(1001, 1008)]
    assert sample.loss_mask[eight].tolist() == [0, 0, 0, 0, 0, 1, 1]
    assert sample.position_ids[eight].tolist() == [*range(7)]
    assert sample.document_ids is not None
    assert (
        sample.document_ids.tolist() == [0] * (five.stop if five.start == 0 else eight.stop) + [1] * (7 if five.start == 0 else 4) + [2] * 2
    )
    assert sample.loss_mask[11:].tolist() == [0, 0]
    assert sample.position_ids[11:].tolist() == [0, 1]


@settings(max_examples=40, deadline=None)
@given(st.lists(st.integers(2, SEQ + 1), min_size=1, max_size=30), st.integers(0, 2**32 - 1), st.integers(0, 60))
def test_every_epoch_reads_every_conversation_once(lengths: list[int], seed: int, num_samples: int) -> None:
    data = dataset(lengths, num_samples, seed)
    assert len(data) >= num_samples
    answers, start = 0, 0
    for epoch in range(data.num_epochs):
        held: list[int] = []
        while len(held) < len(lengths):
            held += data.conversations(start)
            answers += int(data[start].loss_mask.sum())
            start += 1
        assert sorted(held) == [*range(len(lengths))], epoch
    assert start == len(data)
    # the first token of a conversation is predicted by nothing
    assert answers == data.num_epochs * sum(min(2, length - 1) for length in lengths)


def test_requirement_32_samples_do_not_depend_on_what_was_read_or_asked_for() -> None:
    """Requirement 32: samples are independent of access order; and of the length of the run."""
    lengths = np.random.RandomState(0).randint(2, SEQ + 2, size=50).tolist()
    short, long = dataset(lengths, None), dataset(lengths, 100)
    assert len(short) < 100 <= len(long)
    expected = [as_lists(short[i]) for i in range(len(short))]
    short[3].loss_mask[:] = 7  # belongs to whoever asked for it
    assert [as_lists(long[i]) for i in reversed(range(len(short)))] == expected[::-1]
    assert [as_lists(short[i]) for i in range(len(short))] == expected
    epochs = [[long.conversations(i) for i in range(first, first + 3)] for first in (0, len(short))]
    assert epochs[0] != epochs[1], "another epoch is packed and ordered anew"
    assert [dataset(lengths, seed=4).conversations(i) for i in range(3)] != epochs[0]


def test_requirement_33_padding_is_masked_by_position() -> None:
    """Requirement 33: id 0, which fills the padding, keeps its loss where it is an answer."""
    data = SFTDataset(EncodedChats(np.zeros(4, np.int32), np.ones(4, bool), np.array([0, 4])), seq_length=SEQ, num_samples=None, seed=1)
    assert data[0].loss_mask.tolist() == [1.0] * 3 + [0.0] * 10


def test_resuming_and_layouts_only_need_the_number_of_samples() -> None:
    data = dataset([3, 9, 14, 2, 5, 5, 11, 7] * 3, 24)

    def read(dp_size: int, consumed: int) -> list[list[list[int]]]:
        loaders = [
            GlobalBatchLoader(
                data, micro_batch_size=2, global_batch_size=8, dp_rank=r, dp_size=dp_size, consumed_samples=consumed, num_workers=0
            )
            for r in range(dp_size)
        ]
        micro_batches = [micro for loader in loaders for micro in loader.next_step()]
        assert all(micro.document_ids is not None for micro in micro_batches)
        return [micro.tokens.tolist() for micro in sorted(micro_batches, key=lambda micro: micro.index)]

    assert read(1, 8) == read(2, 8) == read(4, 8)
    assert read(1, 8) != read(1, 0)


def conversation(question: str, answer: str, where: str = "c.jsonl:1") -> Conversation:
    return Conversation([{"role": "user", "content": question}, {"role": "assistant", "content": answer}], [False, True], where)


def test_what_is_too_long_is_cut_counted_or_refused() -> None:
    encoder = ChatEncoder("bytes")
    prompt = len("user: q\nassistant:")
    long, late, fits = (
        conversation("q", "a" * 40, "c.jsonl:1"), conversation("q" * 40, "a", "c.jsonl:2"), conversation("q", "abc", "c.jsonl:3")
    )  # fmt: skip
    found = encode_chats([long, late, fits], encoder, prompt + 5)
    assert found.lengths.tolist() == [prompt + 6, prompt + 6]
    assert (found.cut, found.without_answer) == (["c.jsonl:1"], ["c.jsonl:2"])
    assert found.is_answer[: prompt + 6].tolist() == [False] * prompt + [True] * 6
    assert encoder.tokenizer.eod_id not in found.ids[: prompt + 6].tolist(), "an answer that is cut does not end"
    said = "\n".join(SFTDataset(found, seq_length=prompt + 5, num_samples=None, seed=1).lines("train"))
    assert "1 conversations cut at the end (c.jsonl:1)" in said
    assert "1 conversations left out: no answer within a sequence (c.jsonl:2)" in said
    with pytest.raises(DataError, match=re.escape("c.jsonl:1: the conversation has")):
        encode_chats([long], encoder, prompt + 5, "refuse")
    with pytest.raises(DataError, match="none of the 1 conversations has an answer within 9 tokens"):
        encode_chats([late], encoder, 8)


def test_numbers_that_make_no_sense() -> None:
    with pytest.raises(ConfigError) as caught:
        SFTDataset(chats([3]), seq_length=0, num_samples=-1, seed=-1)
    assert len(caught.value.violations) == 3


def loss_of(stage: GPTStage, sample: Sample) -> float:
    fields = {
        name: torch.from_numpy(getattr(sample, name))[None] for name in ("tokens", "labels", "loss_mask", "position_ids", "document_ids")
    }
    with torch.no_grad():
        return float(stage(None, MicroBatch(**fields, first_sample=0)))


def test_packed_conversations_lose_what_they_lose_alone() -> None:
    """Answers see neither the neighbours nor their positions."""
    encoder, stage = ChatEncoder("bytes"), tiny_stage(tiny_run(max_position_embeddings=64)).eval()
    talks = [conversation("ab", "cde"), conversation("x", "yz"), conversation("k", "l")]
    packed = SFTDataset(encode_chats(talks, encoder, 90), seq_length=90, num_samples=None, seed=1)
    assert len(packed) == 1
    alone = [SFTDataset(encode_chats([talk], encoder, 90), seq_length=90, num_samples=None, seed=1)[0] for talk in talks]
    assert loss_of(stage, packed[0]) == pytest.approx(sum(loss_of(stage, sample) for sample in alone), rel=1e-5)
    assert packed[0].loss_mask.sum() == 4 + 1 + 3 + 1 + 2 + 1, "letters, the space before them and the end of the answer"


@pytest.mark.parametrize(
    ("data", "eval_interval", "words"),
    [
        ({"mock_data": True}, None, "sft_data_path and mock_data are set"),
        ({"data_path": ("a",)}, None, "sft_data_path and data_path are set"),
        ({"tokenizer_type": None}, None, "needs a tokenizer"),
        ({"reset_position_ids": True}, None, "reset_position_ids cannot be chosen"),
        ({}, 2, "set --sft-valid-path"),
        ({"sft_valid_path": "v"}, None, "set --eval-interval"),
        ({"sft_data_path": None, "data_path": ("a",), "chat_template": "t"}, None, "chat_template is set, but there are no conversations"),
    ],
)
def test_settings_that_do_not_fit_together(data: dict, eval_interval: int | None, words: str) -> None:
    base: dict = {"sft_data_path": "x.jsonl", "tokenizer_type": "bytes"}
    config = RunConfig(data=DataConfig(**{**base, **data}), train=TrainConfig(eval_interval=eval_interval))
    found = data_violations(config)
    assert len([text for text in found if words in text]) == 1, found
    good = RunConfig(data=DataConfig(**base, sft_valid_path="v"), train=TrainConfig(eval_interval=2))
    assert data_violations(good) == []


def train_on(path: str, layout: Layout) -> TrainedCase | None:
    config = tiny_config()
    data = DataConfig(sft_data_path=path, tokenizer_type="bytes", seq_length=48, num_workers=0)
    train = replace(config.train, micro_batch_size=1, global_batch_size=4, train_iters=2)
    return train_case(replace(config, model=replace(config.model, vocab_size=257), data=data, train=train), layout)


def test_requirement_53_layouts_train_alike_on_conversations(tmp_path: Path) -> None:
    """Requirement 53: micro-batches hold unequal numbers of answers' tokens, and the loss is that of the tokens of the global batch."""
    file = tmp_path / "talks.jsonl"
    records = [{"prompt": "q" * (1 + 3 * number % 7), "completion": "a" * (1 + 5 * number % 13)} for number in range(11)]
    file.write_text("\n".join(map(json.dumps, records)))
    reference = run_ranks(train_on, 1, str(file), Layout())[0]
    case = run_ranks(train_on, 4, str(file), Layout(tp=2, dp=2))[0]
    assert compare(case, reference).within(Tolerance())
    assert bitwise_differences(run_ranks(train_on, 2, str(file), Layout(pp=2))[0], reference) == []
