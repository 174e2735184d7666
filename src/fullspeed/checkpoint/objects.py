"""State that is no tensor, in files that `torch.load(weights_only=True)` reads: they can be opened without trust.

What such a load refuses is refused when saving, by name, so that no checkpoint is written that cannot be
read.
"""

from __future__ import annotations

import io
import pathlib
import pickle
from collections.abc import Mapping
from typing import Any

import torch

from fullspeed.base.errors import CheckpointError

_PLAIN = (int, float, bool, str, type(None), torch.Tensor)


def pack(state: Mapping[str, Any]) -> bytes:
    """The bytes of a file with `state`.

    Raises:
        CheckpointError: an entry is of a type that only an unsafe load could bring back; names it.
    """
    compact = {name: _compact(value) for name, value in state.items()}
    data = _dump(compact)
    if data is None or not (_is_plain(compact) or _is_loadable(data)):
        where, culprit = _culprit(compact, "")
        raise CheckpointError(
            f"{where} is a {type(culprit).__module__}.{type(culprit).__qualname__}, which cannot be loaded "
            f"safely; save tensors, numbers, strings, and lists, tuples and dicts of them instead"
        )
    return data


def unpack(path: pathlib.Path) -> dict[str, Any]:
    """The state `pack` put into a file, on the CPU."""
    try:
        loaded: dict[str, Any] = torch.load(path, map_location="cpu", weights_only=True)
    except (pickle.UnpicklingError, RuntimeError, EOFError) as error:
        raise CheckpointError(f"{path} cannot be read: {error}") from error
    return loaded


def _dump(value: Any) -> bytes | None:
    buffer = io.BytesIO()
    try:
        torch.save(value, buffer)
    except (pickle.PicklingError, TypeError, AttributeError):
        return None
    return buffer.getvalue()


def _is_plain(value: Any) -> bool:
    """Whether it consists of what is certainly loadable: then a trial, which takes longer than packing, is spared."""
    if type(value) is dict:
        return all(map(_is_plain, value)) and all(map(_is_plain, value.values()))
    return type(value) in _PLAIN or (type(value) in (list, tuple) and all(map(_is_plain, value)))


def _is_loadable(data: bytes) -> bool:
    try:
        torch.load(io.BytesIO(data), map_location="cpu", weights_only=True)
    except pickle.UnpicklingError:
        return False
    return True


def _culprit(value: Any, where: str) -> tuple[str, Any]:
    """Path and value of the innermost entry that cannot be saved."""
    entries: list[tuple[Any, Any]] = []
    if isinstance(value, dict):
        entries = list(value.items())
    elif isinstance(value, (list, tuple)):
        entries = list(enumerate(value))
    for key, inner in entries:
        data = _dump(inner)
        if data is None or not _is_loadable(data):
            return _culprit(inner, f"{where}[{key!r}]" if where else str(key))
    return where, value


def _compact(value: Any) -> Any:
    """The same, with tensors that are parts of a larger storage copied out, or the whole of it would be saved."""
    if isinstance(value, torch.Tensor):
        if value.untyped_storage().nbytes() > value.numel() * value.element_size():
            return value.detach().clone()
        return value
    if type(value) is dict:
        return {key: _compact(inner) for key, inner in value.items()}
    if type(value) in (list, tuple):
        return type(value)(_compact(inner) for inner in value)
    return value
