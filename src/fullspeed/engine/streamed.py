"""A module's state dict on its way into one safetensors file, a group of parameters at a time."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any, NamedTuple

import torch
from torch import nn

from fullspeed.base.errors import UsageError
from fullspeed.checkpoint.export import WeightSpec
from fullspeed.checkpoint.tensor_file import bytes_of, plan_file
from fullspeed.sharding import placeholder
from fullspeed.sharding.group import FlatGroup
from fullspeed.sharding.runtime import ShardingRuntime


class StreamedState:
    """The tensors of a state dict, in the order of the file: wider elements first, then as groups are gathered.

    Tied parameters come under each of their names, so that a strict load finds all of them. What is no tensor is left
    out: the format has no place for it.

    Args:
        runtime: holds the module's parameters.
        state: what `module.state_dict(keep_vars=True)` gives, or a part of it.
    """

    def __init__(self, runtime: ShardingRuntime, state: Mapping[str, Any]) -> None:
        self._names: dict[nn.Parameter, list[str]] = {}  # of what the runtime holds
        others: list[_Other] = []
        for name, value in state.items():
            if isinstance(value, nn.Parameter) and value in runtime.slot_of:
                self._names.setdefault(value, []).append(name)
            elif isinstance(value, torch.Tensor):
                others.append(_Other(name, value))
        groups = [group for group in runtime.groups if any(param in self._names for param in group.params)]
        steps: list[FlatGroup | _Other] = [*groups, *others]
        self._steps = sorted(steps, key=lambda step: -_dtype_of(step).itemsize)

    def check(self) -> None:
        """Raise UsageError where values are not this engine's."""
        for step in self._steps:
            if isinstance(step, _Other) and placeholder.is_sharded(step.tensor):
                raise UsageError(f"parameter {step.name} belongs to another engine; take that one's state dict")

    def values(self, *, wanted: bool) -> Iterator[torch.Tensor]:
        """The tensors in their order; a rank that does not want them only helps to gather. Collective."""
        for step in self._steps:
            if isinstance(step, _Other):
                if wanted:
                    yield step.tensor
                continue
            whole = step.whole_resident()
            for param, slot in zip(step.params, step.layout.slots, strict=True) if wanted else ():
                for _ in self._names.get(param, ()):
                    yield whole[slot.offset : slot.end].view(slot.shape)

    def file(self, values: Iterator[torch.Tensor]) -> Iterator[bytes | memoryview]:
        """The bytes of the file, of what `values` gives where it is wanted."""
        plan = plan_file({name: torch.empty(shape, dtype=dtype, device="meta") for name, shape, dtype in self._specs()})
        yield plan.head
        yield from (bytes_of(tensor) for tensor in values if tensor.numel())

    def _specs(self) -> Iterator[WeightSpec]:
        for step in self._steps:
            if isinstance(step, _Other):
                yield WeightSpec(step.name, tuple(step.tensor.shape), step.tensor.dtype)
                continue
            for param in step.params:
                for name in self._names.get(param, ()):
                    yield WeightSpec(name, tuple(param.shape), step.dtypes.storage)


class _Other(NamedTuple):
    """A tensor the runtime does not hold: a parameter that is the caller's own, or a buffer."""

    name: str
    tensor: torch.Tensor


def _dtype_of(step: FlatGroup | _Other) -> torch.dtype:
    return step.tensor.dtype if isinstance(step, _Other) else step.dtypes.storage
