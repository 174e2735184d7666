"""Saved-tensor hooks that stand on top of others: what they leave alone goes to those below."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple, cast

import torch
from torch import nn

from fullspeed.base.errors import UsageError


class Hooks(NamedTuple):
    """A pair as `torch.autograd.graph.saved_tensors_hooks` takes it."""

    pack: Callable[[torch.Tensor], Any]
    unpack: Callable[[Any], torch.Tensor]


def top_hooks() -> Hooks | None:
    """The hooks that hear of saved tensors now: autograd calls only the pair installed last."""
    top = torch._C._autograd._top_saved_tensors_default_hooks(True)
    return None if top is None else Hooks(*cast(tuple[Any, Any], top))


class PassedOn:
    """A saved tensor that the top hooks leave to those below, or to nobody: then it is kept as it is.

    Autograd does not check hooked tensors for changes in place, so the latter are checked here.
    """

    __slots__ = ("_below", "_packed", "_version")

    def __init__(self, tensor: torch.Tensor, below: Hooks | None) -> None:
        self._below = below
        self._version = tensor._version
        self._packed = tensor if below is None else below.pack(tensor)

    def unpack(self) -> torch.Tensor:
        """The tensor. Raises UsageError when its values are no longer those of the forward."""
        if self._below is not None:
            return self._below.unpack(self._packed)
        tensor = cast(torch.Tensor, self._packed)
        if tensor._version != self._version:
            raise UsageError(
                f"a tensor of shape {tuple(tensor.shape)} that backward needs was changed in place after the forward "
                f"(version {tensor._version}, saved at {self._version}); change a copy, or run backward first"
            )
        return tensor


def is_parameter(tensor: torch.Tensor) -> bool:
    """Whether this is a parameter or a view of one."""
    return isinstance(tensor, nn.Parameter) or isinstance(tensor._base, nn.Parameter)


def is_activation(tensor: torch.Tensor) -> bool:
    """Whether this is a plain, dense floating-point tensor, and neither a parameter nor a view of one."""
    is_plain = type(tensor) is torch.Tensor and tensor.layout == torch.strided
    return is_plain and tensor.is_floating_point() and not is_parameter(tensor)


def in_backward() -> bool:
    """Whether a backward is running in this thread."""
    return torch._C._current_graph_task_id() != -1
