"""What can be wrong with the loss, the data and the output of a run; see `validate`.

Nothing here looks at a file: whether a path exists is found where it is opened.
"""

from __future__ import annotations

import math
import re

from megalite.config import DataConfig, RunConfig
from megalite.config_data import parse_source
from megalite.errors import ConfigError
from megalite.validate_chat import chat_violations

__all__ = ["data_violations", "fp8_violations", "loss_violations", "output_violations", "split_shares", "training_violations"]

# what `data.splits` reads; it cannot be asked here because it needs numpy, and a test holds the two together
_NUMBER = r"(?:\d+(?:\.\d*)?|\.\d+)"
_SEPARATOR = r"(?:\s*[,/]\s*|\s+)"
_SPLIT = re.compile(rf"\s*{_NUMBER}(?:{_SEPARATOR}{_NUMBER}){{0,2}}\s*", re.ASCII)


def training_violations(config: RunConfig) -> list[str]:
    """Limits of the run itself."""
    minutes = config.train.distributed_timeout_minutes
    return [] if 0 < minutes < math.inf else [f"distributed_timeout_minutes is {minutes}: use a number above 0"]


def loss_violations(config: RunConfig) -> list[str]:
    """The terms of the loss."""
    numerics, found = config.numerics, []
    if not 0 <= numerics.label_smoothing < 1:
        found.append(f"label_smoothing is {numerics.label_smoothing}: use 0 or more and less than 1")
    if not 0 <= numerics.z_loss < math.inf:
        found.append(f"z_loss is {numerics.z_loss}: use 0 (none) or a number above 0, such as 1e-4")
    return found


def fp8_violations(config: RunConfig) -> list[str]:
    """What fp8 does not go with; whether a rank's device has it is found when the rank is there."""
    recipe, model, tp = config.numerics.fp8, config.model, config.parallel.tensor_model_parallel_size
    if recipe is None:
        return []
    found = []
    if config.numerics.precision != "bf16":
        found.append(
            f"fp8 {recipe} multiplies for a computation in bf16, and precision is {config.numerics.precision}: add --precision bf16"
        )
    if config.train.device == "cpu":
        found.append(f"fp8 {recipe} needs a GPU, and device is cpu: leave one of them out")
    sizes = {
        "hidden_size": model.hidden_size,
        "the query width of a rank": model.num_attention_heads * model.head_dim // tp,
        "the key/value width of a rank": model.num_kv_heads * model.head_dim // min(tp, model.num_kv_heads),
        "ffn_hidden_size of a rank": model.ffn_size // tp,
        "seq_length x micro_batch_size": config.data.seq_length * config.train.micro_batch_size,
    }
    odd = [f"{name} {size}" for name, size in sizes.items() if size % 16]
    if odd:
        found.append(f"fp8 matrix products need sizes that are multiples of 16: change {', '.join(odd)}, or leave out --fp8")
    return found


def data_violations(config: RunConfig) -> list[str]:
    """Where tokens come from, and whether their number is known."""
    data, vocab = config.data, config.model.vocab_size
    found = []
    if data.has_files and data.mock_data:
        found.append("data_path and mock_data are both set: leave one of them out")
    elif not data.has_files and not data.mock_data and data.sft_data_path is None and data.dpo_data_path is None:
        found.append("there is no data: set --data-path PREFIX ..., --sft-data-path FILE, or --mock-data to train on pseudo-random tokens")
    if data.mock_data and vocab is None:
        found.append("mock_data needs to know how many different tokens there are: set --vocab-size")
    if data.mock_data and data.reset_attention_mask:
        found.append("reset_attention_mask has no effect with mock_data, which has no documents: leave it out")
    if data.shuffle == "feistel" and data.separate_last_epoch is not None:
        found.append("separate_last_epoch has no meaning in the feistel order, where all epochs are separate: leave it out")
    found += chat_violations(config)
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
    for name in ("async_save", "keep_last", "keep_every"):
        if getattr(output, name) and output.save is None:
            found.append(f"{name} is set, but there is no folder to save to: set --save DIR")
    if output.keep_every is not None and output.keep_last is None:
        found.append(f"keep_every {output.keep_every} is set, but all checkpoints are kept: set --keep-last too, or leave it out")
    if output.load is None and output.load_weights_only:
        found.append("load_weights_only is set, but nothing is loaded: set --load DIR")
    if output.exit_duration_in_mins is not None and output.exit_duration_in_mins <= 0:
        found.append(f"exit_duration_in_mins is {output.exit_duration_in_mins:g}: it must be above 0")
    if output.watchdog_seconds is not None and not 0 < output.watchdog_seconds < math.inf:
        found.append(f"watchdog_seconds is {output.watchdog_seconds:g}: use a number above 0, such as 300, or leave it out for no watchdog")
    if output.straggler_factor is not None and not 1 < output.straggler_factor < math.inf:
        found.append(f"straggler_factor is {output.straggler_factor:g}: use a number above 1, such as 1.5, or leave it out")
    late = [step for step in output.probe_steps if not 1 <= step <= train.train_iters]
    if output.probe_dir is not None and (late or not output.probe_steps):
        found.append(f"probe_steps {late or '()'}: choose among the steps 1 to {train.train_iters} that the run makes")
    if output.probe_dir is None and output.probe_steps != (1,):
        found.append("probe_steps is set, but there is no folder to write to: set --probe-dir DIR")
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
