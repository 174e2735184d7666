"""What a parameter is while its values live in shards: itself, minus the right to be read.

The user's `nn.Parameter` object stays the same object; only its class changes while its flat storage is freed, as
torch's own `UninitializedParameter` does. Shape, dtype, device, `requires_grad`, hooks and identity answer as ever. An
operation that needs the values goes through `__torch_function__` to the resolver of the runtime that owns the
parameter: inside a forward or backward the resolver gathers the values and the operation goes on; elsewhere it raises.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import nn
from torch.utils.weak import WeakIdKeyDictionary

# Called with the sharded parameters an operation touches; makes them whole or raises UsageError.
Resolver = Callable[[list[nn.Parameter]], None]

# Keyed by identity: comparing tensors would compare their values. The values are weak methods: the runtime holds its
# parameters, so a strong reference to it would keep both alive for ever.
_resolvers: WeakIdKeyDictionary = WeakIdKeyDictionary()

# Operations that need no values. Property getters reach __torch_function__ as the property's `__get__`.
_DATA_FREE_PROPERTIES = (
    "shape", "dtype", "device", "requires_grad", "is_leaf", "grad", "grad_fn", "ndim", "layout", "is_cuda", "is_cpu",
    "is_meta", "is_sparse", "is_quantized", "is_mkldnn", "is_xpu", "is_mps", "names", "itemsize", "nbytes", "output_nr",
    "_version", "_backward_hooks", "_post_accumulate_grad_hooks", "volatile", "name", "retains_grad", "_base",
    "grad_dtype",
)  # fmt: skip
_DATA_FREE_METHODS = (
    "size", "dim", "numel", "nelement", "element_size", "stride", "storage_offset", "is_floating_point", "is_complex",
    "is_contiguous", "requires_grad_", "register_hook", "register_post_accumulate_grad_hook", "get_device", "__len__",
    "type_as_dtype", "ndimension", "is_inference", "is_same_size", "retain_grad", "is_signed", "__hash__",
)  # fmt: skip


def _data_free_functions() -> set[Any]:
    found: set[Any] = set()
    for name in _DATA_FREE_PROPERTIES:
        slot = getattr(torch.Tensor, name, None)
        for accessor in ("__get__", "__set__", "__delete__"):
            if hasattr(slot, accessor):
                found.add(getattr(slot, accessor))
    found.update(getattr(torch.Tensor, name) for name in _DATA_FREE_METHODS if hasattr(torch.Tensor, name))
    found.update({torch.is_floating_point, torch.is_complex, torch.numel, torch.is_same_size})
    return found


class ShardedParameter(nn.Parameter):
    """Class of a parameter while its values are in shards. Never constructed; see `hide` and `show`."""

    @classmethod
    def __torch_function__(
        cls, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        with torch._C.DisableTorchFunctionSubclass():
            if func in _DATA_FREE:
                return func(*args, **kwargs)
            if func is torch.Tensor.__repr__:
                return _describe(args[0])
            _make_whole(list(_sharded_in((args, kwargs))))
            return func(*args, **kwargs)


_DATA_FREE = _data_free_functions()
_sharded_classes: dict[type, type] = {nn.Parameter: ShardedParameter}


def adopt(param: nn.Parameter, resolver: Resolver) -> None:
    """Name the runtime that answers when `param` is used while sharded: a bound method, referenced weakly."""
    _resolvers[param] = weakref.WeakMethod(resolver)


def is_adopted(param: nn.Parameter) -> bool:
    """Whether a runtime owns `param`."""
    return param in _resolvers and _resolvers[param]() is not None


def disown(param: nn.Parameter) -> None:
    """Forget the runtime that owned `param`."""
    if param in _resolvers:
        del _resolvers[param]


def hide(param: nn.Parameter) -> None:
    """Mark `param` as sharded: its storage is about to be freed."""
    kind = type(param)
    if issubclass(kind, ShardedParameter):
        return
    sharded = _sharded_classes.get(kind)
    if sharded is None:
        sharded = type(f"Sharded{kind.__name__}", (ShardedParameter, kind), {"__doc__": ShardedParameter.__doc__})
        _sharded_classes[kind] = sharded
    param.__class__ = sharded


def show(param: nn.Parameter) -> None:
    """Mark `param` as whole again."""
    kind = type(param)
    if issubclass(kind, ShardedParameter):
        param.__class__ = nn.Parameter if kind is ShardedParameter else kind.__mro__[2]


def is_sharded(tensor: torch.Tensor) -> bool:
    """Whether `tensor` is a parameter whose values are in shards right now."""
    return isinstance(tensor, ShardedParameter)


def _make_whole(params: list[nn.Parameter]) -> None:
    by_resolver: dict[Resolver, list[nn.Parameter]] = {}
    for param in params:
        resolver = _resolvers[param]()
        assert resolver is not None, "a sharded parameter outlived the runtime that owns it"
        by_resolver.setdefault(resolver, []).append(param)
    for resolver, owned in by_resolver.items():
        resolver(owned)


def _sharded_in(value: Any) -> Iterator[nn.Parameter]:
    if isinstance(value, ShardedParameter):
        yield value
    elif isinstance(value, (list, tuple, set)):
        for item in value:
            yield from _sharded_in(item)
    elif isinstance(value, dict):
        for item in value.values():
            yield from _sharded_in(item)


def _describe(param: torch.Tensor) -> str:
    return f"tensor(shape={tuple(param.shape)}, dtype={param.dtype}, values in shards)"
