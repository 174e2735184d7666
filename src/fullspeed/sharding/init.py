"""`zero.Init`: modules whose parameters are sharded as they are made.

Memory while a model is built: this rank's shards, and the parameters of the module that is being made.

How it sees parameters without touching torch: torch tells registered hooks of every parameter and submodule that a
module gets. A module's parameters are sharded when it has become somebody's submodule, when another module gets its
first parameter and the constructor of this one has returned, or at the end of the context. Until then they are whole,
so constructors initialise them as ever.
"""

from __future__ import annotations

import sys
import threading
from collections.abc import Iterable, Iterator
from contextlib import ExitStack
from types import TracebackType
from typing import Any, ClassVar

import torch
from torch import nn
from torch.nn.modules.module import (
    register_module_module_registration_hook,
    register_module_parameter_registration_hook,
)
from torch.overrides import TorchFunctionMode
from typing_extensions import override

from fullspeed.accelerator import get_accelerator, return_freed_memory
from fullspeed.base.errors import UsageError
from fullspeed.comm import Group, get_world_group, init_distributed
from fullspeed.config import load_config
from fullspeed.precision.policy import DTYPES
from fullspeed.sharding import placeholder
from fullspeed.sharding.holder import ShardHolder


class Init:
    """Context in which modules are made with sharded parameters (ZeRO stage 3 from the first moment).

    `initialize` takes such a model over as it is. Without an engine its parameters can be read and changed by
    operations that all ranks make, and computed with under `torch.no_grad`. Rank 0's initial values win. Contexts
    may be nested; the inner one decides.

    Args:
        module: shard the parameters of this module now; the context may then be left unused.
        data_parallel_group: the ranks that share the parameters; all by default.
        mem_efficient_linear: accepted; no linear layer keeps gathered weights here.
        remote_device: where shards live: None, "none", or the device that computes.
        pin_memory: accepted; of use with shards in host memory.
        config_dict_or_path: a configuration, for its precision. Needs no batch keys.
        config: the same, under its older name.
        enabled: False makes the context do nothing.
        dtype: of floating-point parameters, and of floating-point tensors made in the context without a dtype of
            their own; by default the configuration's precision, else what torch would do.
        mpu: an object whose `get_data_parallel_group()` names the ranks.
        zero_param_parallel_group: accepted; `initialize` makes secondary shards as configured.
        zero_quantized_weights: accepted; `initialize` quantises gathers as configured.
        zero_quantized_nontrainable_weights: not here; a key of the configuration for `initialize`.
        sequence_data_parallel_group: the ranks that share the parameters under sequence parallelism.
        param_swapper: accepted; not used.

    Raises:
        ConfigError: the configuration has faults.
        UsageError: `remote_device` is another device than the one that computes.
    """

    _active: ClassVar[list[Init]] = []

    def __init__(
        self,
        module: nn.Module | None = None,
        data_parallel_group: Group | None = None,
        mem_efficient_linear: bool = True,
        remote_device: str | None = None,
        pin_memory: bool = False,
        config_dict_or_path: Any = None,
        config: Any = None,
        enabled: bool = True,
        dtype: torch.dtype | None = None,
        mpu: Any = None,
        zero_param_parallel_group: Any = None,
        zero_quantized_weights: bool = False,
        zero_quantized_nontrainable_weights: bool = False,
        sequence_data_parallel_group: Group | None = None,
        param_swapper: Any = None,
    ) -> None:
        del mem_efficient_linear, pin_memory, zero_param_parallel_group, zero_quantized_weights, param_swapper
        self.enabled = enabled
        if not enabled:
            return
        if zero_quantized_nontrainable_weights:
            raise UsageError(
                "zero_quantized_nontrainable_weights: which parameters are frozen is known when the engine is made; "
                "set zero_optimization.zero_quantized_nontrainable_weights in the configuration instead"
            )
        init_distributed()
        device = torch.device(get_accelerator().current_device_name())
        _check_remote(remote_device, device)
        if device.type == "cpu":
            return_freed_memory()
        self.dtype = dtype or _configured_dtype(config_dict_or_path if config_dict_or_path is not None else config)
        group = data_parallel_group or sequence_data_parallel_group
        if group is None:
            group = mpu.get_data_parallel_group() if mpu is not None else get_world_group()
        self._holder = ShardHolder(group, device)
        self._factories = _FactoryDefaults(self.dtype, device)
        self._pending: dict[nn.Module, None] = {}  # in the order in which they got their first parameter
        self._thread = threading.get_ident()
        self._entered = ExitStack()
        if module is not None:
            self._shard(module.modules())

    # ---------------------------------------------------------------- context

    def __enter__(self) -> Init:
        if self.enabled:
            self._thread = threading.get_ident()
            self._entered.callback(register_module_parameter_registration_hook(self._on_parameter).remove)
            self._entered.callback(register_module_module_registration_hook(self._on_submodule).remove)
            self._entered.enter_context(self._factories)
            self._active.append(self)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if not self.enabled:
            return
        self._active.remove(self)
        self._entered.close()
        pending, self._pending = self._pending, {}
        if error is None:
            self._shard(pending)

    def _is_asked(self) -> bool:
        """Whether a registration is this context's business: of its thread, and no inner context's."""
        return self._active[-1] is self and threading.get_ident() == self._thread

    def _on_parameter(self, module: nn.Module, name: str, param: nn.Parameter | None) -> None:
        if not self._is_asked() or param is None:
            return
        if module not in self._pending:
            unfinished = _under_construction()
            self._flush(other for other in self._pending if id(other) not in unfinished)
        self._pending[module] = None

    def _on_submodule(self, module: nn.Module, name: str, submodule: nn.Module | None) -> None:
        if self._is_asked() and submodule is not None:
            self._flush(submodule.modules())

    def _flush(self, modules: Iterable[nn.Module]) -> None:
        finished = [module for module in modules if module in self._pending]
        for module in finished:
            del self._pending[module]
        self._shard(finished)

    def _shard(self, modules: Iterable[nn.Module]) -> None:
        with torch._C.DisableTorchFunction(), torch.no_grad():
            for module in modules:
                params = list(_own_params(module))
                for _, param in params:
                    if self.dtype is not None and param.is_floating_point() and not param.is_meta:
                        param.data = param.to(self.dtype)
                self._holder.add(params)


