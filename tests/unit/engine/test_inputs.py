"""Casting inputs, taking batches apart, finding the loss."""

from collections import namedtuple
from types import SimpleNamespace

import pytest
import torch

from fullspeed.engine.inputs import as_arguments, cast_floating, loss_of, to_device

Pair = namedtuple("Pair", "a b")


def test_cast_floating_keeps_structure_and_integers() -> None:
    value = {"x": torch.ones(1), "ids": torch.ones(1, dtype=torch.long), "pair": Pair(torch.ones(1).double(), "s")}
    cast = cast_floating(value, torch.bfloat16)
    assert cast["x"].dtype is torch.bfloat16
    assert cast["ids"].dtype is torch.long
    assert isinstance(cast["pair"], Pair)
    assert cast["pair"].a.dtype is torch.bfloat16


def test_cast_only_one_dtype() -> None:
    half, full = torch.ones(1).half(), torch.ones(1).double()
    assert [t.dtype for t in cast_floating([half, full], torch.float32, only=torch.float16)] == [
        torch.float32,
        torch.float64,
    ]


def test_arguments() -> None:
    x = torch.ones(1)
    assert as_arguments(x) == ((x,), {})
    assert as_arguments([x, 1]) == ((x, 1), {})
    assert as_arguments({"x": x}) == ((), {"x": x})


def test_loss() -> None:
    x = torch.ones(())
    for output in (x, (x, 1), [x], {"loss": x}, SimpleNamespace(loss=x)):
        assert loss_of(output) is x
    with pytest.raises(TypeError, match="returns its loss"):
        loss_of("no")


def test_to_device() -> None:
    moved = to_device([{"x": torch.ones(1)}, (1, "s")], torch.device("cpu"))
    assert moved[1] == (1, "s")
