"""Small functions and classes about tensors and parameters that programs import from DeepSpeed."""

from __future__ import annotations

import contextlib
import math
import pathlib
from collections.abc import Callable, Iterable, Sequence
from typing import Any, TypeVar

import torch
from torch import nn

from fullspeed.accelerator import get_accelerator
from fullspeed.base.errors import UsageError
from fullspeed.comm import ReduceOp, all_reduce, get_world_group, is_initialized
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


def call_to_str(base: str, *args: Any, **kwargs: Any) -> str:
    """How a call of `base` with these arguments is written.

    >>> call_to_str("step", 1, lr=0.1)
    'step(1, lr=0.1)'
    """
    words = [*map(repr, args), *(f"{name}={value!r}" for name, value in kwargs.items())]
    return f"{base}({', '.join(words)})"


class DummyOptim:
    """Holds parameters as one param group; steps nothing."""

    def __init__(self, params: Iterable[nn.Parameter]) -> None:
        self.param_groups = [{"params": list(params)}]


class CheckOverflow:
    """Asks all ranks whether any of them has an inf or nan.

    Args:
        param_groups: lists of parameters whose gradients `has_overflow` looks at when it is given none.
        mpu: its `get_model_parallel_group()` names the ranks asked; all, without one.
    """

    def __init__(
        self,
        param_groups: Iterable[Iterable[nn.Parameter]] | None = None,
        mpu: Any = None,
        zero_reduce_scatter: bool = False,
        deepspeed: Any = None,
    ) -> None:
        del zero_reduce_scatter, deepspeed
        self.params = [param for group in param_groups or () for param in group]
        self._group = None if mpu is None else mpu.get_model_parallel_group()

    def check_using_norm(self, norm_group: Iterable[float], reduce_overflow: bool = True) -> bool:
        """Whether one of the norms is no number, or -1 as norms of overflowed gradients may be given."""
        found = any(not math.isfinite(float(norm)) or float(norm) == -1 for norm in norm_group)
        return self._on_any_rank(found) if reduce_overflow or self._group is not None else found

    def check(self, param_groups: Iterable[Iterable[nn.Parameter]] | None = None) -> bool:
        """Whether a gradient of these parameters, or of those given at first, is not finite on any rank. Collective."""
        params = self.params if param_groups is None else [param for group in param_groups for param in group]
        return self.has_overflow(params)

    def has_overflow(self, params: Iterable[nn.Parameter]) -> bool:
        """Whether `param.grad` of one of them is not finite on any rank. Collective."""
        grads = (param.grad for param in params if param.grad is not None)
        return self._on_any_rank(any(not bool(torch.isfinite(grad).all()) for grad in grads))

    def _on_any_rank(self, found: bool) -> bool:
        if not is_initialized():
            return found
        flag = torch.tensor(float(found), device=get_accelerator().current_device_name())
        return bool(all_reduce(flag, ReduceOp.MAX, self._group or get_world_group()))
