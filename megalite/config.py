"""What a run is: frozen, keyword-only dataclasses with one sentence under each field, which is also its `--help`.

Decisions
- Defaults of a field never depend on the layout. `None` means "derived", and the derivation is one property or method
  (`ModelConfig.num_kv_heads`, `ParallelConfig.schedule`, `RunConfig.num_microbatches`), so nobody derives it twice.
- Field names are unique over all sections: a flag or a flat TOML key needs no section.
- Nothing is checked on construction; `validate` sees the whole run at once and lists every problem.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass, field, replace
from typing import Any, Literal

from megalite.batch_sizes import BatchSizes
from megalite.config_data import DataConfig, SplitName
from megalite.config_io import read_sections, read_toml, write_toml
from megalite.config_lora import LoraConfig
from megalite.config_model import ModelConfig
from megalite.config_numerics import MemoryConfig, NumericsConfig
from megalite.config_optim import OptimConfig
from megalite.config_output import OutputConfig
from megalite.errors import ConfigError

__all__ = [
    "DataConfig",
    "LoraConfig",
    "MemoryConfig",
    "ModelConfig",
    "NumericsConfig",
    "OptimConfig",
    "OutputConfig",
    "ParallelConfig",
    "RunConfig",
    "TrainConfig",
]

SHARDING_STRATEGIES = ("no_shard", "optim", "optim_grads", "optim_grads_params")


@dataclass(frozen=True, kw_only=True)
class ParallelConfig:
    """The layout: how the same model and batch are spread over ranks. The data-parallel size is what is left over."""

    tensor_model_parallel_size: int = 1
    """Ranks that share every matmul."""
    pipeline_model_parallel_size: int = 1
    """Ranks that the layers are dealt to."""
    context_parallel_size: int = 1
    """Ranks that share one sequence in attention; only 1 is possible so far."""
    data_parallel_replicate_size: int = 1
    """Copies of a sharded model (hybrid sharding); without sharding every data-parallel rank is a copy anyway."""
    data_parallel_sharding_strategy: Literal["no_shard", "optim", "optim_grads", "optim_grads_params"] = "no_shard"
    """What data-parallel ranks cut instead of copying: nothing, optimizer state, also gradients, also parameters."""
    sequence_parallel: bool | None = None
    """Cut activations along the sequence between matmuls; not set: on if tensor parallel. No effect without it."""
    pipeline_schedule: str | None = None
    """Pipeline schedule, by name or file (x.csv, x.json, x.py:function); not set: 1f1b, interleaved-1f1b with several chunks per rank."""
    microbatch_group_size_per_virtual_pipeline_stage: int | None = None
    """Micro-batches that interleaved-1f1b runs through one chunk at a time; not set: the smallest number that fits."""
    pipeline_schedule_costs: tuple[float, ...] | None = None
    """Times of forward, input gradient, weight gradient and message that zb-1p and zb-2p plan for; not set: 1 1 1 0."""
    num_virtual_stages_per_pipeline_rank: int = 1
    """Model chunks per pipeline rank."""
    pipeline_layer_split: tuple[int, ...] | None = None
    """Layers of each (virtual) stage in model order; not set: as even as possible."""
    pipeline_model_parallel_layout: str | None = None
    """The same in Megatron's notation, such as "Ett|(tt|)*6tL": E embedding, t layer, L head, | next stage."""
    balance_pipeline_stages: bool = False
    """Split the layers by cost, with the head counted, so that the busiest pipeline rank is as light as possible."""

    @property
    def schedule(self) -> str:
        if self.pipeline_schedule is not None:
            return self.pipeline_schedule
        return "interleaved-1f1b" if self.num_virtual_stages_per_pipeline_rank > 1 else "1f1b"

    @property
    def use_sequence_parallel(self) -> bool:
        """What `sequence_parallel` comes to: only ever True when the tensor-parallel size is above 1."""
        return self.tensor_model_parallel_size > 1 and self.sequence_parallel is not False

    @property
    def num_stages(self) -> int:
        """Virtual stages: pipeline ranks x chunks."""
        return self.pipeline_model_parallel_size * self.num_virtual_stages_per_pipeline_rank

    @property
    def zero(self) -> int:
        """ZeRO stage 0..3 of the sharding strategy."""
        return SHARDING_STRATEGIES.index(self.data_parallel_sharding_strategy)


