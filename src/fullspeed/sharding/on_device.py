"""Building a model on another device, usually `meta`, and in another dtype than torch's defaults."""

from __future__ import annotations

from contextlib import ExitStack
from types import TracebackType
from typing import Any

import torch
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode

from fullspeed.base.errors import UsageError


class OnDevice:
    """Context in which modules are built on `device`, with floating tensors of `dtype`.

    An explicit dtype or device, as in `nn.Linear(2, 2, dtype=torch.float64)`, is honoured, and data the caller brings
    (`torch.Tensor([1.0])`, numpy arrays) stays where it is. On the meta device nothing is allocated: shapes and names
    exist, values are given later, by `module.to_empty` for one.

    The device holds for this thread only. The dtype is torch's default dtype, which all threads share while the block
    runs. May be nested and entered again.

    >>> import torch
    >>> with OnDevice(torch.bfloat16):
    ...     weight = torch.nn.Linear(2, 3).weight
    >>> weight.device.type, weight.dtype
    ('meta', torch.bfloat16)

    Args:
        dtype: a floating dtype.
        device: a device, or its name.
        enabled: False makes the context do nothing.

    Raises:
        UsageError: `dtype` is not a floating dtype.
    """

    def __init__(self, dtype: torch.dtype, device: str | torch.device = "meta", enabled: bool = True) -> None:
        if not isinstance(dtype, torch.dtype) or not dtype.is_floating_point:
            raise UsageError(f"OnDevice dtype is {dtype!r}; choose a floating dtype such as torch.bfloat16")
        self.dtype, self.device, self.enabled = dtype, torch.device(device), enabled
        self._entered: list[ExitStack] = []

    def __enter__(self) -> OnDevice:
        stack = ExitStack()
        self._entered.append(stack)
        if self.enabled:
            stack.callback(torch.set_default_dtype, torch.get_default_dtype())
            torch.set_default_dtype(self.dtype)
            stack.enter_context(self.device)
            calls = stack.enter_context(_Calls())
            stack.enter_context(_LegacyConstructors(calls, self.device))
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._entered.pop().close()


class _Calls(TorchFunctionMode):
    """Knows whether a torch function is running; legacy constructors such as `torch.Tensor(2, 3)` are none."""

    depth = 0

    def __torch_function__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        self.depth += 1
        try:
            return func(*args, **(kwargs or {}))
        finally:
            self.depth -= 1


class _LegacyConstructors(TorchDispatchMode):
    """Puts `torch.Tensor(2, 3)` and its like, which ignore a device context, on `device`."""

    def __init__(self, calls: _Calls, device: torch.device) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._calls, self._device = calls, device

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = dict(kwargs or {})
        if not self._calls.depth and func is torch.ops.aten.empty.memory_format:
            kwargs["device"] = self._device
        return func(*args, **kwargs)
