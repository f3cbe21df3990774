"""The one table of other spellings: short names, and Megatron flags whose form differs from a field here.

Decisions
- Flags and TOML keys go through the same table. An alias renames a setting and may translate its value; a switch
  (`--swiglu`) is an alias whose values are True and perhaps False.
- A setting that megalite does not have is refused with what to do instead. Nothing is accepted and then ignored.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from megalite.errors import ConfigError

__all__ = ["ALIASES", "UNSUPPORTED", "Alias", "resolve_alias"]


@dataclass(frozen=True)
class Alias:
    """Another spelling of `setting`, the name of a field.

    `values` translates what is written to the field's value; empty: the same value. `implied`: the switch changes
    nothing but is only right together with the field, so it is refused where the field is not set.
    """

    setting: str
    values: Mapping[Any, Any] = field(default_factory=dict)
    implied: bool = False

    @property
    def is_switch(self) -> bool:
        return self.implied or any(isinstance(key, bool) for key in self.values)


_SENTENCEPIECE = ("SentencePieceTokenizer", "GPTSentencePieceTokenizer", "Llama2Tokenizer")

ALIASES: Mapping[str, Alias] = {
    # short names
    "tp": Alias("tensor_model_parallel_size"),
    "pp": Alias("pipeline_model_parallel_size"),
    "cp": Alias("context_parallel_size"),
    "vpp": Alias("num_virtual_stages_per_pipeline_rank"),
    "mbs": Alias("micro_batch_size"),
    "gbs": Alias("global_batch_size"),
    "sp": Alias("sequence_parallel"),
    "schedule": Alias("pipeline_schedule"),
    "dp_replicas": Alias("data_parallel_replicate_size"),
    "model": Alias("preset"),
    "bias": Alias("add_bias_linear"),
    "tie": Alias("untie_embeddings_and_output_weights", {True: False, False: True}),
    "zero": Alias("data_parallel_sharding_strategy", {0: "no_shard", 1: "optim", 2: "optim_grads", 3: "optim_grads_params"}),
    # Megatron's form
    "swiglu": Alias("activation", {True: "swiglu"}),
    "squared_relu": Alias("activation", {True: "relu_squared"}),
    "disable_bias_linear": Alias("add_bias_linear", {True: False, False: True}),
    "bf16": Alias("precision", {True: "bf16", False: "fp32"}),
    "fp16": Alias("precision", {True: "fp16", False: "fp32"}),
    "recompute_activations": Alias("recompute_granularity", {True: "selective", False: "none"}),
    "use_distributed_optimizer": Alias("data_parallel_sharding_strategy", {True: "optim", False: "no_shard"}),
    "num_distributed_optimizer_instances": Alias("data_parallel_replicate_size"),
    "use_rotary_position_embeddings": Alias("position_embedding_type", {True: "rope"}),
    "group_query_attention": Alias("num_query_groups", implied=True),
    "persistent_save_interval": Alias("save_interval"),
    "finetune": Alias("load_weights_only", {True: True, False: False}),
    "sentencepiece_model": Alias("tokenizer_model"),
    # Megatron's values of a setting that keeps its name: what is not listed stays as it is
    "tokenizer_type": Alias(
        "tokenizer_type",
        {**dict.fromkeys(_SENTENCEPIECE, "sentencepiece"), "HuggingFaceTokenizer": "hf"},
    ),
}

UNSUPPORTED: Mapping[str, str] = {
    "num_layers_per_virtual_pipeline_stage": "give the chunks per rank with --vpp",
    "vocab_file": "use --tokenizer-type hf with --tokenizer-model FOLDER",
    "merge_file": "use --tokenizer-type hf with --tokenizer-model FOLDER",
    "data_args_path": "write data_path = [...] into a TOML file: --config FILE",
    "per_split_data_args_path": "write train_data_path = [...] and valid_data_path = [...] into a TOML file: --config FILE",
    "mid_level_dataset_surplus": "a dataset of a blend is built for the samples that the blend takes; leave it out",
    "no_create_attention_mask_in_dataloader": "attention masks are never made there; leave it out",
    "train_samples": "a run is counted in steps: --train-iters",
    "window_size": "use --sliding-window N: tokens that a token attends to, itself included",
    "use_rope_scaling": "use --rope-scaling llama3 with --rope-scaling-factor and --rope-scaling-original-length",
    "num_experts": "there are no expert layers",
    # what other codebases call it
    "max_iters": "use --train-iters",
    "max_steps": "use --train-iters",
    "learning_rate": "use --lr",
    "dtype": "use --precision",
    "block_size": "use --seq-length",
    "batch_size": "use --micro-batch-size and --global-batch-size",
    "gradient_accumulation_steps": "it follows from --micro-batch-size and --global-batch-size",
    "n_layer": "use --num-layers",
    "n_head": "use --num-attention-heads",
    "n_embd": "use --hidden-size",
    "out_dir": "use --save",
    "transformer_impl": "there is one implementation; leave it out",
    "use_mcore_models": "there is one implementation; leave it out",
    "use_flash_attn": "PyTorch picks the attention kernel; leave it out",
    "ckpt_format": "there is one format, torch.distributed.checkpoint; leave it out",
    "distributed_backend": "it follows the device, NCCL on CUDA and gloo on CPU: --device",
}


def resolve_alias(name: str, value: Any, shown: str) -> tuple[str, Any]:
    """The field and its value that an alias and the written value stand for.

    `shown` is the key as it was written. Raises ConfigError for a value outside the alias' table.
    """
    alias = ALIASES[name]
    if not alias.values:
        return alias.setting, value
    for key, meant in alias.values.items():
        if key == value and type(key) is type(value):  # True is not 1 here
            return alias.setting, meant
    if alias.setting == name:
        return alias.setting, value
    if alias.is_switch and isinstance(value, bool):
        raise ConfigError(f"{shown!r} can only be switched on: leave it out and set {alias.setting!r} instead")
    choices = ", ".join(str(key).lower() for key in alias.values)
    raise ConfigError(f"{shown} = {value!r} is not one of {choices}")
