"""Which parts of the configuration this version cannot carry out: they are errors, never ignored."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

from fullspeed.base.errors import ConfigError, ConfigFault
from fullspeed.config.root import Config
from fullspeed.config.section import Section

RULE = "not available in this version of FullSpeed"
REMOVE = "remove the block or set enabled: false"
REMOVE_KEY = "remove the key"


class Missing(NamedTuple):
    """A feature that is not built: the key that asks for it and when it does."""

    path: str
    is_asked: Callable[[Any], bool]  # given the value at the path
    fix: str = REMOVE_KEY


def _is_on(value: object) -> bool:
    return bool(value)


def _is_given(value: object) -> bool:
    return value is not None


def _is_above_one(value: int | None) -> bool:
    return value is not None and value > 1


def _differs(section: Any) -> bool:
    """Whether a section says anything but its defaults."""
    return bool(section != type(section)())


TECHNIQUES = (
    "weight_quantization", "activation_quantization", "sparse_pruning", "row_pruning", "head_pruning",
    "channel_pruning",
)  # fmt: skip

ENABLED = (
    "amp", "hybrid_engine", "nebula", "autotuning", "curriculum_learning", "data_efficiency",
    "progressive_layer_drop", "eigenvalue", "quantize_training", "quantize_training.eigenvalue", "expert_parallel",
    *(f"compression_training.{technique}.shared_parameters" for technique in TECHNIQUES),
    "compression_training.layer_reduction",
)  # fmt: skip
"""Blocks that ask for something when they say `enabled: true`."""

UNBUILT_OPTIMIZERS = (
    "onebitadam", "onebitlamb", "zerooneadam", "muadam", "muadamw", "musgd", "Adafactor", "LBFGS",
    "SparseAdam",
)  # fmt: skip
"""Optimizers that do not work element by element on shards, or need another library."""


MISSING: tuple[Missing, ...] = (
    *(Missing(f"{block}.enabled", _is_on, REMOVE) for block in ENABLED),
    Missing("optimizer.name", lambda name: name in UNBUILT_OPTIMIZERS, "choose another optimizer"),
    Missing("fp16.fp16_master_weights_and_grads", _is_on),
    Missing("bf16.bf16_master_weights_and_grads", _is_on),
    Missing("bf16.bf16_optimizer_states", _is_on),
    Missing("sparse_gradients", _is_on),
    Missing("graph_harvesting", _is_on),
    Missing("sparse_attention", _is_given, REMOVE),
    Missing("weight_quantization", _is_given, REMOVE),
    Missing("pipeline", _differs, "remove the block"),
    Missing("tensor_parallel", _differs, "remove the block"),
    Missing("sequence_parallel_size", _is_above_one),
    Missing("data_parallel_size", _is_given),
    Missing("use_data_before_expert_parallelism", _is_on),
    Missing("checkpoint.parallel_write.pipeline_stage", _is_on),
    Missing("checkpoint.checkpoint_serialization", lambda value: not value),
    Missing("checkpoint.writer.type", lambda kind: kind == "mock", "choose python or fast"),
    Missing("compile.deepcompile", _is_on),
    Missing("compile.passes", _is_given),
    Missing("compile.autoep_non_moe", _is_on),
    Missing("zero_optimization.elastic_checkpoint", _is_on),
    Missing("zero_optimization.enable_sanity_checks", _is_on),
    Missing("zero_optimization.weight_quantization", _is_given, REMOVE),
)


def value_at(config: Config, path: str) -> Any:
    """The value at a dotted path, or None when a block on the way is absent."""
    value: Any = config
    for key in path.split("."):
        if value is None:
            return None
        value = getattr(value, key)
    return value


def shown_value(config: Config, path: str) -> Any:
    """The value at a dotted path as the user wrote it, for error texts."""
    value = value_at(config, path)
    return value.model_dump(exclude_unset=True) if isinstance(value, Section) else value


def unsupported(config: Config) -> list[ConfigFault]:
    """A fault for each feature that `config` asks for and this version lacks."""
    return [
        ConfigFault(path.replace("optimizer.name", "optimizer.type"), shown_value(config, path), RULE, fix)
        for path, is_asked, fix in MISSING
        if is_asked(value_at(config, path))
    ]


def check_offload(config: Config, device_type: str) -> None:
    """Raise ConfigError when the configuration offloads from a device to host memory.

    Where the model computes on the CPU, parameters and optimizer states are in host memory already: the blocks then ask
    for what is so.
    """
    faults = [
        ConfigFault(path, shown_value(config, path), f"{RULE} on {device_type}", "remove the block")
        for path in ("zero_optimization.offload_param", "zero_optimization.offload_optimizer")
        if device_type != "cpu" and value_at(config, path) is not None
    ]
    if faults:
        raise ConfigError(faults)


def check_supported(config: Config) -> None:
    """Raise ConfigError when `config` asks for features that this version lacks, naming each."""
    faults = unsupported(config)
    if faults:
        raise ConfigError(faults)