@dataclass(frozen=True, kw_only=True)
class TrainConfig:
    """Batches and steps."""

    micro_batch_size: int = 1
    """Samples in one forward pass of one rank."""
    global_batch_size: int | None = None
    """Samples in one step over all ranks; not set: micro-batch x data-parallel size."""
    rampup_batch_size: tuple[int, ...] | None = None
    """START INCREMENT SAMPLES: the global batch size grows from START in equal steps to its full size over the first SAMPLES samples;
    the learning rate then follows the samples, its --...-iters counted in steps of the full size."""
    train_iters: int = 100
    """Optimizer steps."""
    eval_interval: int | None = None
    """Steps between evaluations; not set: no evaluation."""
    eval_iters: int = 10
    """Global batches per evaluation."""
    seed: int = 1234
    """Decides initial weights, data order and dropout."""
    log_interval: int = 10
    """Steps between log lines."""
    device: Literal["auto", "cpu", "cuda"] = "auto"
    """Where to compute; auto: CUDA where there is one."""
    distributed_timeout_minutes: float = 10.0
    """A collective that takes longer ends the run."""


@dataclass(frozen=True, kw_only=True)
class RunConfig:
    """Everything that defines a run."""

    preset: str | None = None
    """Named model whose values are the defaults of this run."""
    model: ModelConfig = field(default_factory=ModelConfig)
    parallel: ParallelConfig = field(default_factory=ParallelConfig)
    data: DataConfig = field(default_factory=DataConfig)
    optim: OptimConfig = field(default_factory=OptimConfig)
    train: TrainConfig = field(default_factory=TrainConfig)
    numerics: NumericsConfig = field(default_factory=NumericsConfig)
    memory: MemoryConfig = field(default_factory=MemoryConfig)
    lora: LoraConfig = field(default_factory=LoraConfig)
    output: OutputConfig = field(default_factory=OutputConfig)

    @property
    def zero(self) -> int:
        return self.parallel.zero

    def dp_size(self, world_size: int) -> int:
        """Data-parallel size. Raises ConfigError where tp x pp x cp does not divide the world."""
        parallel = self.parallel
        tp, pp = parallel.tensor_model_parallel_size, parallel.pipeline_model_parallel_size
        cp = parallel.context_parallel_size
        if world_size < 1 or world_size % (tp * pp * cp):
            raise ConfigError(
                f"world size {world_size} is not a multiple of tp {tp} x pp {pp} x cp {cp} = {tp * pp * cp}: "
                f"launch a multiple of {tp * pp * cp} ranks or make these sizes smaller"
            )
        return world_size // (tp * pp * cp)

    def global_batch(self, world_size: int) -> int:
        """Samples per step over all ranks, after a ramp-up."""
        if self.train.global_batch_size is not None:
            return self.train.global_batch_size
        return self.train.micro_batch_size * self.dp_size(world_size)

    def batch_sizes(self, world_size: int) -> BatchSizes:
        """Samples of every step; `global_batch` is the full size that a ramp ends at."""
        return BatchSizes(self.global_batch(world_size), self.train.rampup_batch_size)

    def num_microbatches(self, world_size: int) -> int:
        """Micro-batches per full step of each data-parallel rank. Raises ConfigError where the batch is not divisible."""
        dp, micro, total = self.dp_size(world_size), self.train.micro_batch_size, self.global_batch(world_size)
        if total < 1 or total % (micro * dp):
            lower = max(1, total // (micro * dp)) * micro * dp
            raise ConfigError(
                f"global_batch_size {total} is not a multiple of micro_batch_size {micro} x data-parallel size {dp} = "
                f"{micro * dp}: use {lower} or {lower + micro * dp}, or another micro-batch size"
            )
        return total // (micro * dp)

    def all_num_microbatches(self, world_size: int) -> list[int]:
        """Micro-batches of each pipeline pass of a data-parallel rank, for every size of a ramp-up; with the gradient noise scale a pass is
        half a step. Raises ConfigError like `num_microbatches`."""
        self.num_microbatches(world_size)
        sizes, divisor = self.batch_sizes(world_size), self.train.micro_batch_size * self.dp_size(world_size)
        violations = sizes.violations(divisor)
        if violations:
            raise ConfigError(violations)
        numbers = [size // divisor for size in sizes.possible]
        halves = [number // 2 for number in numbers if number > 1] if self.numerics.log_gradient_noise_scale else []
        return sorted({*numbers, *halves})

    def num_samples(self, global_batch_size: int) -> dict[SplitName, int]:
        """Samples that the run reads of each split that it reads; every evaluation reads the same ones."""
        train = self.train
        sizes = BatchSizes(global_batch_size, train.rampup_batch_size)
        samples: dict[SplitName, int] = {"train": sizes.consumed_before(train.train_iters)}
        if train.eval_interval is not None:
            samples["valid"] = train.eval_iters * global_batch_size
        if self.data.test_data_path:
            samples["test"] = train.eval_iters * global_batch_size
        return samples

    def grid_sizes(self, world_size: int) -> dict[str, int]:
        """Sizes of the grid's axes. Raises ConfigError where the world or dp is not divisible."""
        dp, replicate = self.dp_size(world_size), self.parallel.data_parallel_replicate_size
        if self.zero == 0:
            replicate = dp
        if replicate < 1 or dp % replicate:
            raise ConfigError(
                f"data_parallel_replicate_size {replicate} does not divide the data-parallel size {dp}: use one of "
                f"{', '.join(str(size) for size in range(1, dp + 1) if dp % size == 0)}"
            )
        return {
            "pp": self.parallel.pipeline_model_parallel_size,
            "dp_replicate": replicate,
            "dp_shard": dp // replicate,
            "cp": self.parallel.context_parallel_size,
            "tp": self.parallel.tensor_model_parallel_size,
        }

    def resolve(self, vocab_size: int | None = None) -> RunConfig:
        """The run with the model's open sizes filled in: positions from the sequence length, V from the tokenizer.

        A `vocab_size` that is set wins if it is larger (rows for later tokens). Raises ConfigError if it is smaller.
        """
        known = self.model.vocab_size
        if known is not None and vocab_size is not None and vocab_size > known:
            raise ConfigError(f"vocab_size {known} is too small for the tokenizer's {vocab_size} ids: use {vocab_size}")
        longest = self.model.max_position_embeddings
        model = replace(
            self.model,
            vocab_size=vocab_size if known is None else known,
            max_position_embeddings=self.data.seq_length if longest is None else longest,
        )
        return replace(self, model=model)

    def to_dict(self) -> dict[str, Any]:
        """Plain nested values (JSON-compatible), every field present; `from_dict` gives an equal run."""
        return asdict(self)

    @classmethod
    def from_dict(cls, data: Mapping[str, Any]) -> RunConfig:
        """Strict: unknown keys (with a suggestion), wrong types and keys given twice are one ConfigError.

        Sections and flat keys both work, see `config_io.read_sections`. `preset` is only a name here: the command line
        applies it, and a dictionary from `to_dict` is complete without it.
        """
        return read_sections(cls(), data)

    def to_toml(self) -> str:
        """TOML text that `from_toml` and `--config` read back to an equal run."""
        return write_toml(self)

    @classmethod
    def from_toml(cls, text: str) -> RunConfig:
        """As `from_dict`; also raises ConfigError for text that is not TOML."""
        return read_sections(cls(), read_toml(text))
