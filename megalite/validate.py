"""Everything that can be wrong with a run, found before any process group or file exists.

Decisions
- All problems are reported at once: one sentence each, with the numbers and what to do instead.
- Sizes that must be positive are checked first; what depends on such a size is only looked at when it is sound, so that
  one mistake does not show up as five.
- A run can be checked before its vocabulary is known (it may come from the data), and again afterwards.
- What a part needs (a split of layers, a schedule) is that part's own rule: it is asked, not repeated here.

Letters: N query heads, K key/value heads, D head size, F ffn, V vocab, S sequence.
"""

from __future__ import annotations

from collections.abc import Mapping

from megalite.config import ModelConfig, RunConfig
from megalite.config_io import field_types
from megalite.errors import ConfigError
from megalite.pipeline.from_config import pipeline_violations
from megalite.validate_lora import lora_violations
from megalite.validate_memory import memory_violations
from megalite.validate_numerics import numerics_violations
from megalite.validate_optim import optim_violations
from megalite.validate_training import data_violations, fp8_violations, loss_violations, output_violations, training_violations

__all__ = ["launched_ranks", "validate", "violations"]

# whole numbers that may be 0; all others are at least 1
_MAY_BE_ZERO = {
    "lr_warmup_iters",
    "lr_warmup_samples",
    "lr_wsd_decay_iters",
    "lr_wsd_decay_samples",
    "seed",
    "pipeline_layer_split",
    "num_workers",
    "lora_allocation_start",
}


def launched_ranks(environment: Mapping[str, str]) -> int:
    """Ranks that were launched together, by torchrun's variables; 1 without them. Raises ConfigError where they contradict each other."""
    names = ("RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")
    world_size = environment.get("WORLD_SIZE", "1")
    if not world_size.isdecimal():
        raise ConfigError(f"the environment variable WORLD_SIZE is {world_size!r}: start ranks with torchrun, or unset it")
    missing = [name for name in names if name not in environment]
    if "RANK" in environment and missing:
        raise ConfigError(f"RANK is set in the environment, but not {', '.join(missing)}: start ranks with torchrun, or unset RANK")
    if "RANK" not in environment and int(world_size) > 1:
        raise ConfigError(f"WORLD_SIZE is {world_size} in the environment, but RANK is not set: start ranks with torchrun, or unset it")
    return int(world_size)


def validate(config: RunConfig, world_size: int) -> None:
    """Raises ConfigError with every violation."""
    found = violations(config, world_size)
    if found:
        raise ConfigError(found)


def violations(config: RunConfig, world_size: int) -> list[str]:
    """One sentence for everything that is wrong with this run on `world_size` ranks; empty when it can start."""
    found = _positive_violations(config, world_size)
    are_sound = not found
    if are_sound:
        found += _model_violations(config.model)
        found += _tensor_violations(config)
        found += _layout_violations(config, world_size)
        found += _pipeline_violations(config, world_size)
        found += _sequence_violations(config)
        found += memory_violations(config, world_size)
        found += fp8_violations(config)
    return (
        found
        + training_violations(config)
        + optim_violations(config, world_size if are_sound else None)
        + numerics_violations(config.numerics)
        + loss_violations(config)
        + data_violations(config)
        + lora_violations(config)
        + output_violations(config)
    )


def _positive_violations(config: RunConfig, world_size: int) -> list[str]:
    found = [f"world size is {world_size}: launch at least 1 rank"] if world_size < 1 else []
    for name, (section, kind) in field_types(config).items():
        value = getattr(getattr(config, section), name) if section else getattr(config, name)
        if kind not in (int, int | None) or value is None:
            continue
        least = 0 if name in _MAY_BE_ZERO else 1
        if value < least:
            found.append(f"{name} is {value}: use {least} or more")
    return found


def _model_violations(model: ModelConfig) -> list[str]:
    found = []
    hidden, heads, groups = model.hidden_size, model.num_attention_heads, model.num_kv_heads
    if model.kv_channels is None and hidden % heads:
        found.append(
            f"hidden_size {hidden} is not divisible by num_attention_heads {heads}: use {_divisors_text(hidden)} heads, or set kv_channels"
        )
    if heads % groups:
        found.append(f"num_attention_heads {heads} is not divisible by num_query_groups {groups}: use {_divisors_text(heads)} groups")
    if model.position_embedding_type == "rope":
        found += _rotary_violations(model)
    for name in ("hidden_dropout", "attention_dropout"):
        if not 0 <= getattr(model, name) < 1:
            found.append(f"{name} is {getattr(model, name)}: use 0 or more and less than 1")
    for name in ("norm_epsilon", "init_method_std"):
        if not 0 < getattr(model, name) < float("inf"):
            found.append(f"{name} is {getattr(model, name)}: use a number above 0")
    return found


