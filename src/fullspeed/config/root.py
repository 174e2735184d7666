"""The whole configuration: every top-level key and section."""

from collections.abc import Iterable, Mapping
from typing import Any, ClassVar, Literal

from pydantic import Field, PrivateAttr, SerializerFunctionWrapHandler, model_serializer
from typing_extensions import Self

from fullspeed.base.errors import ConfigError, ConfigFault
from fullspeed.config.activation import ActivationCheckpointing
from fullspeed.config.batch import BATCH_KEYS, Batch, BatchRequest, solve_batch
from fullspeed.config.checkpoint import Aio, Checkpoint, DataStates, Nebula
from fullspeed.config.compression import (
    CompressionTraining,
    Eigenvalue,
    ProgressiveLayerDrop,
    QuantizeTraining,
    SparseAttention,
)
from fullspeed.config.data import CurriculumLearning, DataEfficiency
from fullspeed.config.elastic import check_scheduler_copy, elastic_batch
from fullspeed.config.monitor import (
    Comet,
    CommsLogger,
    CSVMonitor,
    Dashboard,
    JSONMonitor,
    LogLevel,
    TensorBoard,
    Timers,
    TorchProfiler,
    WandB,
)
from fullspeed.config.optimizer import Optimizer
from fullspeed.config.parallel import ExpertParallel, Pipeline, TensorParallel
from fullspeed.config.precision import BF16, FP16, Amp, DataTypes, TorchAutocast
from fullspeed.config.profiling import Autotuning, Compile, Elasticity, FlopsProfiler, HybridEngine
from fullspeed.config.scheduler import Scheduler
from fullspeed.config.section import AUTO, Notes, Section
from fullspeed.config.sharding import WeightQuantization, ZeroOptimization
from fullspeed.config.types import DType, NonNegativeNumber, Positive, PositiveNumber, Steps

THIRD_PARTY = ("msamp", "inference")
"""Top-level keys that other libraries put in the file for themselves."""


