"""Finding the tensors in whatever a module returns."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Mapping
from typing import Any

import torch

_PLAIN = (str, bytes, int, float, bool, complex, type(None))


def tensors_in(value: Any, _depth: int = 0) -> Iterator[torch.Tensor]:
    """Every tensor in nested containers, dataclasses and objects with attributes, six levels deep."""
    if isinstance(value, torch.Tensor):
        yield value
    elif isinstance(value, _PLAIN) or _depth > 6 or isinstance(value, torch.nn.Module):
        return
    elif isinstance(value, Mapping):
        for item in value.values():
            yield from tensors_in(item, _depth + 1)
    elif isinstance(value, (list, tuple, set, frozenset)):
        for item in value:
            yield from tensors_in(item, _depth + 1)
    elif dataclasses.is_dataclass(value) and not isinstance(value, type):
        for item in dataclasses.fields(value):
            yield from tensors_in(getattr(value, item.name), _depth + 1)
    elif hasattr(value, "__dict__") and not callable(value):
        for item in vars(value).values():
            yield from tensors_in(item, _depth + 1)
