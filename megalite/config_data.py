"""What is read: the settings of the data, and the one reading of "WEIGHT PREFIX ..." lists.

Decisions
- A blend is a list of strings, on the command line and in TOML alike: `--data-path 0.3 web 0.7 books` is
  `data_path = ["0.3", "web", "0.7", "books"]`. Megatron's rule decides what is a weight.
- Either one list is cut by `split`, or every split has its own list. Both at once is refused.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Literal, NamedTuple

from megalite.errors import ConfigError

__all__ = ["DataConfig", "Source", "SplitName", "parse_source"]

SplitName = Literal["train", "valid", "test"]


class Source(NamedTuple):
    """The datasets of one split. `weights`: shares of the samples, not yet normalized; None: as much as each one holds."""

    prefixes: tuple[str, ...]
    weights: tuple[float, ...] | None


@dataclass(frozen=True, kw_only=True)
class DataConfig:
    """What is read. The order of samples is a function of these fields and the seed, never of the layout."""

    data_path: tuple[str, ...] = ()
    """PREFIX of a .bin/.idx pair, or WEIGHT PREFIX WEIGHT PREFIX ...: a blend, weights are shares of the samples; prefixes without
    weights: everything once, in proportion to size."""
    train_data_path: tuple[str, ...] = ()
    """As --data-path, for training alone; then --split and --data-path are not used."""
    valid_data_path: tuple[str, ...] = ()
    """As --data-path, for validation alone."""
    test_data_path: tuple[str, ...] = ()
    """As --data-path, for one evaluation after the last step."""
    split: str = "969,30,1"
    """Shares of the documents for training, validation and test; missing ones are 0."""
    seq_length: int = 128
    """Tokens S per sample."""
    mock_data: bool = False
    """Pseudo-random tokens instead of files; needs a vocabulary size."""
    tokenizer_type: Literal["bytes", "chars", "sentencepiece", "hf", "tiktoken"] | None = None
    """Kind of tokenizer; all but bytes need --tokenizer-model."""
    tokenizer_model: str | None = None
    """File or folder of the tokenizer."""
    data_cache_path: str | None = None
    """Folder for sample indices, shared or of each node; not set: beside the data."""
    num_workers: int = 2
    """Threads of each rank that read the next step's samples while a step computes; 0: the step reads its samples itself."""
    shuffle: Literal["megatron", "feistel"] = "megatron"
    """Order of samples: megatron (documents and samples, stored indices) or feistel (samples alone, computed, nothing stored)."""
    separate_last_epoch: bool | None = None
    """Shuffle a last epoch that is only partly needed apart from the others; not set: when under 80 percent of it is needed."""
    reset_position_ids: bool = False
    """Positions start again at 0 after each end of document."""
    reset_attention_mask: bool = False
    """Tokens attend only within their document; the mask takes S x S bytes per sample of a micro-batch."""
    eod_mask_loss: bool = False
    """The loss leaves out end-of-document tokens."""
    sft_data_path: str | None = None
    """Conversations to fine-tune on, one per line of a .jsonl file, instead of --data-path; the loss counts answers alone."""
    sft_valid_path: str | None = None
    """Conversations for validation."""
    dpo_data_path: str | None = None
    """Pairs of a chosen and a rejected answer to train on by preference (DPO), scored by tools/score_preferences.py."""
    dpo_valid_path: str | None = None
    """Such pairs for validation."""
    sft_too_long: Literal["truncate", "refuse"] = "truncate"
    """Conversations longer than a sequence: truncate (cut at the end, counted; pairs are left out) or refuse."""
    chat_template: str | None = None
    """File with a Jinja chat template, in place of the tokenizer's own."""

    @property
    def has_files(self) -> bool:
        """Whether any dataset of token files is named."""
        return bool(self.data_path) or self.has_own_splits

    @property
    def has_own_splits(self) -> bool:
        """Whether the splits have lists of their own instead of shares of one list."""
        return bool(self.train_data_path or self.valid_data_path or self.test_data_path)

    def source(self, split: SplitName) -> Source | None:
        """The datasets of a split, None where none are named. Raises ConfigError for a list that cannot be read."""
        if not self.has_own_splits:
            return parse_source(self.data_path, "data_path")
        name = f"{split}_data_path"
        return parse_source(getattr(self, name), name)


def parse_source(texts: tuple[str, ...], name: str) -> Source | None:
    """What a list of weights and prefixes means; None for an empty one. `name` is the setting, for messages.

    An odd number of texts are prefixes. An even number are pairs of weight and prefix if the first of every pair is a
    number, and prefixes if none is. Raises ConfigError for a mixture, a weight that is no number above 0, an empty prefix.
    """
    texts = tuple(text.strip() for text in texts)
    if not texts:
        return None
    prefixes, weights = texts, None
    if len(texts) % 2 == 0:
        numbers = [_as_number(text) for text in texts[::2]]
        if None not in numbers:
            prefixes, weights = texts[1::2], tuple(number for number in numbers if number is not None)
        elif any(number is not None for number in numbers):
            wrong = next(text for text, number in zip(texts[::2], numbers, strict=True) if number is None)
            raise ConfigError(
                f"{name} mixes weighted and bare prefixes: {wrong!r} stands where a weight should; give all a weight, or none"
            )
    problems = [f"{name}: weight {weight:g} of {prefix}: use a number above 0, or leave the dataset out"
                for prefix, weight in zip(prefixes, weights or (), strict=False) if not 0 < weight < math.inf]  # fmt: skip
    if "" in prefixes:
        problems.append(f"{name} holds an empty prefix: {' '.join(map(repr, texts))}")
    if problems:
        raise ConfigError(problems)
    return Source(prefixes, weights)


def _as_number(text: str) -> float | None:
    try:
        return float(text)
    except ValueError:
        return None