class Config(Section):
    """What the user asked for. Made by `load_config`; immutable."""

    auto_means: ClassVar[Literal["default", "unset", "kept"]] = "unset"
    aliases: ClassVar[Mapping[str, str]] = {"bfloat16": "bf16"}

    train_batch_size: Positive | None = Field(None, description="Samples per update, over all ranks.")
    train_micro_batch_size_per_gpu: Positive | None = Field(None, description="Samples per forward on one rank.")
    gradient_accumulation_steps: Positive | None = Field(None, description="Forwards per update on one rank.")
    managed_gradient_accumulation: bool = Field(
        True, description="False makes every `step()` an update, however many backwards went before."
    )

    optimizer: Optimizer | None = Field(None, description="Absent when the caller passes one.")
    scheduler: Scheduler | None = Field(None, description="Absent when the caller passes one or wants none.")

    fp16: FP16 = Field(default_factory=FP16, description="Train in fp16.")
    bf16: BF16 = Field(default_factory=BF16, description="Train in bf16.")
    amp: Amp = Field(default_factory=Amp, description="Train with NVIDIA Apex.")
    torch_autocast: TorchAutocast = Field(default_factory=TorchAutocast, description="Run forward under autocast.")
    data_types: DataTypes = Field(default_factory=DataTypes, description="Formats of gradients and buffers.")

    gradient_clipping: NonNegativeNumber = Field(0.0, description="Largest global L2 norm of gradients; 0 is off.")
    communication_data_type: DType | None = Field(None, description="Format gradients travel in; unset is theirs.")
    seq_parallel_communication_data_type: DType = Field("fp32", description="The same over sequence-parallel ranks.")
    prescale_gradients: bool = Field(False, description="Divide gradients before they are summed over ranks.")
    gradient_predivide_factor: PositiveNumber = Field(1.0, description="Part of the division done before the sum.")
    gradient_allreduce_op: Literal["mean", "sum"] = Field("mean", description="`sum` leaves out the division.")
    sparse_gradients: bool = Field(False, description="Exchange embedding gradients as indices and values.")
    disable_allgather: bool = Field(False, description="Accepted for compatibility; no effect.")
    graph_harvesting: bool = Field(False, description="Record the update as a CUDA graph.")

    zero_optimization: ZeroOptimization = Field(default_factory=ZeroOptimization, description="Sharding.")
    zero_allow_untested_optimizer: bool = Field(False, description="Accept any client optimizer with sharding.")
    zero_force_ds_cpu_optimizer: bool = Field(True, description="With offload, accept only CPU optimizers.")
    aio: Aio = Field(default_factory=Aio, description="How files are read and written.")

    activation_checkpointing: ActivationCheckpointing = Field(
        default_factory=ActivationCheckpointing, description="Recomputation in backward."
    )
    sparse_attention: SparseAttention | None = Field(None, description="Block-sparse attention patterns.")
    pipeline: Pipeline = Field(default_factory=Pipeline, description="Pipeline parallelism.")
    tensor_parallel: TensorParallel = Field(default_factory=TensorParallel, description="Split layers over ranks.")
    expert_parallel: ExpertParallel = Field(default_factory=ExpertParallel, description="Split experts over ranks.")
    use_data_before_expert_parallelism: bool = Field(False, description="Neighbouring ranks share experts, not data.")
    sequence_parallel_size: Positive | None = Field(None, description="Ranks that share each sequence.")
    data_parallel_size: Positive | None = Field(None, description="Ranks with different data.")

    checkpoint: Checkpoint = Field(default_factory=Checkpoint, description="Saving and loading.")
    nebula: Nebula = Field(default_factory=Nebula, description="Azure's checkpoint service.")
    datastates_ckpt: DataStates | None = Field(None, description="The DataStates checkpoint engine.")

    dataloader_drop_last: bool = Field(False, description="Leave out the last, smaller batch of an epoch.")
    curriculum_learning: CurriculumLearning = Field(default_factory=CurriculumLearning, description="Older curriculum.")
    data_efficiency: DataEfficiency = Field(default_factory=DataEfficiency, description="Sampling and token dropping.")
    progressive_layer_drop: ProgressiveLayerDrop = Field(
        default_factory=ProgressiveLayerDrop, description="Random dropping of layers."
    )

    tensorboard: TensorBoard = Field(default_factory=TensorBoard, description="Events for TensorBoard.")
    wandb: WandB = Field(default_factory=WandB, description="Events for Weights & Biases.")
    csv_monitor: CSVMonitor = Field(default_factory=CSVMonitor, description="Events as CSV files.")
    comet: Comet = Field(default_factory=Comet, description="Events for Comet.")
    json_monitor: JSONMonitor = Field(default_factory=JSONMonitor, description="Events as JSON lines.")
    dashboard: Dashboard = Field(default_factory=Dashboard, description="Newest values in the terminal.")
    steps_per_print: Steps = Field(None, description="Updates between progress lines; unset or infinity is never.")
    wall_clock_breakdown: bool = Field(False, description="Time forward, backward and step; waits for the device.")
    memory_breakdown: bool = Field(False, description="Log memory at points of the step.")
    dump_state: bool = Field(False, description="Print the configuration at the start.")
    log_level: LogLevel | None = Field(None, description="Least severe messages that are shown; unset leaves it.")
    vocabulary_size: Positive | None = Field(None, description="For a warning when it is no multiple of 8.")
    timers: Timers = Field(default_factory=Timers, description="Timers of the engine.")
    comms_logger: CommsLogger = Field(default_factory=CommsLogger, description="Log of collectives.")
    flops_profiler: FlopsProfiler = Field(default_factory=FlopsProfiler, description="Operations of one step.")
    torch_profiler: TorchProfiler = Field(default_factory=TorchProfiler, description="A window of torch.profiler.")

    compile: Compile = Field(default_factory=Compile, description="Compiled communication.")
    hybrid_engine: HybridEngine = Field(default_factory=HybridEngine, description="Generation while training.")
    autotuning: Autotuning = Field(default_factory=Autotuning, description="Search for a fast configuration.")
    elasticity: Elasticity = Field(default_factory=Elasticity, description="Batch sizes for many device counts.")
    eigenvalue: Eigenvalue = Field(default_factory=Eigenvalue, description="Curvature of the loss.")
    quantize_training: QuantizeTraining = Field(default_factory=QuantizeTraining, description="Older quantization.")
    compression_training: CompressionTraining = Field(
        default_factory=CompressionTraining, description="Quantize, prune and distil."
    )
    weight_quantization: WeightQuantization | None = Field(None, description="Weight-only quantization for inference.")
    disable_python_gc: bool = Field(False, description="Switch Python's cycle collector off while an engine lives.")

    _unresolved: tuple[str, ...] = PrivateAttr(default=())

    @property
    def saves_in_background(self) -> bool:
        """Whether a checkpoint is written while training goes on, unless the call says otherwise."""
        writer = self.checkpoint.writer
        return self.datastates_ckpt is not None or (writer is not None and writer.decoupled)

    def precision_dtype(self) -> Literal["fp32", "fp16", "bf16"]:
        """The format parameters are trained in."""
        if self.bf16.enabled:
            return "bf16"
        return "fp16" if self.fp16.enabled else "fp32"

    def with_unresolved(self, paths: Iterable[str]) -> Self:
        """A copy that remembers which keys wait for an integration to fill in their "auto"."""
        copy = self.model_copy()
        copy._unresolved = tuple(paths)
        return copy

    @classmethod
    def rewrite(cls, raw: Mapping[str, Any], path: str, notes: Notes) -> Mapping[str, Any]:
        """Leave out third parties' keys; read `zero_optimization: true` as stage 1."""
        block = {key: value for key, value in raw.items() if key not in THIRD_PARTY}
        zero = block.get("zero_optimization")
        if isinstance(zero, bool):
            notes.warnings.append('zero_optimization as true or false is old; use {"stage": 1} or {"stage": 0}')
            block["zero_optimization"] = {"stage": int(zero)}
            if "allgather_size" in block:
                block["zero_optimization"]["allgather_bucket_size"] = block.pop("allgather_size")
        return block

    @model_serializer(mode="wrap")
    def _dump(self, handler: SerializerFunctionWrapHandler) -> dict[str, Any]:
        dumped: dict[str, Any] = handler(self)
        for path in self._unresolved:
            *blocks, key = path.split(".")
            place = dumped
            for block in blocks:
                place = place.setdefault(block, {})
            place[key] = AUTO
        return dumped


