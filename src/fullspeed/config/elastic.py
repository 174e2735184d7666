"""Elastic batch arithmetic: one global batch that many numbers of devices can share out. Pure integers.

A job that may run on 32 or on 48 devices keeps its results only if samples per update stay the same on both. The batch
is therefore chosen once, so that as many device counts as possible divide it, and a world size only decides how it is
cut into micro-batches and accumulation steps.
"""

from __future__ import annotations

import json
import math
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

from fullspeed.base import env
from fullspeed.base.errors import ConfigError, ConfigFault
from fullspeed.config.batch import Batch
from fullspeed.config.profiling import Elasticity

SCHEDULER_COPY = "DEEPSPEED_ELASTICITY_CONFIG"
_NUM_SHOWN = 8  # valid sizes named in an error

# Numbers with more divisors than any smaller one (OEIS A002182): multiples that many device counts divide.
_HIGHLY_COMPOSITE = (
    1, 2, 4, 6, 12, 24, 36, 48, 60, 120, 180, 240, 360, 720, 840, 1260, 1680, 2520, 5040, 7560, 10080, 15120, 20160,
    25200, 27720, 45360, 50400, 55440, 83160, 110880, 166320, 221760, 277200, 332640, 498960, 554400, 665280, 720720,
)  # fmt: skip


class ElasticityError(ConfigError):
    """The elastic batch cannot be had as configured."""


class ElasticityConfigError(ElasticityError):
    """The `elasticity` section is wrong, or something beside it contradicts it."""


class ElasticityIncompatibleWorldSize(ElasticityError):  # noqa: N818, the name user code catches
    """The batch cannot be shared out among this number of devices."""


class ElasticPlan(NamedTuple):
    """A global batch and the numbers of devices that can share it."""

    batch: int  # samples per update
    valid_gpus: tuple[int, ...]  # rising, model-parallel devices counted in


