"""Tensors are found in whatever a module returns."""

from collections import OrderedDict, namedtuple
from dataclasses import dataclass

import torch
from torch import nn

from fullspeed.sharding.outputs import tensors_in

T = torch.ones(1)
Pair = namedtuple("Pair", "a b")


@dataclass
class Box:
    inner: object
    name: str = "box"


class Plain:
    def __init__(self) -> None:
        self.hidden = T


def test_nested() -> None:
    for value, count in [
        (T, 1), (None, 0), (3, 0), ("text", 0), ([T, (T, None)], 2), ({"a": T, "b": [T]}, 2), (Pair(T, 1), 1),
        (Box(Box(T)), 1), (Plain(), 1), (OrderedDict(x=T), 1), ({1, 2}, 0), (nn.Linear(1, 1), 0), (Box, 0),
    ]:  # fmt: skip
        assert len(list(tensors_in(value))) == count, value


def test_cycles_end() -> None:
    loop: list[object] = [T]
    loop.append(loop)
    assert 1 <= len(list(tensors_in(loop))) < 20
