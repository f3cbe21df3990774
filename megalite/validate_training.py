"""What can be wrong with the steps, the learning rate, the data and the output of a run; see `validate`.

Nothing here looks at a file: whether a path exists is found where it is opened.
"""

from __future__ import annotations

import math
import re

from megalite.config import DataConfig, OptimConfig, RunConfig
from megalite.config_data import parse_source
from megalite.errors import ConfigError

__all__ = ["data_violations", "output_violations", "split_shares", "training_violations"]

# what `data.splits` reads; it cannot be asked here because it needs numpy, and a test holds the two together
_NUMBER = r"(?:\d+(?:\.\d*)?|\.\d+)"
_SEPARATOR = r"(?:\s*[,/]\s*|\s+)"
_SPLIT = re.compile(rf"\s*{_NUMBER}(?:{_SEPARATOR}{_NUMBER}){{0,2}}\s*", re.ASCII)


def training_violations(config: RunConfig) -> list[str]:
    """Optimizer, learning rate and steps."""
    optim, train = config.optim, config.train
    found = []
    if not 0 < optim.lr < math.inf:
        found.append(f"lr is {optim.lr}: use a number above 0")
    if not 0 <= optim.min_lr <= optim.lr:
        found.append(f"min_lr is {optim.min_lr}: use 0 or more, at most lr {optim.lr}")
    for name in ("adam_beta1", "adam_beta2"):
        if not 0 <= getattr(optim, name) < 1:
            found.append(f"{name} is {getattr(optim, name)}: use 0 or more and less than 1")
    if not 0 < optim.adam_eps < math.inf:
        found.append(f"adam_eps is {optim.adam_eps}: use a number above 0")
    if not 0 <= optim.weight_decay < math.inf:
        found.append(f"weight_decay is {optim.weight_decay}: use 0 or more")
    if not 0 <= optim.clip_grad < math.inf:
        found.append(f"clip_grad is {optim.clip_grad}: use 0 (no clipping) or a number above 0")
    if not 0 < train.distributed_timeout_minutes < math.inf:
        found.append(f"distributed_timeout_minutes is {train.distributed_timeout_minutes}: use a number above 0")
    return found + _schedule_violations(optim, train.train_iters)


def _schedule_violations(optim: OptimConfig, train_iters: int) -> list[str]:
    found = []
    decay = train_iters if optim.lr_decay_iters is None else optim.lr_decay_iters
    source = "train_iters" if optim.lr_decay_iters is None else "lr_decay_iters"
    warmup, fraction = optim.lr_warmup_iters, optim.lr_warmup_fraction
    if fraction is not None and warmup:
        found.append(f"lr_warmup_iters {warmup} and lr_warmup_fraction {fraction} are both set: leave one of them out")
    if fraction is not None and not 0 <= fraction < 1:
        found.append(f"lr_warmup_fraction is {fraction}: use 0 or more and less than 1")
    decays = optim.lr_decay_style != "constant"
    if decays and warmup >= decay > 0:
        found.append(
            f"lr_warmup_iters {warmup} leaves nothing of {source} {decay} for the decay: use less than {decay}, or "
            "--lr-decay-style constant"
        )
    return found + _wsd_violations(optim, decay, source)


def _wsd_violations(optim: OptimConfig, decay: int, source: str) -> list[str]:
    last = optim.lr_wsd_decay_iters
    if optim.lr_decay_style != "WSD":
        if last is None:
            return []
        return [
            f"lr_wsd_decay_iters {last} has no effect with lr_decay_style {optim.lr_decay_style}: leave it out, or use --lr-decay-style WSD"
        ]
    if last is None:
        return [f"lr_decay_style WSD needs lr_wsd_decay_iters, the steps of its final decay: use up to {decay}"]
    warmup = optim.lr_warmup_iters
    if optim.lr_warmup_fraction is not None:
        warmup = round(optim.lr_warmup_fraction * decay)
    if last > decay - warmup:
        return [
            f"lr_wsd_decay_iters {last} and {warmup} warm-up steps are more than {source} {decay}: use at most "
            f"{max(decay - warmup, 0)} steps of final decay"
        ]
    return []


