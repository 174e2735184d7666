"""Stepping tensors that are not the optimizer's own by its rule: parts and copies of them, in any thread."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, NamedTuple

import torch
from torch import nn
from torch.optim import Optimizer

from fullspeed.base.errors import ConfigError, ConfigFault
from fullspeed.optim.factory import is_elementwise

Options = list[dict[str, Any]]
"""The hyper-parameters of every param group."""


class Apart(NamedTuple):
    """One tensor to step.

    Attributes:
        param_group: index of the param group whose hyper-parameters hold.
        tensor: has its gradient in `grad`, or None.
        state: what the optimizer keeps of it; changed in place, empty before the first step.
    """

    param_group: int
    tensor: nn.Parameter
    state: dict[str, Any]


def options_of(inner: Optimizer) -> Options:
    """The hyper-parameters as they are now; later changes do not reach them."""
    return [
        {name: _frozen(value) for name, value in group.items() if name not in ("params", "param_names")}
        for group in inner.param_groups
    ]


def are_equal(options: Options, others: Options) -> bool:
    """Whether all hyper-parameters are equal."""
    return len(options) == len(others) and all(
        row.keys() == other.keys() and all(_is_equal(row[name], other[name]) for name in row)
        for row, other in zip(options, others, strict=True)
    )


def param_group_of(inner: Optimizer) -> dict[nn.Parameter, int]:
    """Index of the param group of everything the optimizer steps."""
    return {tensor: index for index, group in enumerate(inner.param_groups) for tensor in group["params"]}


def step_apart(inner: Optimizer, options: Options, work: Sequence[Apart]) -> None:
    """Step the tensors of `work` as `inner` would with these hyper-parameters. `inner` is neither read nor changed.

    For optimizers that work element by element.
    """
    double = object.__new__(type(inner))
    # A schedule may have put a `step` of its own, bound to `inner`, into the instance.
    kept = {name: value for name, value in vars(inner).items() if name not in ("step", "state", "param_groups")}
    vars(double).update(kept)
    double.state = defaultdict(dict, {each.tensor: each.state for each in work})
    double.param_groups = [{**row, "params": []} for row in options]
    for each in work:
        double.param_groups[each.param_group]["params"].append(each.tensor)
    double.step()


def require_elementwise(inner: Optimizer, path: str) -> None:
    """Raise ConfigError naming the key `path`, which steps parts of tensors, unless the optimizer can be stepped so."""
    if not is_elementwise(inner):
        rule = f"steps parts of tensors, and {type(inner).__name__} is not known to work element by element"
        fix = "choose Adam, AdamW, Adagrad, Lion or SGD, or declare the class elementwise"
        raise ConfigError([ConfigFault(path, True, rule, fix)])


class Shadow:
    """A copy of a tensor and of the optimizer's state of it, which can be stepped while the tensor itself is read.

    Attributes:
        tensor: of the original's shape and dtype.
        state: the copied state.
    """

    def __init__(self, original: nn.Parameter) -> None:
        self.tensor = nn.Parameter(torch.empty_like(original))
        self.state: dict[str, Any] = {}

    @torch.no_grad()
    def fill(self, original: nn.Parameter, state: Mapping[str, Any]) -> None:
        """Copy the original's values and `state`; buffers of before are used again."""
        self.tensor.copy_(original)
        before, self.state = self.state, {}
        for name, value in state.items():
            self.state[name] = _copied_into(before.get(name), value) if isinstance(value, torch.Tensor) else value

    def nbytes(self) -> int:
        """Bytes held."""
        return self.tensor.nbytes + sum(each.nbytes for each in self.state.values() if isinstance(each, torch.Tensor))


class Readings:
    """Which tensors were read, and in which version: to tell whether what was computed of them still holds.

    Writes are seen by torch's own count of them, which leaves out those through `tensor.data`.
    """

    def __init__(self, tensors: Iterable[torch.Tensor]) -> None:
        self._seen = [(tensor, tensor._version) for tensor in tensors]

    def are_current(self, tensors: Iterable[torch.Tensor]) -> bool:
        """Whether these are the tensors that were read, and nobody wrote into them since."""
        now = list(tensors)
        return len(now) == len(self._seen) and all(
            tensor is seen and tensor._version == version
            for tensor, (seen, version) in zip(now, self._seen, strict=True)
        )


def _copied_into(buffer: Any, value: torch.Tensor) -> torch.Tensor:
    if isinstance(buffer, torch.Tensor) and buffer.shape == value.shape and buffer.dtype == value.dtype:
        return buffer.copy_(value)
    return value.clone()


def _frozen(value: Any) -> Any:
    return value.clone() if isinstance(value, torch.Tensor) else value


def _is_equal(value: Any, other: Any) -> bool:
    if isinstance(value, torch.Tensor) and isinstance(other, torch.Tensor):
        return torch.equal(value, other)
    return type(value) is type(other) and bool(value == other)
