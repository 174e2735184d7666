"""The `zero_optimization` section: what is sharded over ranks, how it travels, where it waits."""

import sys
from collections.abc import Mapping
from typing import Annotated, Any, ClassVar, Literal

from pydantic import BeforeValidator, Field, field_validator

from fullspeed.base.errors import ConfigFault
from fullspeed.config.section import Notes, Section
from fullspeed.config.types import (
    Count,
    Fraction,
    NonNegative,
    Positive,
    RoundedDown,
    Texts,
    whole,
)

Device = Literal["none", "cpu", "nvme"]
Bits = Annotated[Literal[4, 8], BeforeValidator(whole)]


class OffloadParam(Section):
    """Where parameter shards wait between uses (stage 3)."""

    device: Device = Field("none", description="Where parameter shards wait; `none` keeps them on the accelerator.")
    nvme_path: str | None = Field(None, description="Directory for parameter files; needed when `device` is `nvme`.")
    buffer_count: Positive = Field(5, description="Number of staging buffers; more lets more reads overlap.")
    buffer_size: Positive = Field(100_000_000, description="Elements per staging buffer; bounds the largest parameter.")
    max_in_cpu: NonNegative = Field(1_000_000_000, description="Elements kept in CPU memory when `device` is `nvme`.")
    pin_memory: bool = Field(True, description="Page-lock CPU buffers: faster copies, memory the system cannot move.")


class OffloadOptimizer(Section):
    """Where optimizer states and master weights wait, and where they are updated."""

    device: Device = Field("none", description="Where optimizer states wait; `none` keeps them on the accelerator.")
    nvme_path: str | None = Field(None, description="Directory for state files; needed when `device` is `nvme`.")
    buffer_count: Positive = Field(4, description="Number of staging buffers between disk and memory.")
    pin_memory: bool = Field(True, description="Page-lock CPU buffers: faster copies, memory the system cannot move.")
    pipeline_read: bool = Field(False, description="Read the next sub-group's states while this one is updated.")
    pipeline_write: bool = Field(False, description="Write a sub-group's states while the next one is updated.")
    fast_init: bool = Field(False, description="Create states on disk without reading gradients first.")
    ratio: Fraction = Field(
        1.0, description="Share of parameters updated on the CPU (stage 3); the rest stays on device."
    )
    super_offload: bool = Field(
        False, description="Step in copies during backward, and again where clipping or overflow made that wrong."
    )
    cpuadam_cores_perc: Fraction = Field(0.8, description="Share of a rank's threads that `super_offload` steps with.")


class ZenFlow(Section):
    """Update the most important columns every step and the rest later, on the CPU."""

    topk_ratio: Fraction = Field(0.1, description="Share of columns updated in every step; 1 defers nothing.")
    select_strategy: Literal["auto", "step", "epoch"] = Field("auto", description="Unit of `select_interval`.")
    select_interval: Literal["auto"] | Positive = Field(
        "auto", description="Steps or epochs between column choices; auto is an epoch."
    )
    update_interval: Literal["auto"] | Positive = Field(
        "auto", description="Steps between updates of other columns; auto: when what waits matters as much."
    )
    overlap_step: bool = Field(False, description="Update the other columns beside the next forward and backward.")
    offload: bool = Field(False, description="Keep chosen columns' states in CPU memory too; on the CPU they are.")
    auto_ratio: Fraction = Field(
        0.99,
        description="`update_interval` auto: mean square of waiting sums over that of chosen gradients at an update.",
    )
    full_warm_up_rounds: NonNegative = Field(0, description="First steps that update every column.")
    pt_reserved_cores_perc: Fraction = Field(0.5, description="Share of a rank's threads that the update leaves.")
    steps_per_epoch: Positive | None = Field(None, description="Steps per epoch; known from training_data.")


SPARSE_BLOCKS = (
    "transformers.models.mixtral.modeling_mixtral.MixtralSparseMoeBlock",
    "transformers.models.qwen2_moe.modeling_qwen2_moe.Qwen2MoeSparseMoeBlock",
    "transformers.models.qwen3_moe.modeling_qwen3_moe.Qwen3MoeSparseMoeBlock",
)


class LeafModule(Section):
    """Modules whose whole sub-tree is gathered together, such as blocks of experts (stage 3)."""

    classes: Texts = Field(SPARSE_BLOCKS, description="Class names or dotted class paths of such modules.")
    names: Texts = Field((), description="Full module names.")
    name_suffixes: Texts = Field((), description="Ends of module names.")


class QuantizedLayer(Section):
    """How the weights of one kind of layer are quantized."""

    num_bits: Bits = Field(8, description="Bits per weight.")
    group_size: Positive = Field(512, description="Weights per scale; smaller is more exact and larger in memory.")
    group_dim: Count = Field(1, description="Dimension along which groups are cut.")
    symmetric: bool = Field(False, description="One scale per group instead of a scale and a minimum.")