def plan_elastic(section: Elasticity) -> ElasticPlan:
    """The batch that most device counts can share.

    Candidates are each micro-batch size, and their least common multiple, times the largest highly composite number
    that keeps within `max_train_batch_size`. Version 0.2 does the same for whole nodes.

    Raises:
        ElasticityConfigError: the section's values do not fit together; the text names all faults.
    """
    _check(section)
    if section.version == 0.1:
        return _best(section, section.max_train_batch_size, section.min_gpus, section.max_gpus)
    per_node = section.num_gpus_per_node
    dp_per_node = per_node // section.model_parallel_size
    min_nodes, max_nodes = -(-section.min_gpus // per_node), section.max_gpus // per_node
    nodes = _best(section, section.max_train_batch_size // dp_per_node, min_nodes, max_nodes)
    return ElasticPlan(nodes.batch * dp_per_node, tuple(count * per_node for count in nodes.valid_gpus))


def elastic_batch(section: Elasticity, dp_world_size: int) -> Batch:
    """How the planned batch is cut on `dp_world_size` data-parallel ranks: the largest micro-batch that fits.

    Raises:
        ElasticityConfigError: see `plan_elastic`.
        ElasticityIncompatibleWorldSize: this world is none of the valid ones; the text names near ones.
    """
    plan = plan_elastic(section)
    num_gpus = dp_world_size * section.model_parallel_size
    if num_gpus not in plan.valid_gpus:
        near = sorted(plan.valid_gpus, key=lambda count: abs(count - num_gpus))[:_NUM_SHOWN]
        rule = f"a batch of {plan.batch} cannot be shared out as configured; valid near it: {sorted(near)}"
        raise ElasticityIncompatibleWorldSize(
            [ConfigFault("number of devices", num_gpus, rule, "start another number, or change the elasticity section")]
        )
    per_rank = plan.batch // dp_world_size
    micro = max(size for size in section.micro_batch_sizes if per_rank % size == 0)
    return Batch(plan.batch, micro, per_rank // micro, dp_world_size)


def check_scheduler_copy(section: Elasticity) -> None:
    """Compare with what the scheduler was told: it starts sizes that suit its copy, in DEEPSPEED_ELASTICITY_CONFIG.

    Raises:
        ElasticityConfigError: the two differ.
    """
    text = env.get(SCHEDULER_COPY)
    if text is None:
        return
    try:
        copy = dict(json.loads(text))
    except ValueError as error:
        raise ElasticityConfigError(
            [ConfigFault(SCHEDULER_COPY, text, f"no elasticity section: {error}", "set it to the section as JSON")]
        ) from error
    own = section.model_dump(mode="json")
    faults = [
        ConfigFault(f"elasticity.{name}", own[name], f"the scheduler's copy has {copy[name]!r}",
                    f"give both the same, in the configuration and in {SCHEDULER_COPY}")
        for name in ("max_train_batch_size", "micro_batch_sizes", "version")
        if name in copy and own[name] != copy[name]
    ]  # fmt: skip
    if faults:
        raise ElasticityConfigError(faults)


def _best(section: Elasticity, max_batch: int, min_count: int, max_count: int) -> ElasticPlan:
    """Of all candidate batches the one with most valid counts; among equals the preferred size."""
    sizes = section.micro_batch_sizes
    bases = [base for base in {*sizes, math.lcm(*sizes)} if base <= max_batch]
    batches = [base * max(number for number in _HIGHLY_COMPOSITE if number * base <= max_batch) for base in bases]
    plans = [ElasticPlan(batch, _valid_counts(batch, sizes, min_count, max_count)) for batch in sorted(set(batches))]
    plans = [plan for plan in plans if plan.valid_gpus]
    if not plans:
        rule = f"no number of devices from {section.min_gpus} to {section.max_gpus} can share a batch of at most this"
        raise ElasticityConfigError(
            [ConfigFault("elasticity.max_train_batch_size", section.max_train_batch_size, rule,
                         "raise it, or widen min_gpus and max_gpus, or add smaller micro_batch_sizes")]
        )  # fmt: skip
    sign = 1 if section.prefer_larger_batch else -1
    return max(plans, key=lambda plan: (len(plan.valid_gpus), sign * plan.batch))


def _valid_counts(batch: int, sizes: Sequence[int], min_count: int, max_count: int) -> tuple[int, ...]:
    """Counts whose share of the batch is a multiple of some micro-batch size."""
    most = [batch // size for size in sizes if batch % size == 0]
    counts = range(max(1, min_count), min(max(most, default=0), max_count) + 1)
    return tuple(count for count in counts if any(number % count == 0 for number in most))


def _check(section: Elasticity) -> None:
    """Raise ElasticityConfigError with everything that is wrong within the section."""
    path, faults = "elasticity.{}", []
    for name in ("max_train_batch_size", "micro_batch_sizes"):
        if name not in section.model_fields_set:
            faults.append(ConfigFault(path.format(name), None, "elasticity needs it", "say what suits your training"))
    for size in section.micro_batch_sizes:
        if size > section.max_train_batch_size:
            rule = f"{size} is above max_train_batch_size {section.max_train_batch_size}"
            faults.append(ConfigFault(path.format("micro_batch_sizes"), section.micro_batch_sizes, rule, "remove it"))
    if not section.micro_batch_sizes:
        faults.append(ConfigFault(path.format("micro_batch_sizes"), (), "there must be at least one", "give one"))
    if section.min_gpus > section.max_gpus:
        faults.append(ConfigFault(path.format("min_gpus"), section.min_gpus, f"is above max_gpus {section.max_gpus}"))
    mp = section.model_parallel_size
    if section.version == 0.1 and mp > 1:
        faults.append(ConfigFault(path.format("model_parallel_size"), mp, "is for version 0.2", "set version to 0.2"))
    if section.version != 0.1 and section.num_gpus_per_node % mp:
        rule = f"must divide num_gpus_per_node {section.num_gpus_per_node}"
        faults.append(ConfigFault(path.format("model_parallel_size"), mp, rule, "set both to what a node has"))
    if faults:
        raise ElasticityConfigError(faults)


def is_enabled(ds_config: Mapping[str, Any]) -> bool:
    """Whether a configuration, not yet read, asks for elasticity."""
    return bool(ds_config.get("elasticity", {}).get("enabled", False))