def _rotary_violations(model: ModelConfig) -> list[str]:
    found = []
    if model.rope_scaling != "none" and model.rope_scaling_factor < 1:
        found.append(f"rope_scaling_factor is {model.rope_scaling_factor:g}: use 1 or more, how many times longer sequences become")
    if model.rope_scaling not in ("none", "linear") and not (model.rope_scaling_original_length or model.max_position_embeddings):
        found.append(f"rope_scaling {model.rope_scaling} needs the length that was trained on first: set --rope-scaling-original-length")
    if not 0 < model.rotary_percent <= 1:
        found.append(f"rotary_percent is {model.rotary_percent}: use a share above 0 and up to 1")
    elif model.rotary_dim < 2 or model.rotary_dim % 2:
        found.append(
            f"rotary positions turn pairs of channels, but rotary_percent {model.rotary_percent} of head size "
            f"{model.head_dim} is {model.rotary_dim} channels: choose hidden_size, num_attention_heads, kv_channels or "
            "rotary_percent so that this is an even number above 0"
        )
    if not 1 < model.rotary_base < float("inf"):
        found.append(f"rotary_base is {model.rotary_base}: use a number above 1")
    return found


def _tensor_violations(config: RunConfig) -> list[str]:
    model, tp = config.model, config.parallel.tensor_model_parallel_size
    found = []
    heads, groups, ffn = model.num_attention_heads, model.num_kv_heads, model.ffn_size
    if heads % tp:
        found.append(_not_divisible("num_attention_heads", heads, tp))
    if model.num_query_groups is not None and groups % tp and tp % groups:
        sizes = sorted(size for size in range(1, heads + 1) if groups % size == 0 or size % groups == 0)
        usable = [size for size in sizes if heads % size == 0]
        found.append(
            f"num_query_groups {groups} and tensor_model_parallel_size {tp}: one must divide the other (key/value "
            f"heads are cut or repeated); use a size of {_either(usable)}"
        )
    if ffn % tp:
        unit = tp * 64 if ffn >= tp * 64 else tp
        found.append(f"{_not_divisible('ffn_hidden_size', ffn, tp)}, or an ffn_hidden_size of {-(-ffn // unit) * unit}")
    if model.vocab_size is not None and model.padded_vocab_size % tp:
        found.append(
            f"the padded vocabulary {model.padded_vocab_size} is not divisible by tensor_model_parallel_size {tp}: set "
            f"make_vocab_size_divisible_by to a multiple of {tp}, such as {model.make_vocab_size_divisible_by * tp}"
        )
    return found


def _layout_violations(config: RunConfig, world_size: int) -> list[str]:
    parallel = config.parallel
    found = []
    if parallel.context_parallel_size != 1:
        found.append(f"context_parallel_size is {parallel.context_parallel_size}: context parallelism does not exist yet, use 1")
    try:
        dp = config.dp_size(world_size)
    except ConfigError as error:
        return found + error.violations
    replicate = parallel.data_parallel_replicate_size
    if config.zero == 0 and replicate not in (1, dp):
        found.append(
            f"data_parallel_replicate_size {replicate} has no meaning without sharding (all {dp} data-parallel ranks "
            "are copies): leave it out, or choose --zero 1, 2 or 3"
        )
    for check in (config.grid_sizes, config.num_microbatches):
        try:
            check(world_size)
        except ConfigError as error:
            found += error.violations
    return found + config.batch_sizes(world_size).violations(config.train.micro_batch_size * dp)


def _pipeline_violations(config: RunConfig, world_size: int) -> list[str]:
    try:
        numbers = sorted(config.all_num_microbatches(world_size))
    except ConfigError:
        return pipeline_violations(config, None)  # the reason is already reported by the layout
    found = [pipeline_violations(config, number) for number in numbers]
    return list(dict.fromkeys(violation for violations in found for violation in violations))


def _sequence_violations(config: RunConfig) -> list[str]:
    found = []
    length, tp = config.data.seq_length, config.parallel.tensor_model_parallel_size
    if config.parallel.use_sequence_parallel and length % tp:
        found.append(f"{_not_divisible('seq_length', length, tp)}, or --no-sequence-parallel")
    longest = config.model.max_position_embeddings
    if config.model.position_embedding_type == "learned_absolute" and longest is not None and length > longest:
        found.append(
            f"seq_length {length} is above max_position_embeddings {longest}, and learned positions end there: use a "
            f"seq_length of {longest} or less, or max_position_embeddings {length}"
        )
    return found


def _not_divisible(name: str, value: int, tp: int) -> str:
    return f"{name} {value} is not divisible by tensor_model_parallel_size {tp}; use a size of {_divisors_text(value, tp)}"


def _divisors_text(value: int, near: int = 0) -> str:
    """The divisors of `value` as "1, 2 or 4"; where there are many, the small ones and those around `near`."""
    divisors = [size for size in range(1, min(value, 1 << 16) + 1) if value % size == 0]
    if len(divisors) > 8:
        divisors = [size for size in divisors if size <= max(near, 16)][:8]
    return _either(divisors)


def _either(numbers: list[int]) -> str:
    *first, last = [str(number) for number in numbers]
    return f"{', '.join(first)} or {last}" if first else last
