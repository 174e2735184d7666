"""The engine's many accessor methods: one per configured value, generated from a table.

They exist for scripts written against DeepSpeed's engine; new code reads `engine._config` or the resolved values.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from fullspeed.sharding.placement import Placement, placement_of

if TYPE_CHECKING:
    from fullspeed.config import Batch, Config

_PATHS = {
    "managed_gradient_accumulation": "managed_gradient_accumulation",
    "gradient_clipping": "gradient_clipping",
    "zero_optimization_stage": "zero_optimization.stage",
    "zero_gather_16bit_weights_on_model_save": "zero_optimization.stage3_gather_16bit_weights_on_model_save",
    "zero_offload_optimizer": "zero_optimization.offload_optimizer",
    "zero_offload_param": "zero_optimization.offload_param",
    "zero_reduce_bucket_size": "zero_optimization.reduce_bucket_size",
    "zero_allgather_bucket_size": "zero_optimization.allgather_bucket_size",
    "zero_allgather_partitions": "zero_optimization.allgather_partitions",
    "zero_allgather_sequential": "zero_optimization.stage3_allgather_sequential",
    "zero_reduce_scatter": "zero_optimization.reduce_scatter",
    "zero_contiguous_gradients": "zero_optimization.contiguous_gradients",
    "zero_load_from_fp32_weights": "zero_optimization.load_from_fp32_weights",
    "zero_elastic_checkpoint": "zero_optimization.elastic_checkpoint",
    "zero_ignore_unused_parameters": "zero_optimization.ignore_unused_parameters",
    "zero_legacy_stage1": "zero_optimization.legacy_stage1",
    "zero_round_robin_gradients": "zero_optimization.round_robin_gradients",
    "zero_multi_rank_bucket_allreduce": "zero_optimization.use_multi_rank_bucket_allreduce",
    "zero_sub_group_size": "zero_optimization.sub_group_size",
    "zero_prefetch_bucket_size": "zero_optimization.stage3_prefetch_bucket_size",
    "zero_param_persistence_threshold": "zero_optimization.stage3_param_persistence_threshold",
    "zero_model_persistence_threshold": "zero_optimization.stage3_model_persistence_threshold",
    "zero_max_live_parameters": "zero_optimization.stage3_max_live_parameters",
    "zero_max_reuse_distance": "zero_optimization.stage3_max_reuse_distance",
    "zero_module_granularity_threshold": "zero_optimization.stage3_module_granularity_threshold",
    "zero_log_trace_cache_warnings": "zero_optimization.log_trace_cache_warnings",
    "zero_hpz_partition_size": "zero_optimization.zero_hpz_partition_size",
    "zero_quantized_weights": "zero_optimization.zero_quantized_weights",
    "zero_quantized_nontrainable_weights": "zero_optimization.zero_quantized_nontrainable_weights",
    "zero_quantized_gradients": "zero_optimization.zero_quantized_gradients",
    "zero_compute_grad_norm": "zero_optimization.compute_grad_norm",
    "zero_parameter_alignment": "zero_optimization.parameter_alignment",
    "zero_allow_untested_optimizer": "zero_allow_untested_optimizer",
    "zero_force_ds_cpu_optimizer": "zero_force_ds_cpu_optimizer",
    "fp16_enabled": "fp16.enabled",
    "fp16_auto_cast": "fp16.auto_cast",
    "fp16_master_weights_and_gradients": "fp16.fp16_master_weights_and_grads",
    "bfloat16_enabled": "bf16.enabled",
    "bf16_master_weights_and_gradients": "bf16.bf16_master_weights_and_grads",
    "bf16_optimizer_states": "bf16.bf16_optimizer_states",
    "loss_scale": "fp16.loss_scale",
    "torch_autocast_enabled": "torch_autocast.enabled",
    "torch_autocast_dtype": "torch_autocast.dtype",
    "torch_autocast_lower_precision_safe_modules": "torch_autocast.lower_precision_safe_modules",
    "communication_data_type": "communication_data_type",
    "prescale_gradients": "prescale_gradients",
    "gradient_predivide_factor": "gradient_predivide_factor",
    "sparse_gradients_enabled": "sparse_gradients",
    "graph_harvesting": "graph_harvesting",
    "is_deepcompile_enabled": "compile.deepcompile",
    "is_deepcompile_active": "compile.deepcompile",
    "amp_enabled": "amp.enabled",
    "aio_config": "aio",
    "steps_per_print": "steps_per_print",
    "wall_clock_breakdown": "wall_clock_breakdown",
    "memory_breakdown": "memory_breakdown",
    "log_level": "log_level",
    "dataloader_drop_last": "dataloader_drop_last",
    "use_node_local_storage": "checkpoint.use_node_local_storage",
    "flops_profiler_enabled": "flops_profiler.enabled",
    "flops_profiler_profile_step": "flops_profiler.profile_step",
    "flops_profiler_module_depth": "flops_profiler.module_depth",
    "flops_profiler_top_modules": "flops_profiler.top_modules",
    "flops_profiler_detailed": "flops_profiler.detailed",
    "flops_profiler_output_file": "flops_profiler.output_file",
    "flops_profiler_recompute_fwd_factor": "flops_profiler.recompute_fwd_factor",
    "autotuning_enabled": "autotuning.enabled",
    "elasticity_enabled": "elasticity.enabled",
    "pld_enabled": "progressive_layer_drop.enabled",
    "eigenvalue_enabled": "eigenvalue.enabled",
    "curriculum_enabled_legacy": "curriculum_learning.enabled",
    "data_efficiency_enabled": "data_efficiency.enabled",
    "tensor_parallel_config": "tensor_parallel",
    "zenflow_config": "zero_optimization.zenflow",
}


class ConfigAccessors:
    """Mixin: `engine.zero_optimization_stage()` and its like. Methods of the table are attached below."""

    _config: Config
    _batch: Batch

    def train_batch_size(self) -> int:
        """Samples per update, over all ranks."""
        return self._batch.train_batch_size

    def train_micro_batch_size_per_gpu(self) -> int:
        """Samples per forward on one rank."""
        return self._batch.micro_batch_size

    def gradient_accumulation_steps(self) -> int:
        """Forwards per update on one rank."""
        return self._batch.grad_accum_steps

    def _placement(self) -> Placement:
        return placement_of(self._config.zero_optimization.stage)

    def zero_optimization(self) -> bool:
        """Whether anything is sharded."""
        return self._placement().optim

    def zero_optimization_partition_gradients(self) -> bool:
        """Whether gradients are sharded."""
        return self._placement().grads

    def zero_optimization_partition_weights(self) -> bool:
        """Whether parameters are sharded."""
        return self._placement().params

    def zero_overlap_comm(self) -> bool:
        """Whether reductions overlap with backward."""
        return self._config.zero_optimization.overlap_comm is not False

    def zero_use_cpu_optimizer(self) -> bool:
        """Whether the optimizer runs on host memory of an accelerator."""
        return self._config.zero_optimization.offload_optimizer is not None

    zero_cpu_offload = zero_use_cpu_optimizer
    zero_partial_offload = zero_nvme_offload_optimizer = zero_use_cpu_optimizer

    def postscale_gradients(self) -> bool:
        """Whether gradients are divided after they were summed over ranks, where the factor asks for it."""
        return not self._config.prescale_gradients

    def dynamic_loss_scale(self) -> bool:
        """Whether the loss scale adapts."""
        return self._config.fp16.enabled and self._config.fp16.loss_scale == 0

    def initial_dynamic_scale(self) -> float:
        """First value of the adaptive loss scale; 1 where there is none."""
        return float(2**self._config.fp16.initial_scale_power) if self._config.fp16.enabled else 1.0

    def dynamic_loss_scale_args(self) -> dict[str, Any]:
        """The adaptive loss scale's settings."""
        fp16 = self._config.fp16
        return {
            "init_scale": 2**fp16.initial_scale_power,
            "scale_window": fp16.loss_scale_window,
            "min_scale": fp16.min_loss_scale,
            "delayed_shift": fp16.hysteresis,
            "consecutive_hysteresis": fp16.consecutive_hysteresis,
        }

    def optimizer_name(self) -> str | None:
        """Name of the configured optimizer, in the spelling of the configuration."""
        return None if self._config.optimizer is None else self._config.optimizer.type

    def optimizer_params(self) -> dict[str, Any] | None:
        """Parameters of the configured optimizer."""
        return None if self._config.optimizer is None else dict(self._config.optimizer.params)

    def scheduler_name(self) -> str | None:
        """Name of the configured schedule."""
        return None if self._config.scheduler is None else self._config.scheduler.type

    def scheduler_params(self) -> dict[str, Any] | None:
        """Parameters of the configured schedule."""
        return None if self._config.scheduler is None else dict(self._config.scheduler.params)

    def checkpoint_tag_validation_enabled(self) -> bool:
        """Whether ranks compare checkpoint tags."""
        return self._config.checkpoint.tag_validation.lower() != "ignore"

    def checkpoint_tag_validation_fail(self) -> bool:
        """Whether different tags are an error."""
        return self._config.checkpoint.tag_validation.lower() == "fail"


def _reader(path: str) -> Callable[[ConfigAccessors], Any]:
    def read(self: ConfigAccessors) -> Any:
        value: Any = self._config
        for name in path.split("."):
            value = getattr(value, name)
        return value

    read.__doc__ = f"The configured value of `{path}`."
    return read


for _name, _path in _PATHS.items():
    setattr(ConfigAccessors, _name, _reader(_path))
