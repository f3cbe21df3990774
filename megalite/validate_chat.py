"""What can be wrong with training on conversations (SFT) or on pairs of answers (DPO); see `validate`."""

from __future__ import annotations

import math

from megalite.config import DataConfig, RunConfig

__all__ = ["chat_violations"]

_KINDS = {"sft": "conversations", "dpo": "pairs of answers"}


def chat_violations(config: RunConfig) -> list[str]:
    """What they need, and what has no meaning for them. Pure."""
    data = config.data
    kinds = [kind for kind in _KINDS if getattr(data, f"{kind}_data_path") is not None]
    found = []
    for kind, words in _KINDS.items():
        if kind not in kinds and getattr(data, f"{kind}_valid_path") is not None:
            found.append(f"{kind}_valid_path is set, but there are no {words} to train on: set --{kind}-data-path")
    if not kinds:
        names = [name for name in ("sft_too_long", "chat_template") if getattr(data, name) != getattr(DataConfig, name)]
        found += [f"{name} is set, but there are no conversations to train on: set --sft-data-path" for name in names]
    if len(kinds) == 2:
        found.append("sft_data_path and dpo_data_path are set: a run trains on conversations or on pairs of answers, leave one of them out")
    for kind in kinds:
        found += _violations(config, kind)
    return found + (_preference_violations(config) if "dpo" in kinds else [])


def _violations(config: RunConfig, kind: str) -> list[str]:
    data, train, name, words = config.data, config.train, f"{kind}_data_path", _KINDS[kind]
    found = []
    others = [other for other in ("data_path", "train_data_path", "valid_data_path", "test_data_path", "mock_data") if getattr(data, other)]
    if others:
        found.append(f"{name} and {', '.join(others)} are set: a run reads {words} or other data, leave one of them out")
    if data.tokenizer_type is None:
        found.append(f"{name} is text and needs a tokenizer: set --tokenizer-type, and --tokenizer-model unless it is bytes")
    flags = ("reset_position_ids", "reset_attention_mask", "eod_mask_loss", "separate_last_epoch", "shuffle")
    fixed = [flag for flag in flags if getattr(data, flag) != getattr(DataConfig, flag)]
    if fixed:
        found.append(f"{', '.join(fixed)} cannot be chosen for {name}, where {words} never see each other: leave out")
    has_valid = getattr(data, f"{kind}_valid_path") is not None
    if train.eval_interval is not None and not has_valid:
        found.append(f"eval_interval {train.eval_interval} is set, but there are no {words} for validation: set --{kind}-valid-path")
    if train.eval_interval is None and has_valid:
        found.append(f"{kind}_valid_path is set, but there is no evaluation: set --eval-interval, or leave it out")
    return found


def _preference_violations(config: RunConfig) -> list[str]:
    numerics, micro = config.numerics, config.train.micro_batch_size
    found = []
    if not 0 < numerics.dpo_beta < math.inf:
        found.append(f"dpo_beta is {numerics.dpo_beta}: use a number above 0, such as 0.1")
    if micro % 2:
        found.append(
            f"micro_batch_size is {micro}, and both answers of a pair lie in one micro-batch: use an even number, such as {micro + 1}"
        )
    terms = [name for name in ("label_smoothing", "z_loss") if getattr(numerics, name)]
    if terms:
        found.append(f"{', '.join(terms)} cannot be added to the loss of preferences: leave out")
    return found
