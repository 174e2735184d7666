"""Rules between keys: combinations that cannot work, or that would not do what they say."""

from __future__ import annotations

from collections.abc import Callable, Collection
from typing import NamedTuple

from fullspeed.base.errors import ConfigFault
from fullspeed.config.root import Config
from fullspeed.config.supported import shown_value, value_at


class Rule(NamedTuple):
    """A combination that is refused. The fault is reported at the first of `keys`."""

    keys: tuple[str, ...]  # every key the rule reads
    is_broken: Callable[[Config], bool]
    rule: str
    fix: str


def _stage(config: Config) -> int:
    return config.zero_optimization.stage


def _offload_device(config: Config) -> str:
    offload = config.zero_optimization.offload_optimizer
    return offload.device if offload else "none"


def _param_device(config: Config) -> str:
    offload = config.zero_optimization.offload_param
    return offload.device if offload else "none"


def _super_offload(config: Config) -> bool:
    offload = config.zero_optimization.offload_optimizer
    return offload is not None and offload.super_offload


def _is_dynamic(config: Config) -> bool:
    return config.fp16.enabled and config.fp16.loss_scale == 0


def _optimizer(config: Config) -> str:
    return config.optimizer.name if config.optimizer else ""


def _odd_dtype(config: Config) -> bool:
    wanted = config.data_types.param_dtype
    return wanted is not None and wanted != config.precision_dtype()


def _no_path(device: str | None, path: str | None) -> bool:
    return device == "nvme" and not path


ZERO = "zero_optimization"
STAGE = f"{ZERO}.stage"
ONE_BIT = ("onebitadam", "onebitlamb", "zerooneadam")

