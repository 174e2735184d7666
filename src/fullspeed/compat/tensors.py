"""Small functions on tensors and parameters that programs import from DeepSpeed."""

from __future__ import annotations

import contextlib
import math
import pathlib
from collections.abc import Callable, Iterable, Sequence
from typing import Any, TypeVar

import torch
from torch import nn

from fullspeed.base.errors import UsageError
from fullspeed.comm import ReduceOp, all_reduce
from fullspeed.sharding.access import safe_get_full_grad, safe_set_full_grad

T = TypeVar("T")
noop_context = contextlib.nullcontext


def map_tensors(value: Any, change: Callable[[torch.Tensor], torch.Tensor]) -> Any:
    """`value` with every tensor in its lists, tuples and mappings changed; containers are copied."""
    if isinstance(value, torch.Tensor):
        return change(value)
    if isinstance(value, dict):
        mapped = {key: map_tensors(item, change) for key, item in value.items()}
        return mapped if type(value) is dict else type(value)(mapped)
    if isinstance(value, tuple) and hasattr(value, "_fields"):
        return type(value)(*(map_tensors(item, change) for item in value))
    if isinstance(value, (list, tuple)):
        return type(value)(map_tensors(item, change) for item in value)
    return value


def clone_tensors_for_torch_save(item: Any, device: torch.device | str = "cpu") -> Any:
    """A copy of nested containers whose tensors own no more memory than they need, on `device`.

    torch.save writes the whole storage of a tensor, which for a parameter is the flat buffer of its group.
    """
    return map_tensors(item, lambda tensor: tensor.detach().to(device, copy=True))


def move_to_device(
    item: Any, device: torch.device | str, criterion_func: Callable[[torch.Tensor], bool] | None = None
) -> Any:
    """Nested containers with their tensors, or those for which `criterion_func` is true, on `device`."""
    return map_tensors(
        item, lambda tensor: tensor.to(device) if criterion_func is None or criterion_func(tensor) else tensor
    )


def get_global_norm(norm_list: Iterable[float]) -> float:
    """The L2 norm of a vector whose parts have these L2 norms."""
    return math.sqrt(sum(float(norm) ** 2 for norm in norm_list))


@torch.no_grad()
def clip_grad_norm_(
    parameters: Iterable[torch.Tensor] | torch.Tensor, max_norm: float, norm_type: float = 2, mpu: Any = None
) -> torch.Tensor:
    """Scale gradients down to a global norm; returns what it was before.

    `mpu.get_model_parallel_group()` names the ranks whose norms add up. Gradients of an engine are not in `param.grad`:
    there, set `gradient_clipping` in the configuration.
    """
    params = [parameters] if isinstance(parameters, torch.Tensor) else list(parameters)
    grads = [param.grad for param in params if param.grad is not None]
    total = torch.nn.utils.get_total_norm(grads, norm_type)
    if mpu is not None:
        group = mpu.get_model_parallel_group()
        if math.isinf(norm_type):
            all_reduce(total, ReduceOp.MAX, group)
        else:
            total = all_reduce(total**norm_type, ReduceOp.SUM, group) ** (1 / norm_type)
    torch.nn.utils.clip_grads_with_norm_(params, max_norm, total)
    return total


def safe_update_full_grad_vectorized(
    param_list: Sequence[nn.Parameter], update_func: Callable[[torch.Tensor, nn.Parameter], torch.Tensor]
) -> None:
    """Replace the whole gradient g of each parameter p by `update_func(g, p)`. Collective."""
    for param in param_list:
        grad = safe_get_full_grad(param)
        if grad is not None:
            safe_set_full_grad(param, update_func(grad, param))


def set_random_seed(seed: int) -> None:
    """Seed Python's, NumPy's and torch's generators."""
    import random

    import numpy as np

    random.seed(seed)
    np.random.seed(seed % 2**32)
    torch.manual_seed(seed)


def ensure_directory_exists(filename: str) -> None:
    """Make the folder a file is to be written to."""
    pathlib.Path(filename).parent.mkdir(parents=True, exist_ok=True)


def get_only_unique_item(items: Iterable[T]) -> T:
    """The one value that all items have. Raises UsageError when there are more, or none."""
    found = set(items)
    if len(found) != 1:
        raise UsageError(f"expected one value, got {len(found)}: {sorted(map(repr, found))}")
    return found.pop()


def noop_decorator(func: T) -> T:
    """`func` itself."""
    return func
