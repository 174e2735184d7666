"""The elastic batch for schedulers and scripts: which numbers of devices a configuration can run on, and how."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from packaging.version import InvalidVersion, Version

from fullspeed.base import env
from fullspeed.base.errors import ConfigError, ConfigFault
from fullspeed.config import load_config
from fullspeed.config.elastic import (
    ElasticityConfigError,
    ElasticityError,
    ElasticityIncompatibleWorldSize,
    check_scheduler_copy,
    elastic_batch,
    is_enabled,
    plan_elastic,
)
from fullspeed.config.profiling import Elasticity

__all__ = [
    "ElasticityConfigError",
    "ElasticityError",
    "ElasticityIncompatibleWorldSize",
    "compute_elastic_config",
    "elasticity_enabled",
    "ensure_immutable_elastic_config",
]

FIRST_ELASTIC_VERSION = Version("0.3.8")


def compute_elastic_config(
    ds_config: Mapping[str, Any],
    target_deepspeed_version: str,
    world_size: int = 0,
    return_microbatch: bool = False,
) -> tuple[int, list[int]] | tuple[int, list[int], int]:
    """The global batch of an elastic configuration and the device counts it can run on.

    Args:
        ds_config: a configuration with an enabled `elasticity` section.
        target_deepspeed_version: version the job was written for; elasticity came with 0.3.8.
        world_size: devices the job is to run on; 0 for not known yet.
        return_microbatch: return the micro-batch size too; without `world_size`, WORLD_SIZE says for how many devices.

    Returns:
        (batch, valid device counts), and the micro-batch size if asked for.

    Raises:
        ElasticityConfigError: the section is missing, off or wrong, or no world size is known for the micro-batch.
        ElasticityIncompatibleWorldSize: the batch cannot be shared out on `world_size` devices.
        ElasticityError: the target version has no elasticity.
    """
    _check_version(target_deepspeed_version)
    section = _read(ds_config)
    plan = plan_elastic(section)
    if world_size == 0 and return_microbatch:
        world_size = _world_from_environment()
    if world_size == 0:
        return plan.batch, list(plan.valid_gpus)
    micro = elastic_batch(section, _dp_size(section, world_size)).micro_batch_size
    return (plan.batch, list(plan.valid_gpus), micro) if return_microbatch else (plan.batch, list(plan.valid_gpus))


def elasticity_enabled(ds_config: Mapping[str, Any]) -> bool:
    """Whether the configuration asks for an elastic batch."""
    return is_enabled(ds_config)


def ensure_immutable_elastic_config(runtime_elastic_config_dict: Mapping[str, Any]) -> None:
    """Raise ElasticityConfigError if the scheduler's copy of the section, in the environment, says something else."""
    check_scheduler_copy(_read({"elasticity": {"enabled": True, **runtime_elastic_config_dict}}))


def _read(ds_config: Mapping[str, Any]) -> Elasticity:
    if not is_enabled(ds_config):
        raise ElasticityConfigError(
            [ConfigFault("elasticity.enabled", False, "there is no elastic batch", "add the section, enabled: true")]
        )
    try:
        return load_config(ds_config, check_supported=False).elasticity
    except ConfigError as error:
        raise ElasticityConfigError(error.faults) from error


def _dp_size(section: Elasticity, num_gpus: int) -> int:
    """Data-parallel ranks of that many devices."""
    mp = section.model_parallel_size
    if num_gpus % mp:
        raise ElasticityIncompatibleWorldSize(
            [ConfigFault("number of devices", num_gpus, f"is no multiple of model_parallel_size {mp}", "use one")]
        )
    return num_gpus // mp


def _world_from_environment() -> int:
    world_size = env.get_int("WORLD_SIZE")
    if world_size is None or world_size < 1:
        raise ElasticityConfigError(
            [ConfigFault("world_size", world_size or 0, "the micro-batch size depends on it",
                         "pass world_size, or set the variable WORLD_SIZE")]
        )  # fmt: skip
    return world_size


def _check_version(text: str) -> None:
    try:
        if Version(text) >= FIRST_ELASTIC_VERSION:
            return
    except InvalidVersion:
        pass
    rule = f"elasticity needs {FIRST_ELASTIC_VERSION} or later"
    raise ElasticityError([ConfigFault("target_deepspeed_version", text, rule, "name the version you use")])
