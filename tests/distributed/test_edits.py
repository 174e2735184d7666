"""Writes to parameters outside `GatheredParameters`: between steps and inside a forward, they are kept or refused."""

from typing import Any
from unittest import mock

import pytest
import torch
from torch import nn

from fullspeed import zero
from fullspeed.accelerator import get_accelerator
from fullspeed.base.errors import UsageError
from fullspeed.engine.initialize import initialize
from tests.models import mlp
from tests.parity.beside import difference, sgd, zero_config
from tests.ranks import ranks


def write(way: str, weight: nn.Parameter) -> None:
    """Halve the weight, one way or another."""
    with torch.no_grad():
        if way == "mul_":
            weight.mul_(0.5)
        elif way == "copy_":
            weight.copy_(weight * 0.5)
        elif way == "set data":
            weight.data = weight.detach() * 0.5
        elif way == "setitem":
            weight[:] = weight * 0.5
        else:
            nn.init.constant_(weight, 0.25)


WAYS = ["mul_", "copy_", "set data", "setitem", "init"]


def trained_beside(engine: Any, reference: nn.Module, edit: Any, steps: int = 3) -> None:
    optimizer = sgd(reference.parameters())
    x = torch.randn(4, 5, generator=torch.Generator().manual_seed(3))
    for _ in range(steps):
        engine.backward(engine(x).square().mean())
        engine.step()
        reference(x).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()
        edit()


@ranks(2)
@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("stage", [0, 1, 2])
def test_between_steps_where_parameters_are_whole(rank: int, world_size: int, way: str, stage: int) -> None:
    model, reference = mlp(rank), mlp(0)
    engine, *_ = initialize(model=model, optimizer=sgd, config=zero_config(stage))
    trained_beside(engine, reference, lambda: [write(way, each[0].weight) for each in (model, reference)])
    engine.destroy()
    assert max(difference(model, reference).values()) < 1e-6


@ranks(2)
@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("stage", [1, 2])
def test_masters_take_them_over(rank: int, world_size: int, way: str, stage: int) -> None:
    """Whole 16-bit parameters beside fp32 masters, as on a device that multiplies bf16 itself."""
    model = mlp(rank)
    with mock.patch.object(type(get_accelerator()), "has_native_matmul", return_value=True):
        engine, *_ = initialize(model=model, optimizer=sgd, config=zero_config(stage) | {"bf16": {"enabled": True}})
    others = zero.safe_get_full_fp32_param(model[2].weight)
    expected = model[0].weight.detach().clone()
    write(way, model[0].weight)
    write(way, expected)
    engine.backward(engine(torch.zeros(4, 5, dtype=torch.bfloat16)).sum() * 0)  # moves nothing
    engine.step()
    assert torch.equal(model[0].weight, expected)
    assert torch.equal(zero.safe_get_full_fp32_param(model[0].weight), expected.float())
    assert torch.equal(zero.safe_get_full_fp32_param(model[2].weight), others)  # not rounded by the way


@ranks(2)
@pytest.mark.parametrize("way", WAYS)
def test_between_steps_where_parameters_are_sharded(rank: int, world_size: int, way: str) -> None:
    model = mlp(rank)
    keep = initialize(model=model, optimizer=sgd, config=zero_config(3))
    before = zero.safe_get_full_fp32_param(model[0].weight)
    with pytest.raises(UsageError, match=r"0\.weight.*GatheredParameters"):
        write(way, model[0].weight)
    assert torch.equal(zero.safe_get_full_fp32_param(model[0].weight), before)
    del keep


class Renormalised(nn.Module):
    """Divides its weight by its norm in each forward, as weight-normalised layers of old did."""

    def __init__(self) -> None:
        super().__init__()
        self.inner, self.outer = nn.Linear(5, 7), nn.Linear(7, 3)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        with torch.no_grad():
            self.inner.weight.div_(self.inner.weight.norm())
        return self.outer(self.inner(x))


@ranks(2)
@pytest.mark.parametrize("stage", [0, 1, 2, 3])
def test_inside_a_forward(rank: int, world_size: int, stage: int) -> None:
    torch.manual_seed(rank)
    model = Renormalised()
    torch.manual_seed(0)
    reference = Renormalised()
    engine, *_ = initialize(model=model, optimizer=sgd, config=zero_config(stage))
    trained_beside(engine, reference, lambda: None)
    engine.destroy()
    assert max(difference(model, reference).values()) < 1e-6


class Shifted(nn.Linear):
    """Changes its weight in each forward by a step that shows when it is made twice."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        with torch.no_grad():
            self.weight.add_(0.125)
        return super().forward(x)


@ranks(2, 4)
def test_an_edit_waits_until_no_rank_reads_the_shard(rank: int, world_size: int) -> None:
    """A rank may gather late what another has prefetched, used and left already."""
    torch.manual_seed(rank)
    model = nn.Sequential(Shifted(5, 7), nn.Linear(7, 3))
    torch.manual_seed(0)
    reference = nn.Sequential(Shifted(5, 7), nn.Linear(7, 3))
    engine, *_ = initialize(model=model, optimizer=sgd, config=zero_config(3))
    group, _ = engine.runtime.slot_of[model[0].weight]
    before: list[torch.Tensor] = []
    kept: list[bool] = []
    model[0].register_forward_pre_hook(lambda *_: before.append(group.store.clone()))
    model[1].register_forward_pre_hook(lambda *_: kept.append(torch.equal(group.store, before[-1])))
    trained_beside(engine, reference, lambda: None)
    assert kept == [True] * 3
    engine.destroy()
    assert max(difference(model, reference).values()) < 1e-6


@ranks(2)
def test_another_shape_is_refused_and_nothing_is_lost(rank: int, world_size: int) -> None:
    model = mlp(rank)
    engine, *_ = initialize(model=model, optimizer=sgd, config=zero_config(2))
    before = model[0].weight.detach().clone()
    engine.backward(engine(torch.ones(4, 5)).sum())
    model[0].weight.data = torch.zeros(9, 5)
    with pytest.raises(UsageError, match=r"0\.weight of shape \(7, 5\) got a tensor of shape \(9, 5\)"):
        engine.step()
    assert torch.equal(model[0].weight, before)
    engine.step()
    assert not torch.equal(model[0].weight, before)