class WeightQuantization(Section):
    """Weight-only quantization for inference with parameters off the accelerator."""

    post_init_quant: Mapping[str, QuantizedLayer] | None = Field(None, description="Per module key, after loading.")
    quantized_initialization: QuantizedLayer | None = Field(None, description="For every layer, while building.")


class LoCo(Section):
    """Error feedback for quantized gradient reduction."""

    err_beta: Fraction = Field(0.8, description="Weight of the old error in its moving average.")
    reset_T: Positive = Field(1024, description="Reductions between resets of the error.")  # noqa: N815 (the key is spelled so)


class ZeroOptimization(Section):
    """ZeRO: shard optimizer states, gradients and parameters over the data-parallel ranks."""

    aliases: ClassVar[Mapping[str, str]] = {
        "prefetch_bucket_size": "stage3_prefetch_bucket_size",
        "param_persistence_threshold": "stage3_param_persistence_threshold",
        "model_persistence_threshold": "stage3_model_persistence_threshold",
        "max_live_parameters": "stage3_max_live_parameters",
        "max_reuse_distance": "stage3_max_reuse_distance",
        "gather_16bit_weights_on_model_save": "stage3_gather_16bit_weights_on_model_save",
        "module_granularity_threshold": "stage3_module_granularity_threshold",
        "use_all_reduce_for_fetch_params": "stage3_use_all_reduce_for_fetch_params",
        "allgather_sequential": "stage3_allgather_sequential",
        "stage3_sub_group_size": "sub_group_size",
        "stage3_leaf_module": "leaf_module",
        "shard_group_size": "mics_shard_size",
    }
    deprecated: ClassVar[Mapping[str, str]] = {
        "stage3_gather_fp16_weights_on_model_save": "stage3_gather_16bit_weights_on_model_save",
        "gather_fp16_weights_on_model_save": "stage3_gather_16bit_weights_on_model_save",
    }

    stage: Annotated[Literal[0, 1, 2, 3], BeforeValidator(whole)] = Field(
        0, description="What is sharded: 0 nothing, 1 optimizer states, 2 and gradients, 3 and parameters."
    )
    contiguous_gradients: bool = Field(True, description="Keep gradients in flat buckets; FullSpeed always does.")
    reduce_scatter: bool = Field(True, description="Send each gradient only to its owner; false reduces to all ranks.")
    reduce_bucket_size: Positive = Field(
        500_000_000, description="Elements per reduce bucket; larger hides latency, costs memory."
    )
    use_multi_rank_bucket_allreduce: bool = Field(
        True, description="Reduce a bucket that spans several owners at once, when `reduce_scatter` is false."
    )
    allgather_partitions: bool = Field(True, description="Gather parameters by all-gather; false by broadcasts.")
    allgather_bucket_size: Positive = Field(
        500_000_000,
        description="Elements gathered at once after a step; an even number; larger costs memory.",
    )
    overlap_comm: bool | None = Field(
        None, description="Reduce gradients while backward goes on; unset means on, at every stage."
    )
    load_from_fp32_weights: bool = Field(
        True,
        description="On load, take master weights from saved fp32 rather than from half-precision weights.",
    )
    elastic_checkpoint: bool = Field(
        False, description="Old merged optimizer-state format; checkpoints reshard anyway."
    )
    ignore_unused_parameters: bool = Field(True, description="False makes a parameter without gradient an error.")
    legacy_stage1: bool = Field(False, description="An old form of stage 1; true is refused.")
    round_robin_gradients: bool = Field(False, description="Deal parameters to ranks in turn instead of in runs.")
    compute_grad_norm: bool = Field(True, description="False skips the global gradient norm (stages 1 and 2).")
    parameter_alignment: bool = Field(False, description="Begin each parameter on a 16-byte boundary of its buffer.")
    memory_efficient_linear: bool = Field(True, description="Stage 3: linear layers keep no gathered weight.")
    override_module_apply: bool = Field(True, description="Stage 3: `Module.apply` sees whole parameters.")
    pipeline_loading_checkpoint: bool = Field(False, description="Stage 3: ranks load one after the other.")
    log_trace_cache_warnings: bool = Field(False, description="Warn when the recorded order of modules changes.")
    enable_sanity_checks: bool = Field(False, description="Extra checks for NaN and for ranks that disagree; slower.")
    save_muon_momentum_buffer_in_memory: bool = Field(False, description="Muon with offload: keep momentum in memory.")

    sub_group_size: Positive = Field(
        1_000_000_000, description="Elements the optimizer updates at once; bounds memory during the step."
    )
    stage3_prefetch_bucket_size: RoundedDown = Field(
        50_000_000,
        description="Elements gathered ahead of use; more hides latency, costs memory; 0 gathers on demand.",
    )
    stage3_param_persistence_threshold: NonNegative = Field(
        100_000, description="Parameters of fewer elements than this stay whole on every rank."
    )
    stage3_model_persistence_threshold: NonNegative = Field(
        sys.maxsize, description="Upper bound on the elements that stay whole."
    )
    stage3_max_live_parameters: NonNegative = Field(
        1_000_000_000, description="Gathered elements above which nothing more is prefetched."
    )
    stage3_max_reuse_distance: NonNegative = Field(
        1_000_000_000, description="Keep a gathered parameter that is used again within this many elements."
    )
    stage3_gather_16bit_weights_on_model_save: bool = Field(
        False, description="Allow saving whole weights in the model's dtype; gathers them on rank 0."
    )
    stage3_module_granularity_threshold: NonNegative = Field(
        0, description="Modules with fewer parameters per descendant are gathered as one unit; 0 is off."
    )
    stage3_use_all_reduce_for_fetch_params: bool = Field(False, description="Gather by all-reduce of padded buffers.")
    stage3_allgather_sequential: bool = Field(False, description="Gather one unit at a time; saves memory, slower.")
    leaf_module: LeafModule = Field(default_factory=LeafModule, description="Modules gathered as one unit.")

    offload_param: OffloadParam | None = Field(None, description="Where parameter shards wait; `none` equals absent.")
    offload_optimizer: OffloadOptimizer | None = Field(
        None, description="Where optimizer states wait; `none` equals absent."
    )

    zero_quantized_weights: bool = Field(
        False, description="Stage 3: gather parameters to compute with as int8 blocks, half the bytes of 16 bits."
    )
    zero_quantized_weights_bits: Bits = Field(8, description="Bits per value of `zero_quantized_weights`.")
    zero_quantized_nontrainable_weights: bool = Field(
        False,
        description="Stage 3: keep sharded frozen parameters in `zero_quantized_weights_bits`, and send them so.",
    )
    zero_hpz_partition_size: Positive = Field(
        1,
        description="Ranks per group with a second copy of parameters; backward gathers inside it.",
    )
    zero_quantized_gradients: bool = Field(
        False,
        description="Stages 2 and 3: reduce gradients as int4 blocks, a quarter of the bytes of 16 bits, in one hop "
        "inside nodes and one between them.",
    )
    zero_quantized_gradients_bits: Bits = Field(4, description="Bits per value of `zero_quantized_gradients`.")
    zero_quantized_block_size: Annotated[Positive, Field(multiple_of=2)] = Field(
        256, description="Values per scale where values travel quantized, even; smaller is more exact, adds bytes."
    )
    zeropp_loco_param: LoCo | None = Field(
        None, description="Error feedback for `zero_quantized_gradients`; keeps an error beside the gradients."
    )
    mics_shard_size: Literal[-1] | Positive = Field(
        -1, description="Ranks that share one copy of what is sharded; other such groups hold replicas. -1 is all."
    )
    mics_hierarchical_params_gather: bool = Field(False, description="Gather between nodes first, then inside.")
    zenflow: ZenFlow | None = Field(None, description="Importance-ordered updates with CPU offload.")
    weight_quantization: WeightQuantization | None = Field(None, description="Weight-only quantization for inference.")

    @field_validator("offload_param", mode="after")
    @classmethod
    def _no_param_device_is_absent(cls, value: OffloadParam | None) -> OffloadParam | None:
        return None if value is None or value.device == "none" else value

    @field_validator("offload_optimizer", mode="after")
    @classmethod
    def _no_optimizer_device_is_absent(cls, value: OffloadOptimizer | None) -> OffloadOptimizer | None:
        return None if value is None or (value.device == "none" and not value.super_offload) else value

    @classmethod
    def rewrite(cls, raw: Mapping[str, Any], path: str, notes: Notes) -> Mapping[str, Any]:
        """Turn the old `cpu_offload` switches into offload blocks."""
        block = dict(raw)
        pin = block.pop("cpu_offload_use_pin_memory", None)
        if pin is not None:
            notes.warnings.append(f"{path}.cpu_offload_use_pin_memory is old; use pin_memory of the block")
        for old, new in (("cpu_offload", "offload_optimizer"), ("cpu_offload_param", "offload_param")):
            if old not in block:
                continue
            value = block.pop(old)
            notes.warnings.append(f'{path}.{old} is old; use {path}.{new}: {{"device": "cpu"}}')
            if not isinstance(value, bool):
                notes.faults.append(ConfigFault(f"{path}.{old}", value, "must be true or false"))
            elif new in block:
                rule = f"{old} and {new} say the same thing twice"
                notes.faults.append(ConfigFault(f"{path}.{old}", value, rule, f"remove {path}.{old}"))
            elif value:
                block[new] = {"device": "cpu"} if pin is None else {"device": "cpu", "pin_memory": pin}
        return block
