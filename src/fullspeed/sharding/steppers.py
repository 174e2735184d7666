"""Which `Stepper` carries out the updates of a configuration."""

from __future__ import annotations

from collections.abc import Sized
from typing import Any

import torch

from fullspeed.base.errors import ConfigError, ConfigFault
from fullspeed.config.sharding import ZenFlow, ZeroOptimization
from fullspeed.sharding.apart import require_elementwise
from fullspeed.sharding.columns import Rhythm
from fullspeed.sharding.optimizer import ShardedOptimizer
from fullspeed.sharding.speculative import SpeculativeStepper
from fullspeed.sharding.stepping import Stepper
from fullspeed.sharding.worker import BackgroundWorker
from fullspeed.sharding.zenflow import SelectivePolicy, ZenFlowStepper

_ZENFLOW = "zero_optimization.zenflow"
_SUPER_OFFLOAD = "zero_optimization.offload_optimizer.super_offload"


def updates_per_epoch(training_data: Any, train_batch_size: int) -> int | None:
    """Updates in which the data set is seen once; None if it has no length."""
    return max(1, len(training_data) // train_batch_size) if isinstance(training_data, Sized) else None


def choose_stepper(zero: ZeroOptimization, optimizer: ShardedOptimizer, epoch_updates: int | None) -> Stepper:
    """The stepper the section asks for, else the optimizer's own. Collective.

    Args:
        zero: the `zero_optimization` section.
        optimizer: to be stepped.
        epoch_updates: updates in an epoch, where that is known.

    Raises:
        ConfigError: it does not go with this optimizer, or needs to know how long an epoch is.
    """
    offload, zenflow = zero.offload_optimizer, zero.zenflow
    if zenflow is not None:
        return _zenflow_stepper(zenflow, optimizer, epoch_updates)
    if offload is not None and offload.super_offload:
        require_elementwise(optimizer.optimizer, _SUPER_OFFLOAD)
        return SpeculativeStepper(
            optimizer.optimizer,
            optimizer.runtime,
            optimizer.owned,
            optimizer.policy.sub_group_numel,
            lambda: optimizer.loss_scale,
            BackgroundWorker(_share_of_threads(offload.cpuadam_cores_perc), optimizer.dp_group),
        )
    return optimizer.stepper


def _zenflow_stepper(section: ZenFlow, optimizer: ShardedOptimizer, epoch_updates: int | None) -> Stepper:
    require_elementwise(optimizer.optimizer, _ZENFLOW)
    rhythm = Rhythm(
        select_every=_select_every(section, epoch_updates),
        update_every=None if section.update_interval == "auto" else section.update_interval,
        auto_ratio=section.auto_ratio,
        warm_up=section.full_warm_up_rounds,
    )
    if section.topk_ratio == 1.0 or rhythm.update_every == 1:
        return optimizer.stepper  # nothing would ever wait
    return ZenFlowStepper(
        optimizer.optimizer,
        optimizer.runtime,
        optimizer.owned,
        SelectivePolicy(section.topk_ratio, section.overlap_step, optimizer.policy.sub_group_numel),
        rhythm,
        BackgroundWorker(_share_of_threads(1.0 - section.pt_reserved_cores_perc), optimizer.dp_group),
        optimizer.dp_group,
    )


def _select_every(section: ZenFlow, epoch_updates: int | None) -> int:
    """Updates from one choice of columns to the next. `auto` is once an epoch."""
    interval = section.select_interval
    if section.select_strategy == "step" and interval != "auto":
        return interval
    epoch = section.steps_per_epoch or epoch_updates
    if epoch is None:
        rule = "is counted in epochs, and how long one is is not known without training_data"
        fix = f"set {_ZENFLOW}.steps_per_epoch, or select_strategy: step with a select_interval"
        raise ConfigError([ConfigFault(f"{_ZENFLOW}.select_interval", interval, rule, fix)])
    return epoch if interval == "auto" else interval * epoch


def _share_of_threads(share: float) -> int:
    return max(1, int(share * torch.get_num_threads()))