def data_violations(config: RunConfig) -> list[str]:
    """Where tokens come from, and whether their number is known."""
    data, vocab = config.data, config.model.vocab_size
    found = []
    if data.has_files and data.mock_data:
        found.append("data_path and mock_data are both set: leave one of them out")
    elif not data.has_files and not data.mock_data:
        found.append("there is no data: set --data-path PREFIX ..., or --mock-data to train on pseudo-random tokens")
    if data.mock_data and vocab is None:
        found.append("mock_data needs to know how many different tokens there are: set --vocab-size")
    if data.mock_data and data.reset_attention_mask:
        found.append("reset_attention_mask has no effect with mock_data, which has no documents: leave it out")
    if data.shuffle == "feistel" and data.separate_last_epoch is not None:
        found.append("separate_last_epoch has no meaning in the feistel order, where all epochs are separate: leave it out")
    return found + _source_violations(config) + _tokenizer_violations(config) + _split_violations(data.split)


def _source_violations(config: RunConfig) -> list[str]:
    data, found = config.data, []
    for name in ("data_path", "train_data_path", "valid_data_path", "test_data_path"):
        try:
            parse_source(getattr(data, name), name)
        except ConfigError as error:
            found += error.violations
    if data.has_own_splits and data.data_path:
        found.append("data_path and data paths of single splits are both set: leave out data_path, or the others")
    elif data.has_own_splits and not data.train_data_path:
        found.append("there is no training data: set --train-data-path beside the other splits' paths")
    if data.has_own_splits and data.split != DataConfig.split:
        found.append(f"split {data.split!r} has no effect where each split has its own data path: leave it out")
    if data.valid_data_path and config.train.eval_interval is None:
        found.append("valid_data_path is set, but there is no evaluation: set --eval-interval, or leave it out")
    return found


def _tokenizer_violations(config: RunConfig) -> list[str]:
    kind, model = config.data.tokenizer_type, config.data.tokenizer_model
    if kind is None:
        return [f"tokenizer_model {model!r} is set without tokenizer_type: say of which kind it is"] if model else []
    if kind == "bytes":
        return [f"tokenizer_type bytes has no file: leave out tokenizer_model {model!r}"] if model else []
    return [] if model else [f"tokenizer_type {kind} needs --tokenizer-model, the file or folder of the tokenizer"]


def split_shares(split: str) -> list[float] | None:
    """The numbers of "969,30,1" for training, validation and test, missing ones 0; None if it is not readable."""
    if not _SPLIT.fullmatch(split):
        return None
    numbers = [float(number) for number in re.findall(_NUMBER, split)]
    return numbers + [0.0] * (3 - len(numbers))


def _split_violations(split: str) -> list[str]:
    shares = split_shares(split)
    if shares is None:
        return [f"split {split!r} is not one to three numbers of 0 or more between commas, slashes or spaces: write for example 969,30,1"]
    if shares[0] == 0:
        return [f"split {split!r} leaves no documents for training: its first number must be above 0"]
    return []


def output_violations(config: RunConfig) -> list[str]:
    """Checkpoints and evaluation."""
    output, train = config.output, config.train
    found = []
    if output.save_interval is not None and output.save is None:
        found.append(f"save_interval {output.save_interval} is set, but there is no folder to save to: set --save DIR")
    if train.eval_interval is not None and config.data.has_own_splits and not config.data.valid_data_path:
        found.append(f"eval_interval {train.eval_interval} is set, but there is no validation data: set --valid-data-path")
    if train.eval_interval is not None and config.data.data_path and _no_validation(config.data.split):
        found.append(
            f"eval_interval {train.eval_interval} is set, but split {config.data.split!r} leaves no documents for "
            "validation: give its second number a share, or leave out eval_interval"
        )
    return found


def _no_validation(split: str) -> bool:
    """False also where the split is unreadable, which is reported by itself."""
    shares = split_shares(split)
    return shares is not None and shares[1] == 0
