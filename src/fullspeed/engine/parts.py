"""The engine's optimizer and schedule: the caller's, or the ones the configuration names."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import nn
from torch.optim import Optimizer

from fullspeed.base.errors import ConfigError, ConfigFault, UsageError
from fullspeed.config import Config, require_resolved
from fullspeed.optim.factory import is_shardable, make_optimizer
from fullspeed.optim.muon import flag_muon_params
from fullspeed.optim.scheduler import make_scheduler
from fullspeed.sharding import placeholder
from fullspeed.sharding.optimizer import ShardedOptimizer
from fullspeed.sharding.placement import placement_of

ClientOptimizer = Optimizer | Callable[[list[Any]], Optimizer] | None


@torch.no_grad()
def move_to(model: nn.Module, device: torch.device) -> None:
    """Put the model's parameters and buffers on `device`; sharded parameters stay where they are.

    Raises:
        UsageError: a buffer is on the meta device. (Parameters there are refused with all others that do not fit.)
    """
    for prefix, module in model.named_modules():
        for param in module.parameters(recurse=False):
            if not placeholder.is_adopted(param) and not param.is_meta and param.device != device:
                param.data = param.to(device)
        for name, buffer in module.named_buffers(recurse=False):
            if buffer.is_meta:
                raise UsageError(
                    f"buffer {prefix}{'.' if prefix else ''}{name} is on the meta device, where it has lost the "
                    f"values its module gave it; give it memory and values before initialize, or use zero.Init"
                )
            module._buffers[name] = buffer.to(device)


def build_optimizer(
    model: nn.Module, config: Config, client: ClientOptimizer, model_parameters: Iterable[Any] | None
) -> Optimizer | None:
    """A torch optimizer over whole parameters, before anything is sharded; None for an engine that only evaluates.

    Raises:
        ConfigError: the named optimizer, or the combination with ZeRO, is not possible.
        UsageError: the optimizer holds tensors that are no parameters of the model, or holds one twice.
    """
    if isinstance(client, Optimizer):
        optimizer: Optimizer | None = client
    elif client is None and config.optimizer is None:
        return None
    else:
        groups = _param_groups(model, model_parameters)
        if not groups:
            return None
        optimizer = client(groups) if client is not None else _named_optimizer(model, config, groups)
    assert optimizer is not None
    _check_membership(model, optimizer)
    _check_shardable(optimizer, config)
    return optimizer


def _param_groups(model: nn.Module, given: Iterable[Any] | None) -> list[Any]:
    if given is None:
        return [param for param in model.parameters() if param.requires_grad]
    groups = list(given)
    for group in groups:
        if isinstance(group, dict):
            members = group["params"]
            group["params"] = [members] if isinstance(members, nn.Parameter) else list(members)
    return groups


def _named_optimizer(model: nn.Module, config: Config, groups: list[Any]) -> Optimizer:
    assert config.optimizer is not None
    require_resolved(config, "optimizer")
    if config.optimizer.type.lower() == "muon":
        flag_muon_params(model.named_parameters())
    return make_optimizer(config.optimizer.type, config.optimizer.params, groups)


def _check_membership(model: nn.Module, optimizer: Optimizer) -> None:
    members = set(model.parameters())
    seen: set[nn.Parameter] = set()
    for index, group in enumerate(optimizer.param_groups):
        for param in group["params"]:
            if param not in members:
                raise UsageError(
                    f"param group {index} of the optimizer holds a tensor of shape {tuple(param.shape)} that is no "
                    f"parameter of the model; build the optimizer from model.parameters() after every change of the "
                    f"model, or pass a callable"
                )
            if param in seen:
                raise UsageError(f"param group {index} of the optimizer repeats a parameter of another group")
            seen.add(param)


def _check_shardable(optimizer: Optimizer, config: Config) -> None:
    is_sharded = placement_of(config.zero_optimization.stage).optim
    if is_sharded and not is_shardable(optimizer) and not config.zero_allow_untested_optimizer:
        raise ConfigError(
            [
                ConfigFault(
                    "zero_allow_untested_optimizer",
                    False,
                    f"{type(optimizer).__name__} is not known to update each element by itself, which stepping over "
                    f"shards needs",
                    "set the key to true if it does, or use stage 0",
                )
            ]
        )


def build_scheduler(config: Config, client: Any, optimizer: ShardedOptimizer | None) -> Any:
    """The learning-rate schedule: the caller's object, the one its callable makes, the configured one, or None."""
    if client is not None:
        is_factory = callable(client) and not hasattr(client, "step")
        return client(optimizer) if is_factory else client
    if config.scheduler is None:
        return None
    if optimizer is None:
        raise UsageError("the configuration names a scheduler but there is no optimizer for it to steer")
    require_resolved(config, "scheduler")
    return make_scheduler(config.scheduler.type, config.scheduler.params, optimizer)
