"""What a parameter is while its values live in shards: itself, minus the right to be read freely.

The user's `nn.Parameter` object stays the same object; only its class changes while its flat storage is freed, as
torch's own `UninitializedParameter` does. Shape, dtype, device, `requires_grad`, hooks and identity answer as ever. An
operation that needs the values goes through `__torch_function__` to the owner of the parameter, which gathers the
values around the operation, or raises an error that says what to do instead.
"""

from __future__ import annotations

import enum
import weakref
from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Protocol

import torch
from torch import nn
from torch.utils.weak import WeakIdKeyDictionary
from typing_extensions import override

if TYPE_CHECKING:
    from fullspeed.comm import Group
    from fullspeed.sharding.group import FlatGroup


class ZeroParamStatus(enum.Enum):
    """Whether a sharded parameter's values are here, in the words of DeepSpeed's `param.ds_status`."""

    AVAILABLE = 1
    NOT_AVAILABLE = 2
    INFLIGHT = 3


@dataclass
class Operation:
    """A call of a torch function that touches sharded tensors; every owner in turn prepares its own."""

    func: Any
    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    owners: list[tuple[Owner, list[torch.Tensor]]]  # those still to be asked

    @property
    def name(self) -> str:
        """The torch function's name, `add_` for example; a property's getter is `__get__`, its setter `__set__`."""
        return str(getattr(self.func, "__name__", self.func))

    def carry_out(self) -> Any:
        """Call the function, once all owners have been asked."""
        if self.owners:
            owner, tensors = self.owners.pop()
            return owner.run(tensors, self)
        return self.func(*self.args, **self.kwargs)


class Owner(Protocol):
    """Who keeps the values of sharded parameters."""

    def run(self, tensors: list[torch.Tensor], operation: Operation) -> Any:
        """Carry out an operation on `tensors`, sharded parameters or views of some, with their values.

        Raises:
            UsageError: the values cannot be had here and now.
        """

    @property
    def group(self) -> Group:
        """The ranks that act together on the parameters."""

    def place_of(self, param: torch.Tensor) -> tuple[FlatGroup, int]:
        """The flat group a parameter lives in, and its slot there."""

    def whole(self, groups: Sequence[FlatGroup]) -> AbstractContextManager[None]:
        """Inside, the groups' exact values are here. Collective."""

    def assemble(self) -> None:
        """Wait until every rank is here, serving those that are not, before ranks communicate about parameters."""

    def replace(self, param: nn.Parameter, value: torch.Tensor) -> None:
        """Give a parameter a tensor of another shape or dtype. Collective. Raises UsageError where that cannot be."""

    def copy_of(self, tensor: torch.Tensor) -> torch.Tensor:
        """A whole, ordinary copy of a sharded parameter or view; raises UsageError as `run` does."""

    def deep_copy_of(self, param: nn.Parameter) -> nn.Parameter:
        """A second parameter with the same values, kept as this one is; raises UsageError as `run` does."""


# Keyed by identity: comparing tensors would compare their values. Owners are referenced weakly: they hold their
# parameters, so a strong reference would keep both alive for ever.
_owners: WeakIdKeyDictionary = WeakIdKeyDictionary()

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
    found.add(torch._has_compatible_shallow_copy_type)
    return found


class Sharded:
    """What sharded parameters and views of them have in common: every operation asks the owner."""

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
            return Operation(func, args, kwargs, _by_owner(_sharded_in((args, kwargs)))).carry_out()

    def __reduce_ex__(self, protocol: Any) -> Any:
        """Pickles as a whole, ordinary tensor."""
        assert isinstance(self, torch.Tensor)
        with torch._C.DisableTorchFunctionSubclass():
            return _owner_of(self).copy_of(self).__reduce_ex__(protocol)


class ShardedParameter(Sharded, nn.Parameter):
    """Class of a parameter while its values are in shards. Never constructed; see `hide` and `show`."""

    @override
    def __deepcopy__(self, memo: dict[int, Any]) -> nn.Parameter:
        if id(self) not in memo:
            with torch._C.DisableTorchFunctionSubclass():
                memo[id(self)] = _owner_of(self).deep_copy_of(self)
        found: nn.Parameter = memo[id(self)]
        return found


class ShardedView(Sharded, torch.Tensor):
    """A view of a sharded parameter (`.data`, `[0]`, ...): valid whenever the parameter's values are here."""


_DATA_FREE = _data_free_functions()
_sharded_classes: dict[type, type] = {nn.Parameter: ShardedParameter}


def adopt(tensor: torch.Tensor, owner: Owner) -> None:
    """Name the owner that answers when `tensor` is used while sharded."""
    _owners[tensor] = weakref.ref(owner)


def owner_of(tensor: torch.Tensor) -> Owner | None:
    """Who keeps the values of a parameter; None for an ordinary one."""
    return _owners[tensor]() if tensor in _owners else None


def is_adopted(param: nn.Parameter) -> bool:
    """Whether somebody owns `param`."""
    return owner_of(param) is not None


def disown(param: nn.Parameter) -> None:
    """Forget the owner of `param`."""
    if param in _owners:
        del _owners[param]


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
    _note_status(param, ZeroParamStatus.NOT_AVAILABLE)


def show(param: nn.Parameter) -> None:
    """Mark `param` as whole again."""
    kind = type(param)
    if issubclass(kind, ShardedParameter):
        param.__class__ = kind.__bases__[1]
        _note_status(param, ZeroParamStatus.AVAILABLE)


def _note_status(param: nn.Parameter, status: ZeroParamStatus) -> None:
    """Keep `ds_status` true for parameters that have it."""
    if "ds_status" in param.__dict__:
        param.__dict__["ds_status"] = status


def hide_view(view: torch.Tensor, owner: Owner) -> None:
    """Mark a view of a parameter as sharded for the rest of its life."""
    view.__class__ = ShardedView
    adopt(view, owner)


def is_sharded(tensor: torch.Tensor) -> bool:
    """Whether `tensor` is a parameter, or a view of one, whose values are in shards right now."""
    return isinstance(tensor, Sharded)


def _owner_of(tensor: torch.Tensor) -> Owner:
    owner = owner_of(tensor)
    assert owner is not None, "a sharded parameter outlived its owner"
    return owner


def _by_owner(tensors: Iterator[torch.Tensor]) -> list[tuple[Owner, list[torch.Tensor]]]:
    found: dict[int, tuple[Owner, list[torch.Tensor]]] = {}
    for tensor in tensors:
        owner = _owner_of(tensor)
        found.setdefault(id(owner), (owner, []))[1].append(tensor)
    return list(found.values())


def _sharded_in(value: Any) -> Iterator[torch.Tensor]:
    if isinstance(value, Sharded):
        assert isinstance(value, torch.Tensor)
        yield value
    elif isinstance(value, (list, tuple, set)):
        for item in value:
            yield from _sharded_in(item)
    elif isinstance(value, dict):
        for item in value.values():
            yield from _sharded_in(item)


def _describe(tensor: torch.Tensor) -> str:
    return f"tensor(shape={tuple(tensor.shape)}, dtype={tensor.dtype}, values in shards)"
