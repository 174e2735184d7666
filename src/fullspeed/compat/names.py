"""What the module named `deepspeed` consists of: for every public name, ours or the feature it waits for. Data only."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import NamedTuple

VERSION = "0.19.8"  # the DeepSpeed whose names these are; integrations compare it with what they need


class Ours(NamedTuple):
    """A name that works: where its object is defined, and as what."""

    module: str
    attribute: str


class Waiting(NamedTuple):
    """A name that exists but raises when it is used, because its feature is not built."""

    feature: str


Name = Ours | Waiting

REMEDIES: Mapping[str, str] = {
    "pipeline parallelism": "train with ZeRO stage 3 instead",
    "mixture of experts": "use the experts of the model's own library under ZeRO stage 3",
    "sequence parallelism": "shorten sequences, or use activation checkpointing",
    "tensor parallelism": "leave the block out and train with ZeRO stage 3",
    "inference": "serve the saved weights with an inference library",
    "1-bit optimizers": "use Adam or LAMB, with zero_quantized_gradients where communication is the limit",
    "ZenFlow": "use FusedAdam or DeepSpeedCPUAdam",
    "compression": "leave compression out",
    "data efficiency": "leave the curriculum out",
    "quantized parameters": "use QuantizedLinear, and its full_weight()",
    "checkpoint conversion": "use the functions of deepspeed.utils.zero_to_fp32, or fullspeed convert",
    "transformer kernels": "use torch.nn.functional.scaled_dot_product_attention and torch.compile",
    "file I/O": "use AsyncIOBuilder, which reads into host memory",
    "elastic agent": "start the job with --elastic_training",
    "tensor overrides": "pass dtype to zero.Init",
    "tuning arguments": "write the schedule into the configuration's scheduler section",
}
"""What to do meanwhile, by feature."""

ALIASES: Mapping[str, str] = {
    "deepspeed.zero": "deepspeed.runtime.zero",
    "deepspeed.dist": "deepspeed.comm",
    "deepspeed.comm.comm": "deepspeed.comm",
    "deepspeed.checkpointing": "deepspeed.runtime.activation_checkpointing.checkpointing",
    "deepspeed.profiling.flops_profiler.profiler": "deepspeed.profiling.flops_profiler",
    "deepspeed.accelerator.real_accelerator": "deepspeed.accelerator",
}
"""Modules that are one and the same under two names."""

_ADAPTERS = "fullspeed.compat"
_ACCESS = "fullspeed.sharding.access"
_LEAVES = "fullspeed.sharding.leaves"

# module, where from, names; `name=attribute` where it is called something else there.
_OURS: tuple[tuple[str, str, str], ...] = (
    ("", "fullspeed.engine.initialize", "initialize"),
    ("", "fullspeed.engine.engine", "DeepSpeedEngine=Engine"),
    ("", "fullspeed.engine.arguments", "add_config_arguments"),
    ("", "fullspeed.comm", "init_distributed"),
    ("", "fullspeed.base.log", "log_dist logger"),
    ("", "fullspeed.accelerator", "get_accelerator"),
    ("", "fullspeed.base.errors", "DeepSpeedConfigError=ConfigError"),
    ("", f"{_ADAPTERS}.config", "DeepSpeedConfig"),
    ("", "fullspeed.sharding.optimizer", "DeepSpeedOptimizer=ShardedOptimizer"),
    ("", "fullspeed.sharding.on_device", "OnDevice"),
    (
        "",
        f"{_ADAPTERS}.constants",
        "__version__ __version_major__ __version_minor__ __version_patch__ __git_hash__ __git_branch__ HAS_TRITON "
        "ADAM_OPTIMIZER LAMB_OPTIMIZER MUON_OPTIMIZER is_compile_supported set_optimizer_flags",
    ),
    (
        "accelerator",
        "fullspeed.accelerator",
        "get_accelerator set_accelerator is_current_accelerator_supported DeepSpeedAccelerator=Accelerator",
    ),
    ("accelerator.abstract_accelerator", "fullspeed.accelerator", "DeepSpeedAccelerator=Accelerator"),
    ("checkpoint.utils", f"{_ADAPTERS}.tensors", "clone_tensors_for_torch_save"),
    (
        "comm",
        "fullspeed.comm.torch_names",
        "ReduceOp all_gather all_gather_coalesced all_gather_into_tensor all_gather_object all_reduce "
        "all_reduce_coalesced all_to_all all_to_all_single allgather_fn barrier batch_isend_irecv broadcast "
        "broadcast_object_list destroy_process_group gather get_all_ranks_from_group get_global_rank get_local_rank "
        "get_rank get_world_group get_world_size has_all_gather_into_tensor has_all_reduce_coalesced "
        "has_coalescing_manager has_reduce_scatter_tensor inference_all_reduce initialize_mesh_device irecv isend "
        "is_available monitored_barrier new_group recv reduce reduce_scatter reduce_scatter_fn "
        "reduce_scatter_tensor scatter send enable_symm_mem_for_group",
    ),
    (
        "comm",
        "fullspeed.comm",
        "init_distributed is_initialized comms_logger configure get_comm_operation_count get_logged_comm_ops "
        "has_comm_data log_summary reset_log",
    ),
    (
        "elasticity",
        "fullspeed.planning.elasticity",
        "compute_elastic_config elasticity_enabled ensure_immutable_elastic_config",
    ),
    (
        "elasticity",
        "fullspeed.config.elastic",
        "ElasticityConfigError ElasticityError ElasticityIncompatibleWorldSize",
    ),
    ("checkpoint.ds_to_universal", f"{_ADAPTERS}.conversion", "main"),
    (
        "utils.zero_to_fp32",
        "fullspeed.checkpoint.convert",
        "convert_zero_checkpoint_to_fp32_state_dict convert_zero_checkpoint_to_state_dict "
        "get_fp32_state_dict_from_zero_checkpoint get_model_state_file get_optim_files "
        "load_state_dict_from_zero_checkpoint",
    ),
    ("linear", "fullspeed.linear", "Init LoRAConfig OptimizedLinear QuantizationConfig init_lora"),
    ("linear.config", "fullspeed.linear", "LoRAConfig QuantizationConfig"),
    ("linear.context_manager", "fullspeed.linear", "Init init_lora"),
    ("linear.optimized_linear", "fullspeed.linear", "LoRAOptimizedLinear OptimizedLinear"),
    ("linear.quantization", "fullspeed.linear", "QuantizedLinear"),
    ("launcher.runner", f"{_ADAPTERS}.constants", "DEEPSPEED_ENVIRONMENT_NAME DLTS_HOSTFILE"),
    ("monitor.monitor", "fullspeed.monitor.monitor", "MonitorMaster=Monitor"),
    ("ops.aio", f"{_ADAPTERS}.builders", "AsyncIOBuilder"),
    ("ops.op_builder", f"{_ADAPTERS}.builders", "AsyncIOBuilder"),
    ("ops.adagrad", f"{_ADAPTERS}.optimizers", "DeepSpeedCPUAdagrad"),
    ("ops.adam", f"{_ADAPTERS}.optimizers", "FusedAdam"),
    ("ops.adam", "fullspeed.optim.cpu", "DeepSpeedCPUAdam=CPUAdam"),
    ("ops.lamb", f"{_ADAPTERS}.optimizers", "FusedLamb"),
    ("ops.lion", f"{_ADAPTERS}.optimizers", "DeepSpeedCPULion FusedLion"),
    ("profiling.flops_profiler", "fullspeed.monitor.flops_profiler", "FlopsProfiler get_model_profile"),
    (
        "runtime.activation_checkpointing.checkpointing",
        "fullspeed.checkpointing",
        "CheckpointFunction CudaRNGStatesTracker checkpoint configure get_cuda_rng_tracker is_configured "
        "model_parallel_cuda_manual_seed model_parallel_reconfigure_tp_seed non_reentrant_checkpoint "
        "partition_activations_in_checkpoint reset set_num_layers",
    ),
    (
        "runtime.activation_checkpointing.offload_activations",
        "fullspeed.checkpointing",
        "get_checkpoint_hidden_states_offloading_ctx_manager",
    ),
    (
        "runtime.base_optimizer",
        "fullspeed.sharding.optimizer",
        "DeepSpeedOptimizer=ShardedOptimizer ZeROOptimizer=ShardedOptimizer",
    ),
    ("runtime.config", f"{_ADAPTERS}.config", "DeepSpeedConfig"),
    ("runtime.config", "fullspeed.base.errors", "DeepSpeedConfigError=ConfigError"),
    (
        "runtime.config",
        f"{_ADAPTERS}.constants",
        "ADAGRAD_OPTIMIZER ADAM_OPTIMIZER ADAMW_OPTIMIZER LAMB_OPTIMIZER LION_OPTIMIZER MUON_OPTIMIZER",
    ),
    ("runtime.bf16_optimizer", "fullspeed.sharding.optimizer", "BF16_Optimizer=ShardedOptimizer"),
    ("runtime.fp16.fused_optimizer", "fullspeed.sharding.optimizer", "FP16_Optimizer=ShardedOptimizer"),
    ("runtime.compiler", f"{_ADAPTERS}.constants", "is_compile_supported"),
    ("runtime.dataloader", "fullspeed.data.loader", "DeepSpeedDataLoader=PositionedLoader RepeatingLoader"),
    ("runtime.engine", "fullspeed.engine.engine", "DeepSpeedEngine=Engine"),
    ("runtime.engine", f"{_ADAPTERS}.constants", "ADAM_OPTIMIZER LAMB_OPTIMIZER MUON_OPTIMIZER"),
    (
        "runtime.lr_schedules",
        "fullspeed.optim.scheduler",
        "LRRangeTest OneCycle VALID_LR_SCHEDULES WarmupCosineLR WarmupDecayLR WarmupLR",
    ),
    (
        "runtime.utils",
        f"{_ADAPTERS}.tensors",
        "clip_grad_norm_ ensure_directory_exists get_global_norm get_only_unique_item move_to_device "
        "noop_context noop_decorator set_random_seed CheckOverflow DummyOptim call_to_str",
    ),
    ("runtime.utils", f"{_ADAPTERS}.constants", "memory_status required_torch_version"),
    ("runtime.utils", f"{_ADAPTERS}.bwc", "bwc_tensor_model_parallel_rank"),
    ("runtime.utils", "fullspeed.monitor.memory", "see_memory_usage"),
    (
        "runtime.zero",
        "fullspeed.zero",
        "GatheredParameters Init MiCS_Init TiledLinear TiledLinearReturnBias ZeroParamStatus ZeroParamType "
        "register_external_parameter unregister_external_parameter unwrap_model_for_generation",
    ),
    ("runtime.zero.mics", "fullspeed.zero", "MiCS_Init"),
    ("runtime.zero.config", f"{_ADAPTERS}.constants", "ZeroStageEnum"),
    ("runtime.zero.parameter_offload", "fullspeed.sharding.parameter_offload", "DeepSpeedZeRoOffload=ParameterOffload"),
    ("runtime.zero.muon", "fullspeed.optim.muon", "MuonWithAuxAdam"),
    ("runtime.zero.offload_config", "fullspeed.sharding.offloaded_states", "OffloadStateTypeEnum=OffloadState"),
    (
        "runtime.zero.partition_parameters",
        "fullspeed.zero",
        "GatheredParameters Init ZeroParamStatus ZeroParamType register_external_parameter "
        "unregister_external_parameter is_zero_param",
    ),
    ("runtime.zero.partition_parameters", "fullspeed.accelerator", "get_accelerator"),
    ("runtime.zero.partition_parameters", f"{_ADAPTERS}.factories", "_orig_torch_arange"),
    ("runtime.zero.partition_parameters", f"{_ADAPTERS}.factories", "zero_wrapper_for_fp_tensor_constructor"),
    (
        "runtime.zero.stage3",
        "fullspeed.zero",
        "estimate_zero3_model_states_mem_needs estimate_zero3_model_states_mem_needs_all_cold "
        "estimate_zero3_model_states_mem_needs_all_live unwrap_model_for_generation",
    ),
    ("runtime.zero.stage3", "fullspeed.sharding.optimizer", "DeepSpeedZeroOptimizer_Stage3=ShardedOptimizer"),
    (
        "runtime.zero.stage_1_and_2",
        "fullspeed.zero",
        "estimate_zero2_model_states_mem_needs estimate_zero2_model_states_mem_needs_all_cold "
        "estimate_zero2_model_states_mem_needs_all_live",
    ),
    ("runtime.zero.stage_1_and_2", "fullspeed.sharding.optimizer", "DeepSpeedZeroOptimizer=ShardedOptimizer"),
    ("runtime.zero.tiling", "fullspeed.zero", "TiledLinear TiledLinearReturnBias"),
    ("runtime.zero.utils", "fullspeed.zero", "is_zero_param"),
    ("runtime.zero.utils", "fullspeed.base.errors", "ZeRORuntimeException=CheckpointError"),
    ("runtime.zero.utils", f"{_ADAPTERS}.optimizers", "is_zero_supported_optimizer"),
    ("utils", "fullspeed.base.log", "log_dist logger"),
    ("utils", f"{_ADAPTERS}.constants", "log_dist_once set_log_level_from_string instrument_w_nvtx"),
    ("utils", "fullspeed.data.loader", "RepeatingLoader"),
    ("utils", "fullspeed.sharding.on_device", "OnDevice"),
    (
        "utils",
        _ACCESS,
        "safe_get_full_fp32_param safe_get_full_grad safe_get_full_optimizer_state safe_get_local_fp32_param "
        "safe_get_local_grad safe_get_local_optimizer_state safe_set_full_fp32_param safe_set_full_grad "
        "safe_set_full_optimizer_state safe_set_local_fp32_param safe_set_local_grad safe_set_local_optimizer_state",
    ),
    ("utils", f"{_ADAPTERS}.tensors", "safe_update_full_grad_vectorized"),
    (
        "utils",
        _LEAVES,
        "get_z3_leaf_modules set_z3_leaf_module set_z3_leaf_modules set_z3_leaf_modules_by_name "
        "set_z3_leaf_modules_by_suffix unset_z3_leaf_modules z3_leaf_module z3_leaf_parameter",
    ),
    (
        "utils.bwc",
        f"{_ADAPTERS}.bwc",
        "bwc_tensor_model_parallel_group bwc_tensor_model_parallel_rank bwc_tensor_model_parallel_world_size",
    ),
    (
        "utils.groups",
        f"{_ADAPTERS}.groups",
        "_clone_world_group _get_data_parallel_group _get_data_parallel_rank _get_data_parallel_world_size "
        "_get_model_parallel_world_size _get_sequence_data_parallel_group _get_sequence_data_parallel_rank "
        "_get_sequence_data_parallel_world_size _get_sequence_parallel_rank _get_sequence_parallel_world_size "
        "get_data_parallel_group get_data_parallel_rank get_data_parallel_world_size get_model_parallel_rank "
        "get_model_parallel_world_size get_tensor_model_parallel_rank get_tensor_model_parallel_world_size initialize",
    ),
    ("utils.logging", "fullspeed.base.log", "log_dist logger"),
    ("utils.logging", f"{_ADAPTERS}.constants", "log_dist_once set_log_level_from_string"),
    ("utils.nvtx", f"{_ADAPTERS}.constants", "instrument_w_nvtx"),
    (
        "utils.timer",
        "fullspeed.monitor.timers",
        "NoopTimer SynchronizedWallClockTimer ThroughputTimer",
    ),
    (
        "utils.z3_leaf_module",
        _LEAVES,
        "get_z3_leaf_modules set_z3_leaf_module set_z3_leaf_modules set_z3_leaf_modules_by_name "
        "set_z3_leaf_modules_by_suffix unset_z3_leaf_modules z3_leaf_module z3_leaf_parameter",
    ),
)

# module, the feature it waits for, names
_WAITING: tuple[tuple[str, str, str], ...] = (
    ("", "pipeline parallelism", "PipelineEngine PipelineModule"),
    ("", "inference", "DeepSpeedHybridEngine DeepSpeedInferenceConfig InferenceEngine default_inference_config "
     "init_inference replace_transformer_layer revert_transformer_layer"),
    ("", "tensor parallelism", "set_autotp_mode tp_model_init"),
    ("", "transformer kernels", "DeepSpeedTransformerConfig DeepSpeedTransformerLayer"),
    ("", "tuning arguments", "add_tuning_arguments"),
    ("checkpoint", "checkpoint conversion", "DeepSpeedCheckpoint ZeROCheckpoint"),
    ("checkpoint.universal_checkpoint", "checkpoint conversion", "SubparamShape"),
    ("compile.passes.sp_compile", "sequence parallelism", "prepare_autosp_inputs"),
    ("compression.compress", "compression", "init_compression redundancy_clean"),
    ("elasticity", "elastic agent", "DSElasticAgent"),
    ("inference.engine", "inference", "InferenceEngine"),
    ("linear.quantization", "quantized parameters", "QuantizedParameter"),
    ("module_inject", "inference", "replace_transformer_layer revert_transformer_layer"),
    ("module_inject", "tensor parallelism", "set_autotp_mode"),
    ("moe.experts", "mixture of experts", "Experts"),
    ("moe.layer", "mixture of experts", "MoE"),
    ("moe.mappings", "mixture of experts", "drop_tokens gather_tokens"),
    ("moe.utils", "mixture of experts", "configure_moe_param_groups has_moe_layers is_moe_param is_moe_param_group "
     "split_params_into_different_moe_groups_for_optimizer"),
    ("ops.adam", "ZenFlow", "ZenFlowCPUAdam ZenFlowSelectiveAdamW"),
    ("ops.op_builder", "file I/O", "GDSBuilder PinMemoryBuilder"),
    ("ops.deepspeed4science", "transformer kernels", "DS4Sci_EvoformerAttention"),
    ("ops.sparse_attention", "transformer kernels", "BSLongformerSparsityConfig BertSparseSelfAttention "
     "BigBirdSparsityConfig DenseSparsityConfig FixedSparsityConfig SparseAttentionUtils SparseSelfAttention "
     "SparsityConfig VariableSparsityConfig"),
    ("ops.transformer", "transformer kernels", "DeepSpeedTransformerConfig DeepSpeedTransformerLayer"),
    ("pipe", "pipeline parallelism", "LayerSpec PipelineModule TiedLayerSpec"),
    ("runtime.data_pipeline.curriculum_scheduler", "data efficiency", "CurriculumScheduler"),
    ("runtime.data_pipeline.data_routing.helper", "data efficiency", "convert_to_random_ltd "
     "remove_random_ltd_state_dict save_without_random_ltd"),
    ("runtime.data_pipeline.data_routing.basic_layer", "data efficiency", "RandomLayerTokenDrop"),
    ("runtime.data_pipeline.data_routing.scheduler", "data efficiency", "RandomLTDScheduler"),
    ("runtime.data_pipeline.data_sampling.variable_batch_size_and_lr", "data efficiency",
     "get_dataloader_and_lr_scheduler_for_variable_batch_size_deepspeed"),
    ("runtime.data_pipeline.data_sampling.data_analyzer", "data efficiency", "DataAnalyzer DistributedDataAnalyzer"),
    ("runtime.data_pipeline.data_sampling.data_sampler", "data efficiency", "DeepSpeedDataSampler"),
    ("runtime.data_pipeline.data_sampling.indexed_dataset", "data efficiency", "MMapIndexedDataset "
     "MMapIndexedDatasetBuilder"),
    ("runtime.fp16.onebit", "1-bit optimizers", "OnebitAdam OnebitLamb ZeroOneAdam"),
    ("runtime.hybrid_engine", "inference", "DeepSpeedHybridEngine"),
    ("runtime.lr_schedules", "tuning arguments", "add_tuning_arguments"),
    ("runtime.pipe", "pipeline parallelism", "LayerSpec PipelineModule ProcessTopology TiedLayerSpec"),
    ("runtime.pipe.engine", "pipeline parallelism", "PipelineEngine PipelineError"),
    ("runtime.pipe.module", "pipeline parallelism", "LayerSpec PipelineModule TiedLayerSpec"),
    ("runtime.pipe.schedule", "pipeline parallelism", "BackwardPass DataParallelSchedule ForwardPass "
     "InferenceSchedule LoadMicroBatch OptimizerStep PipeSchedule RecvActivation RecvGrad ReduceGrads ReduceTiedGrads "
     "SendActivation SendGrad TrainSchedule"),
    ("runtime.pipe.topology", "pipeline parallelism", "PipeDataParallelTopology PipeModelDataParallelTopology "
     "PipelineParallelGrid ProcessTopology"),
    ("runtime.sequence_parallel.ulysses_sp", "sequence parallelism", "TiledFusedLogitsLoss TiledLoss TiledMLP "
     "UlyssesSPAttentionHF UlyssesSPDataLoaderAdapter sequence_tiled_compute"),
    ("runtime.sequence_parallel.parallel_state_sp", "sequence parallelism", "get_sequence_parallel_group"),
    ("runtime.zero.partition_parameters", "tensor overrides", "DeepSpeedTensorOverride"),
    ("runtime.utils", "pipeline parallelism", "PartitionedTensor partition_balanced partition_uniform"),
    ("sequence.layer", "sequence parallelism", "DistributedAttention"),
    ("sequence.fpdt_layer", "sequence parallelism", "FPDT_Attention"),
    ("utils.groups", "sequence parallelism", "_get_sequence_parallel_group"),
    ("utils.groups", "tensor parallelism", "get_model_parallel_group get_tensor_model_parallel_group"),
    ("utils.groups", "mixture of experts", "_create_expert_and_data_parallel _get_expert_data_parallel_group "
     "_get_expert_parallel_group"),
)  # fmt: skip


def _full(module: str) -> str:
    return f"deepspeed.{module}" if module else "deepspeed"


def _collect() -> dict[str, dict[str, Name]]:
    found: dict[str, dict[str, Name]] = {}
    for module, source, names in _OURS:
        for name in names.split():
            public, _, attribute = name.partition("=")
            found.setdefault(_full(module), {})[public] = Ours(source, attribute or public)
    for module, feature, names in _WAITING:
        for name in names.split():
            found.setdefault(_full(module), {})[name] = Waiting(feature)
    for module in [*found, *ALIASES]:
        for parent in _parents(module):
            found.setdefault(parent, {})
    return found


def _parents(module: str) -> Iterator[str]:
    while "." in module:
        module = module.rpartition(".")[0]
        yield module


MODULES: Mapping[str, Mapping[str, Name]] = _collect()
"""For every module but the aliases, its names."""