def _own_params(module: nn.Module) -> Iterator[tuple[str, nn.Parameter]]:
    """A module's own parameters that are neither sharded yet nor still without a shape or values."""
    prefix = type(module).__name__
    for name, param in module.named_parameters(prefix, recurse=False):
        if not nn.parameter.is_lazy(param) and not param.is_meta and not placeholder.is_adopted(param):
            yield name, param


def _under_construction() -> set[int]:
    """Identities of the objects whose `__init__` is running in this thread."""
    found = set()
    frame: Any = sys._getframe(1)
    while frame is not None:
        code = frame.f_code
        if code.co_name == "__init__" and code.co_argcount:
            found.add(id(frame.f_locals.get(code.co_varnames[0])))
        frame = frame.f_back
    return found


def _check_remote(remote_device: str | None, device: torch.device) -> None:
    if remote_device not in (None, "none", device.type):
        raise UsageError(
            f"remote_device is {remote_device!r}; in this version shards live where the model computes, "
            f"{device.type!r}: leave remote_device out"
        )


def _configured_dtype(config: Any) -> torch.dtype | None:
    if config is None:
        return None
    name = load_config(config).precision_dtype()
    return None if name == "fp32" else DTYPES[name]


class _FactoryDefaults(TorchFunctionMode):
    """Floating tensors made without a dtype get this one, tensors made without a device that one; this thread only."""

    _FACTORIES = frozenset(
        (
            torch.tensor, torch.empty, torch.zeros, torch.ones, torch.full, torch.arange, torch.eye, torch.rand,
            torch.randn, torch.linspace, torch.logspace,
        )
    )  # fmt: skip

    def __init__(self, dtype: torch.dtype | None, device: torch.device) -> None:
        super().__init__()
        self._dtype, self._device = dtype, device

    @override
    def __torch_function__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = dict(kwargs or {})
        if func not in self._FACTORIES:
            return func(*args, **kwargs)
        is_free = kwargs.get("dtype") is None
        if kwargs.get("device") is None and self._device.type != "cpu":
            kwargs["device"] = self._device
        made = func(*args, **kwargs)
        if self._dtype is not None and is_free and made.is_floating_point() and "out" not in kwargs:
            return made.to(self._dtype).requires_grad_(made.requires_grad)
        return made
