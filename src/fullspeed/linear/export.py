"""A model's weights without adapters and codes, for libraries that know neither."""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import nn

from fullspeed.linear.layers import FrozenBase
from fullspeed.sharding.gathered import GatheredParameters


def merged_state_dict(model: nn.Module) -> dict[str, torch.Tensor]:
    """The state dict of the same model with ordinary linear layers: adapters added to their bases, codes read.

    Whole tensors on the CPU, on every rank. Collective where an engine runs the model; what it shards is gathered
    module by module. Tied parameters are one tensor under each of their names.
    """
    found: dict[str, torch.Tensor] = {}
    copies: dict[torch.Tensor, torch.Tensor] = {}
    for prefix, module in _outside_layers(model, ""):
        params = module.parameters() if isinstance(module, FrozenBase) else module.parameters(recurse=False)
        with GatheredParameters(list(params)):
            for name, tensor in _own_state(module):
                if tensor not in copies:
                    copies[tensor] = _ordinary(module, name, tensor).to("cpu", copy=True)
                found[prefix + name] = copies[tensor]
    return found


def _outside_layers(module: nn.Module, prefix: str) -> Iterator[tuple[str, nn.Module]]:
    """A module and those inside it, but for the adapters inside optimized layers."""
    yield prefix, module
    if not isinstance(module, FrozenBase):
        for name, child in module.named_children():
            yield from _outside_layers(child, f"{prefix}{name}.")


def _own_state(module: nn.Module) -> Iterator[tuple[str, torch.Tensor]]:
    yield from module.named_parameters(recurse=False)
    for name, buffer in module.named_buffers(recurse=False):
        if name not in module._non_persistent_buffers_set:
            yield name, buffer


def _ordinary(module: nn.Module, name: str, tensor: torch.Tensor) -> torch.Tensor:
    if isinstance(module, FrozenBase) and name == "weight":
        return module.merged_weight()
    return tensor.detach()
