"""Casting what goes into forward, and taking batches apart."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch


def cast_floating(value: Any, to: torch.dtype, only: torch.dtype | None = None) -> Any:
    """`value` with its floating-point tensors as dtype `to` (only those of dtype `only`, when given)."""
    if isinstance(value, torch.Tensor):
        fits = value.is_floating_point() if only is None else value.dtype == only
        return value.to(to) if fits else value
    if isinstance(value, Mapping):
        return type(value)({key: cast_floating(item, to, only) for key, item in value.items()})  # type: ignore[call-arg]
    if isinstance(value, tuple) and hasattr(value, "_fields"):
        return type(value)(*(cast_floating(item, to, only) for item in value))
    if isinstance(value, (list, tuple)):
        return type(value)(cast_floating(item, to, only) for item in value)
    return value


def to_device(value: Any, device: torch.device) -> Any:
    """`value` with its tensors on `device`."""
    if isinstance(value, torch.Tensor):
        return value.to(device, non_blocking=True)
    if isinstance(value, Mapping):
        return {key: to_device(item, device) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        return type(value)(to_device(item, device) for item in value)
    return value


def as_arguments(batch: Any) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """How a loader's batch is passed to forward: a mapping as keywords, a tuple or list as positions, else alone."""
    if isinstance(batch, Mapping):
        return (), dict(batch)
    if isinstance(batch, (list, tuple)):
        return tuple(batch), {}
    return (batch,), {}


def loss_of(output: Any) -> torch.Tensor:
    """The loss in a module's output: the output itself, its `loss`, or its first member. Raises TypeError."""
    if isinstance(output, torch.Tensor):
        return output
    if isinstance(output, Mapping) and "loss" in output:
        return torch.as_tensor(output["loss"])
    loss = getattr(output, "loss", None)
    if isinstance(loss, torch.Tensor):
        return loss
    if isinstance(output, (list, tuple)) and output and isinstance(output[0], torch.Tensor):
        return output[0]
    raise TypeError(
        f"train_batch needs a module that returns its loss (a scalar tensor, an object with .loss, or a tuple that "
        f"starts with it); it returned {type(output).__name__}"
    )
