"""Sections about measuring and tuning: `flops_profiler`, `autotuning`, `elasticity`; and `compile`."""

from collections.abc import Mapping
from typing import Annotated, ClassVar, Literal

from pydantic import AfterValidator, BeforeValidator, Field

from fullspeed.config.section import Section
from fullspeed.config.types import Count, NonNegative, NonNegativeNumber, Positive, as_tuple


def known_version(value: float) -> float:
    """The version, when it is one there is. Raises ValueError."""
    if value not in (0.1, 0.2):
        raise ValueError("choose 0.1 or 0.2")
    return value


class FlopsProfiler(Section):
    """Count the floating-point operations of one step."""

    enabled: bool = Field(False, description="Profile one step on rank 0.")
    recompute_fwd_factor: NonNegativeNumber = Field(0.0, description="Forwards repeated in backward, as a share.")
    profile_step: Positive = Field(1, description="The step that is profiled.")
    module_depth: Count = Field(-1, description="Depth of the module tree in the report; -1 is the deepest.")
    top_modules: Positive = Field(1, description="Modules listed per depth.")
    detailed: bool = Field(True, description="Print the whole tree.")
    output_file: str | None = Field(None, description="File for the report; unset prints it.")


class ModelInfo(Section):
    """What the tuner knows of the model without running it."""

    profile: bool = Field(False, description="Measure it in a first run.")
    num_params: Positive | None = Field(None, description="Number of parameters.")
    hidden_size: Positive | None = Field(None, description="Width of the model.")
    num_layers: Positive | None = Field(None, description="Number of layers.")


class Autotuning(Section):
    """Search for the fastest configuration."""

    enabled: bool = Field(False, description="Tune instead of training.")
    fast: bool = Field(True, description="Only stages and micro-batch sizes.")
    results_dir: str = Field("autotuning_results", description="Directory of results.")
    exps_dir: str = Field("autotuning_exps", description="Directory of experiments.")
    overwrite: bool = Field(True, description="Replace earlier results.")
    start_profile_step: NonNegative = Field(3, description="First measured step.")
    end_profile_step: NonNegative = Field(5, description="Last measured step.")
    metric: Literal["throughput", "latency", "flops"] = Field("throughput", description="What is best.")
    metric_path: str | None = Field(None, description="File an experiment writes its metric to.")
    tuner_type: Literal["gridsearch", "random", "model_based"] = Field("gridsearch", description="Search order.")
    tuner_early_stopping: Positive = Field(5, description="Experiments without improvement before the end.")
    tuner_num_trials: Positive = Field(50, description="Experiments at most.")
    arg_mappings: Mapping[str, str] | None = Field(None, description="Script flag for each configuration key.")
    model_info: ModelInfo | None = Field(None, description="What is known of the model.")
    model_info_path: str | None = Field(None, description="File that holds `model_info`.")
    mp_size: Positive = Field(1, description="Model-parallel ranks.")
    max_train_batch_size: Positive | None = Field(None, description="Samples per update at most.")
    min_train_batch_size: Positive = Field(1, description="Samples per update at least.")
    max_train_micro_batch_size_per_gpu: Positive = Field(1024, description="Samples per forward at most.")
    min_train_micro_batch_size_per_gpu: Positive = Field(1, description="Samples per forward at least.")
    num_tuning_micro_batch_sizes: Positive = Field(3, description="Micro-batch sizes tried per stage.")


class Elasticity(Section):
    """Batch sizes that many numbers of devices can divide."""

    aliases: ClassVar[Mapping[str, str]] = {"prefer_large_batch": "prefer_larger_batch"}

    enabled: bool = Field(False, description="Choose the batch size by the number of devices.")
    max_train_batch_size: Positive = Field(2000, description="Samples per update at most.")
    micro_batch_sizes: Annotated[tuple[Positive, ...], BeforeValidator(as_tuple)] = Field(
        (2, 4, 6), description="Samples per forward to choose from."
    )
    min_gpus: Positive = Field(1, description="Fewest devices.")
    max_gpus: Positive = Field(10_000, description="Most devices.")
    min_time: NonNegative = Field(0, description="Minutes a job runs before it is resized.")
    prefer_larger_batch: bool = Field(True, description="Among equals take the larger batch.")
    ignore_non_elastic_batch_info: bool = Field(False, description="Let the ordinary batch keys stand, unused.")
    version: Annotated[float, AfterValidator(known_version)] = Field(0.2, description="Rules: 0.1 or 0.2.")
    num_gpus_per_node: Positive = Field(1, description="Devices per node.")
    model_parallel_size: Positive = Field(1, description="Model-parallel ranks.")


class Compile(Section):
    """Compile the training step with communication inside the graph."""

    deepcompile: bool = Field(False, description="Rewrite the graph with gathers and reductions.")
    free_activation: bool = Field(False, description="Free activations early.")
    free_activation_threshold: NonNegative = Field(10 * 2**20, description="Bytes below which they stay.")
    offload_activation: bool = Field(False, description="Keep activations in CPU memory.")
    offload_activation_pin_memory: bool = Field(True, description="Page-lock that memory.")
    offload_opt_states: bool = Field(False, description="Keep optimizer states in CPU memory.")
    double_buffer: bool = Field(True, description="Two buffers for reduction.")
    symmetric_memory: bool = Field(False, description="Gather through symmetric memory.")
    debug_log: bool = Field(False, description="Log the passes.")
    offload_parameters: bool = Field(False, description="Keep parameters in CPU memory.")
    sync_before_reduce: bool = Field(False, description="Wait before each reduction.")
    sync_after_reduce: bool = Field(False, description="Wait after each reduction.")
    sync_before_allgather: bool = Field(False, description="Wait before each gather.")
    sync_after_allgather: bool = Field(False, description="Wait after each gather.")
    keep_int_input_tensors: bool = Field(True, description="Keep integer inputs for backward.")
    keep_all_input_tensors: bool = Field(False, description="Keep all inputs for backward.")
    passes: Annotated[tuple[Literal["z1", "z3", "autosp", "autotp"], ...] | None, BeforeValidator(as_tuple)] = Field(
        None, description="Passes to run; unset is those of the stage."
    )
    autoep_non_moe: bool = Field(False, description="Compile only what surrounds expert-parallel layers.")


class HybridEngine(Section):
    """Generate with the weights under training."""

    enabled: bool = Field(False, description="Add `generate` to the engine.")
    max_out_tokens: Positive = Field(512, description="Longest sequence, prompt included.")
    inference_tp_size: Positive = Field(1, description="Ranks that share a layer while generating.")
    release_inference_cache: bool = Field(False, description="Free the cache after each generation.")
    pin_parameters: bool = Field(True, description="Keep gathered parameters while generating.")
    tp_gather_partition_size: Positive = Field(8, description="Layers gathered at once.")
    enable_cuda_graph: bool = Field(False, description="Replay a recorded graph (CUDA).")
