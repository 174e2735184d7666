"""Tensors whose values are in a file: reading brings them, writing takes them back.

Optimizer states and masters are such tensors between steps. Whoever meets one, a checkpoint, an accessor, the user's
own code, sees an ordinary tensor in host memory; what it computes is one.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.utils._pytree import tree_map
from typing_extensions import override

from fullspeed.base.errors import UsageError
from fullspeed.offload.buffers import ALIGNMENT_BYTES, aligned_empty
from fullspeed.offload.store import FileStore

_aten = torch.ops.aten


class FileTensor(Tensor):
    """Consecutive elements of a tensor in a `FileStore`, in a shape of their own.

    Slices of one dimension, `view`, `reshape` and `detach` give other FileTensors and move nothing. Every other
    operation gets the values in memory, in a tensor made for it. One that writes in place changes the file; `copy_` of
    as many elements reads nothing before. Several operands of one operation must not overlap if it writes to them.
    """

    store: FileStore
    key: str  # the tensor's name in the store
    start: int  # its first element that is this one's

    @staticmethod
    def __new__(cls, store: FileStore, key: str, start: int, shape: Sequence[int]) -> FileTensor:
        """`store` has a tensor `key`, of which this is the part that begins at element `start`."""
        made: FileTensor = Tensor._make_wrapper_subclass(cls, torch.Size(shape), dtype=store.slot(key).dtype)
        made.store, made.key, made.start = store, key, start
        return made

    def load(self) -> Tensor:
        """The values, in memory of their own. Raises StorageError when they cannot be read."""
        values = aligned_empty(self.numel(), self.dtype)
        if values.numel():
            self.store.submit_read(self.key, values, self.start).wait()
        return values.view(self.shape)

    def save(self, values: Tensor) -> None:
        """Replace the values. Raises StorageError when they cannot be written."""
        if self.numel():
            flat = values.detach().to(device="cpu", dtype=self.dtype).expand(self.shape).contiguous().reshape(-1)
            if self.start == 0 and flat.data_ptr() % ALIGNMENT_BYTES:
                # Else the bytes go through the page cache, and are in memory twice for as long as that likes.
                flat = aligned_empty(self.numel(), self.dtype).copy_(flat)
            self.store.submit_write(self.key, flat, self.start).wait()

    @override
    def tolist(self) -> Any:
        """As of any tensor; torch has it for its own class alone."""
        return self.load().tolist()

    @override
    def numpy(self, *, force: bool = False) -> Any:
        """As of any tensor: an array of its own."""
        return self.load().numpy(force=force)

    @classmethod
    @override
    def __torch_dispatch__(  # type: ignore[override]  # the stub is of another kind of method
        cls, func: Any, types: Iterable[type], args: tuple[Any, ...] = (), kwargs: dict[Any, Any] | None = None
    ) -> Any:
        lazy = _LAZY.get(func)
        if lazy is not None and (made := lazy(*args, **(kwargs or {}))) is not None:
            return made
        loaded: dict[int, tuple[FileTensor, Tensor]] = {}
        written = set(_written(func, args, kwargs or {}))

        def loaded_of(value: Any) -> Any:
            if not isinstance(value, FileTensor):
                return value
            if id(value) not in loaded:
                is_replaced = func is _aten.copy_.default and value is args[0]
                values = torch.empty(value.shape, dtype=value.dtype) if is_replaced else value.load()
                loaded[id(value)] = (value, values)
            return loaded[id(value)][1]

        result = func(*tree_map(loaded_of, args), **tree_map(loaded_of, kwargs or {}))
        for tensor, values in loaded.values():
            if id(tensor) in written:
                if values.shape != tensor.shape:
                    raise UsageError(f"{func} would change the shape of a tensor that waits in {tensor.store.path}")
                tensor.save(values)
        originals = {id(values): tensor for tensor, values in loaded.values() if id(tensor) in written}
        return tree_map(lambda value: originals.get(id(value), value), result)

    def __repr__(self, *, tensor_contents: Any = None) -> str:  # type: ignore[override]
        return f"FileTensor({self.key}, shape={tuple(self.shape)}, dtype={self.dtype}, file={str(self.store.path)!r})"

    def __reduce_ex__(self, protocol: Any) -> Any:
        return self.load().__reduce_ex__(protocol)

    def __deepcopy__(self, memo: dict[int, Any]) -> Tensor:
        return self.load()


def _written(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> list[int]:
    """Ids of the arguments that an operation writes to; those in lists one by one."""
    found = []
    for index, argument in enumerate(func._schema.arguments):
        if argument.alias_info is None or not argument.alias_info.is_write:
            continue
        value = args[index] if index < len(args) else kwargs.get(argument.name)
        found += [id(each) for each in (value if isinstance(value, (list, tuple)) else [value])]
    return found


def _slice(
    source: FileTensor, dim: int = 0, start: int | None = None, end: int | None = None, step: int = 1
) -> FileTensor | None:
    if source.dim() != 1 or step != 1:
        return None
    low, high, _ = slice(start, end).indices(source.numel())
    return FileTensor(source.store, source.key, source.start + low, (max(0, high - low),))


def _view(source: FileTensor, shape: Sequence[int]) -> FileTensor:
    shape = list(shape)
    if -1 in shape:
        known = -torch.Size(shape).numel()
        shape[shape.index(-1)] = source.numel() // known if known else 0
    if torch.Size(shape).numel() != source.numel():
        raise RuntimeError(f"shape {shape} is invalid for {source.numel()} elements")
    return FileTensor(source.store, source.key, source.start, shape)


def _same(source: FileTensor) -> FileTensor:
    return FileTensor(source.store, source.key, source.start, source.shape)


_LAZY: dict[Any, Callable[..., FileTensor | None]] = {
    _aten.slice.Tensor: _slice,
    _aten.view.default: _view,
    _aten._unsafe_view.default: _view,
    _aten.detach.default: _same,
    _aten.alias.default: _same,
}
