"""The tokenizer inside a GGUF file, as the files of a Hugging Face folder.

Byte-level BPE is written for the ways to cut text into words that are known here; of other tokenizers nothing is written, and this is
said. A wrong cut would give other tokens without a word.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from megalite.log import get_logger

__all__ = ["write_tokenizer"]

_SPECIAL = 3  # token_type of what is no text
_DIGITS = {"smollm": True, "gpt-2": False, "default": False}
"""{tokenizer.ggml.pre: whether every digit is a word}"""
_ROLES = {"bos": "bos_token", "eos": "eos_token", "unknown": "unk_token", "padding": "pad_token"}


def write_tokenizer(fields: Mapping[str, Any], folder: Path) -> bool:
    """Write tokenizer.json and tokenizer_config.json to `folder`; False where the kind is not known. Says so in the log."""
    kind, cut = fields.get("tokenizer.ggml.model"), fields.get("tokenizer.ggml.pre", "default")
    if kind != "gpt2" or cut not in _DIGITS:
        get_logger().warning(f"the tokenizer (model {kind}, pre {cut}) is not converted: give --tokenizer-type and --tokenizer-model")
        return False
    from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers

    tokens = fields["tokenizer.ggml.tokens"]
    merges = [tuple(merge.split(" ", 1)) for merge in fields["tokenizer.ggml.merges"]]
    tokenizer = Tokenizer(models.BPE(vocab={token: i for i, token in enumerate(tokens)}, merges=merges))
    cutters: list[Any] = [pre_tokenizers.Digits(individual_digits=True)] if _DIGITS[cut] else []
    cutters.append(pre_tokenizers.ByteLevel(add_prefix_space=bool(fields.get("tokenizer.ggml.add_space_prefix", False))))
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(cutters)
    tokenizer.decoder = decoders.ByteLevel()
    special = [token for token, what in zip(tokens, fields["tokenizer.ggml.token_type"], strict=True) if what == _SPECIAL]
    tokenizer.add_special_tokens([AddedToken(token, special=True, normalized=False) for token in special])
    tokenizer.save(str(folder / "tokenizer.json"))
    settings: dict[str, Any] = {"tokenizer_class": "PreTrainedTokenizerFast", "clean_up_tokenization_spaces": False}
    roles = {key: fields[f"tokenizer.ggml.{role}_token_id"] for role, key in _ROLES.items() if f"tokenizer.ggml.{role}_token_id" in fields}
    settings |= {key: tokens[number] for key, number in roles.items()}
    if "tokenizer.chat_template" in fields:
        settings["chat_template"] = fields["tokenizer.chat_template"]
    (folder / "tokenizer_config.json").write_text(json.dumps(settings, indent=2, ensure_ascii=False) + "\n")
    ends = {f"{key}_id": number for key, number in roles.items() if key != "unk_token"}
    (folder / "generation_config.json").write_text(json.dumps(ends, indent=2) + "\n")
    return True