def unresolved_auto(config: Config) -> list[str]:
    """Full paths of the keys that still say "auto" and have no meaning until an integration fills them in."""
    return list(config._unresolved)


def require_resolved(config: Config, *prefixes: str) -> None:
    """Raise ConfigError for every open "auto" under `prefixes`, or anywhere when none are given."""
    faults = [
        ConfigFault(path, AUTO, "nothing filled it in", "write a value, or let the integration that knows it do so")
        for path in unresolved_auto(config)
        if not prefixes or any(path == prefix or path.startswith(f"{prefix}.") for prefix in prefixes)
    ]
    if faults:
        raise ConfigError(faults)


def resolve_batch(config: Config, dp_world_size: int, source_of_world: str) -> Batch:
    """The batch sizes of `config` on `dp_world_size` data-parallel ranks; elasticity chooses them if enabled.

    Args:
        config: what the user asked for.
        dp_world_size: ranks with different data.
        source_of_world: where that number came from, in words, such as "WORLD_SIZE" or "the device mesh".

    Raises:
        ConfigError: the keys are "auto", missing, or do not fit together; the text names all of them.
    """
    if config.elasticity.enabled:
        check_scheduler_copy(config.elasticity)
        return elastic_batch(config.elasticity, dp_world_size)
    require_resolved(config, *BATCH_KEYS)
    request = BatchRequest(
        config.train_batch_size, config.train_micro_batch_size_per_gpu, config.gradient_accumulation_steps
    )
    return solve_batch(request, dp_world_size, source_of_world)