RULES: tuple[Rule, ...] = (
    Rule(("fp16.enabled", "bf16.enabled"), lambda c: c.fp16.enabled and c.bf16.enabled,
         "fp16 and bf16 cannot both be enabled", "set one of fp16.enabled and bf16.enabled to false"),
    Rule(("amp.enabled", "fp16.enabled", "bf16.enabled", STAGE),
         lambda c: c.amp.enabled and (c.fp16.enabled or c.bf16.enabled or _stage(c) > 0),
         "amp does not go with fp16, bf16 or zero_optimization", "set amp.enabled to false"),
    Rule(("torch_autocast.dtype", "torch_autocast.enabled"),
         lambda c: c.torch_autocast.enabled and c.torch_autocast.dtype == "fp32",
         "autocast lowers precision; fp32 is no lower format", "choose 'bf16' or 'fp16'"),
    Rule(("torch_autocast.enabled", f"{ZERO}.zero_quantized_weights"),
         lambda c: c.torch_autocast.enabled and c.zero_optimization.zero_quantized_weights,
         "torch_autocast does not go with zero_quantized_weights", "switch one of them off"),
    Rule(("data_types.param_dtype", "fp16.enabled", "bf16.enabled"), _odd_dtype,
         "must agree with the enabled precision", "remove it, or enable that precision in fp16 or bf16"),
    Rule(("fp16.min_loss_scale", "fp16.loss_scale", "fp16.enabled"),
         lambda c: _is_dynamic(c) and c.fp16.min_loss_scale == 0,
         "must be greater than 0 when the loss scale is dynamic", "use 1"),
    Rule(("bf16.bf16_optimizer_states", "bf16.bf16_master_weights_and_grads"),
         lambda c: c.bf16.bf16_optimizer_states and not c.bf16.bf16_master_weights_and_grads,
         "needs bf16.bf16_master_weights_and_grads", "set both"),
    Rule(("bf16.bf16_master_weights_and_grads", STAGE),
         lambda c: c.bf16.bf16_master_weights_and_grads and _stage(c) == 0,
         "needs zero_optimization.stage 1, 2 or 3", "set a stage"),
    Rule(("bf16.bf16_master_weights_and_grads", "bf16.bf16_optimizer_states", f"{ZERO}.offload_optimizer"),
         lambda c: c.bf16.bf16_master_weights_and_grads and not c.bf16.bf16_optimizer_states
         and _offload_device(c) == "none",
         "with fp32 optimizer states it needs optimizer offload",
         "set bf16.bf16_optimizer_states or offload_optimizer"),
    Rule(("fp16.fp16_master_weights_and_grads", STAGE, f"{ZERO}.offload_optimizer"),
         lambda c: c.fp16.fp16_master_weights_and_grads and (_stage(c) == 0 or _offload_device(c) == "none"),
         "needs zero_optimization.stage 1, 2 or 3 and optimizer offload", "set both or leave it false"),
    Rule((f"{ZERO}.legacy_stage1",), lambda c: c.zero_optimization.legacy_stage1,
         "the old form of stage 1 is gone", "remove the key"),
    Rule((f"{ZERO}.elastic_checkpoint", STAGE),
         lambda c: c.zero_optimization.elastic_checkpoint and _stage(c) == 3,
         "does not exist at stage 3", "remove the key; checkpoints load at any world size anyway"),
    Rule((f"{ZERO}.allgather_bucket_size",), lambda c: c.zero_optimization.allgather_bucket_size % 2 == 1,
         "must be an even number", "add one"),
    Rule((f"{ZERO}.compute_grad_norm", STAGE),
         lambda c: not c.zero_optimization.compute_grad_norm and _stage(c) not in (1, 2),
         "false is for stages 1 and 2 only", "remove the key"),
    Rule((f"{ZERO}.compute_grad_norm", "gradient_clipping"),
         lambda c: not c.zero_optimization.compute_grad_norm and c.gradient_clipping > 0,
         "clipping needs the norm", "set gradient_clipping to 0 or remove the key"),
    Rule((f"{ZERO}.offload_param.nvme_path", f"{ZERO}.offload_param"),
         lambda c: _no_path(
             value_at(c, f"{ZERO}.offload_param.device"), value_at(c, f"{ZERO}.offload_param.nvme_path")
         ),
         "device nvme needs a directory", "set nvme_path"),
    Rule((f"{ZERO}.offload_optimizer.nvme_path", f"{ZERO}.offload_optimizer"),
         lambda c: _no_path(_offload_device(c), value_at(c, f"{ZERO}.offload_optimizer.nvme_path")),
         "device nvme needs a directory", "set nvme_path"),
    Rule((f"{ZERO}.offload_param", STAGE),
         lambda c: c.zero_optimization.offload_param is not None and _stage(c) != 3,
         "parameters are sharded, and so offloaded, at stage 3 only",
         "set zero_optimization.stage to 3 or remove it"),
    Rule((f"{ZERO}.zero_hpz_partition_size", f"{ZERO}.offload_param"),
         lambda c: c.zero_optimization.zero_hpz_partition_size > 1 and _param_device(c) == "nvme",
         "keeps a second copy in memory of parameters that shall wait in files",
         "remove it, or set offload_param.device to none"),
    Rule((f"{ZERO}.zero_quantized_nontrainable_weights", f"{ZERO}.offload_param"),
         lambda c: c.zero_optimization.zero_quantized_nontrainable_weights and _param_device(c) == "nvme",
         "keeps frozen parameters as codes in memory, not in files",
         "set it to false, or set offload_param.device to none"),
    Rule((f"{ZERO}.offload_optimizer", STAGE), lambda c: _offload_device(c) != "none" and _stage(c) == 0,
         "needs sharded optimizer states", "set zero_optimization.stage to 1, 2 or 3 or remove it"),
    Rule((f"{ZERO}.offload_optimizer.ratio", STAGE),
         lambda c: (value_at(c, f"{ZERO}.offload_optimizer.ratio") or 1.0) < 1 and _stage(c) != 3,
         "below 1 is for stage 3", "set it to 1"),
    Rule((f"{ZERO}.offload_optimizer.super_offload", f"{ZERO}.offload_optimizer.device"),
         lambda c: _super_offload(c) and _offload_device(c) != "cpu",
         "steps masters and states in host memory", 'set offload_optimizer.device: "cpu"'),
    Rule((f"{ZERO}.zenflow", STAGE), lambda c: c.zero_optimization.zenflow is not None and _stage(c) == 0,
         "needs sharded optimizer states", "set zero_optimization.stage to 1, 2 or 3 or remove it"),
    Rule((f"{ZERO}.offload_optimizer.super_offload", f"{ZERO}.offload_param.device"),
         lambda c: _super_offload(c) and value_at(c, f"{ZERO}.offload_param.device") == "nvme",
         "steps masters in host memory, and those of fp32 parameters are in the parameters' files",
         'set offload_param.device: "cpu"'),
    Rule((f"{ZERO}.zenflow", f"{ZERO}.offload_optimizer.device", f"{ZERO}.offload_param.device"),
         lambda c: c.zero_optimization.zenflow is not None
         and "nvme" in (_offload_device(c), value_at(c, f"{ZERO}.offload_param.device")),
         "steps masters and states in host memory, not in files", 'set both devices to "cpu"'),
    Rule((f"{ZERO}.zenflow", f"{ZERO}.offload_optimizer.super_offload"),
         lambda c: c.zero_optimization.zenflow is not None and _super_offload(c),
         "does not go with super_offload: both decide when optimizers step", "choose one of them"),
    Rule((f"{ZERO}.mics_shard_size", STAGE),
         lambda c: c.zero_optimization.mics_shard_size > 0 and _stage(c) == 0,
         "stage 0 has nothing to shard", "set zero_optimization.stage to 1, 2 or 3 or remove it"),
    Rule((f"{ZERO}.mics_hierarchical_params_gather", f"{ZERO}.mics_shard_size"),
         lambda c: c.zero_optimization.mics_hierarchical_params_gather and c.zero_optimization.mics_shard_size < 1,
         "is a way to gather in the groups of mics_shard_size", "set that key too or remove this one"),
    Rule((f"{ZERO}.zero_hpz_partition_size", STAGE),
         lambda c: c.zero_optimization.zero_hpz_partition_size > 1 and _stage(c) != 3,
         "keeps a second copy of sharded parameters, which only stage 3 has",
         "set zero_optimization.stage to 3 or remove it"),
    Rule((f"{ZERO}.zero_quantized_weights", STAGE),
         lambda c: c.zero_optimization.zero_quantized_weights and _stage(c) != 3,
         "parameters are gathered to compute with at stage 3 only", "set zero_optimization.stage to 3 or remove it"),
    Rule((f"{ZERO}.zero_quantized_nontrainable_weights", STAGE),
         lambda c: c.zero_optimization.zero_quantized_nontrainable_weights and _stage(c) != 3,
         "parameters are sharded at stage 3 only", "set zero_optimization.stage to 3 or remove it"),
    Rule((f"{ZERO}.zeropp_loco_param", f"{ZERO}.zero_quantized_gradients"),
         lambda c: c.zero_optimization.zeropp_loco_param is not None
         and not c.zero_optimization.zero_quantized_gradients,
         "gives back what zero_quantized_gradients loses", "set that key too or remove this one"),
    Rule((f"{ZERO}.zero_quantized_gradients", STAGE),
         lambda c: c.zero_optimization.zero_quantized_gradients and _stage(c) < 2,
         "needs sharded gradients", "set zero_optimization.stage to 2 or 3 or remove it"),
    Rule((f"{ZERO}.zero_quantized_gradients", f"{ZERO}.reduce_scatter"),
         lambda c: c.zero_optimization.zero_quantized_gradients and not c.zero_optimization.reduce_scatter,
         "is a way to reduce-scatter", "remove reduce_scatter or switch it off"),
    Rule(("gradient_allreduce_op", STAGE), lambda c: c.gradient_allreduce_op == "sum" and _stage(c) == 3,
         "sum is for stages 0 to 2", "use mean and scale the loss"),
    Rule(("gradient_allreduce_op", f"{ZERO}.zenflow", "compile.deepcompile"),
         lambda c: c.gradient_allreduce_op == "sum"
         and (c.zero_optimization.zenflow is not None or c.compile.deepcompile),
         "sum does not go with zenflow or deepcompile", "use mean and scale the loss"),
    Rule(("optimizer.type", STAGE), lambda c: _optimizer(c) in ONE_BIT and _stage(c) > 0,
         "one-bit optimizers exchange gradients themselves", "set zero_optimization.stage to 0"),
    Rule(("fp16.loss_scale", "optimizer.type", "fp16.enabled"),
         lambda c: c.fp16.enabled and c.fp16.loss_scale > 0 and _optimizer(c) in ("lamb", "onebitlamb"),
         "LAMB in fp16 needs a dynamic loss scale", "set it to 0"),
    Rule(("managed_gradient_accumulation", "compile.deepcompile", "amp.enabled"),
         lambda c: not c.managed_gradient_accumulation and (c.compile.deepcompile or c.amp.enabled),
         "false does not go with deepcompile or amp", "remove the key"),
    Rule((f"{ZERO}.overlap_comm", "managed_gradient_accumulation", STAGE),
         lambda c: not c.managed_gradient_accumulation and c.zero_optimization.overlap_comm is True
         and _stage(c) < 2,
         "true needs stage 2 or 3 when managed_gradient_accumulation is false", "remove the key"),
    Rule(("activation_checkpointing.contiguous_memory_optimization",
          "activation_checkpointing.partition_activations",
          "activation_checkpointing.number_checkpoints"),
         lambda c: c.activation_checkpointing.contiguous_memory_optimization
         and not (c.activation_checkpointing.partition_activations
                  and c.activation_checkpointing.number_checkpoints),
         "needs partition_activations and number_checkpoints", "set all three"),
    Rule(("checkpoint.layout", "checkpoint.writer.decoupled", "datastates_ckpt"),
         lambda c: c.checkpoint.layout == "deepspeed" and c.saves_in_background,
         "this layout is not written in the background", "set checkpoint.layout to fullspeed and convert afterwards"),
    Rule(("checkpoint.layout", "checkpoint.keep_last"),
         lambda c: c.checkpoint.layout == "deepspeed" and c.checkpoint.keep_last is not None,
         "checkpoints of this layout are not removed", "remove checkpoint.keep_last"),
    Rule(("elasticity.enabled", "elasticity.ignore_non_elastic_batch_info", "train_batch_size"),
         lambda c: c.elasticity.enabled and not c.elasticity.ignore_non_elastic_batch_info
         and any((c.train_batch_size, c.train_micro_batch_size_per_gpu, c.gradient_accumulation_steps)),
         "elasticity chooses the batch sizes itself",
         "remove the batch keys or set elasticity.ignore_non_elastic_batch_info"),
    Rule(("data_efficiency.data_sampling.dynamic_batching.max_tokens",),
         lambda c: c.data_efficiency.data_sampling.dynamic_batching.enabled
         and c.data_efficiency.data_sampling.dynamic_batching.max_tokens is None,
         "is required for dynamic batching", "set the tokens per batch"),
    Rule(("data_efficiency.data_routing.random_ltd.layer_token_lr_schedule.enabled",),
         lambda c: c.data_efficiency.data_routing.random_ltd.layer_token_lr_schedule.enabled,
         "is not supported", "set it to false"),
)  # fmt: skip


def cross_faults(config: Config, skipped: Collection[str] = ()) -> list[ConfigFault]:
    """The rules that `config` breaks, except those that read a key in `skipped`, which was wrong anyway."""
    return [
        ConfigFault(rule.keys[0], shown_value(config, rule.keys[0]), rule.rule, rule.fix)
        for rule in RULES
        if not any(_reads(key, wrong) for key in rule.keys for wrong in skipped) and rule.is_broken(config)
    ]


def _reads(key: str, wrong: str) -> bool:
    """Whether a wrong value at one path means that the value at the other is not what the user wrote."""
    return key == wrong or key.startswith(f"{wrong}.") or wrong.startswith(f"{key}.")
