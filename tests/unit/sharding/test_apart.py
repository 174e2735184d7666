"""Tensors stepped apart from an optimizer take the optimizer's own steps; readings notice every write."""

import pytest
import torch
from torch import nn
from torch.optim.lr_scheduler import LambdaLR

from fullspeed.base.errors import ConfigError
from fullspeed.optim.cpu import CPUAdagrad, CPUAdam, CPULion
from fullspeed.optim.lamb import Lamb
from fullspeed.optim.lion import Lion
from fullspeed.sharding.apart import (
    Apart,
    Readings,
    Shadow,
    are_equal,
    options_of,
    param_group_of,
    require_elementwise,
    step_apart,
)

KINDS = {
    "Adam": lambda params: torch.optim.Adam(params, lr=0.1, weight_decay=0.1),
    "fused AdamW": lambda params: torch.optim.AdamW(params, lr=0.1, fused=True),
    "SGD": lambda params: torch.optim.SGD(params, lr=0.1, momentum=0.9, nesterov=True),
    "plain SGD": lambda params: torch.optim.SGD(params, lr=0.1),
    "Adagrad": lambda params: torch.optim.Adagrad(params, lr=0.1),
    "NAdam": lambda params: torch.optim.NAdam(params, lr=0.1),
    "Rprop": lambda params: torch.optim.Rprop(params, lr=0.1),
    "Lion": lambda params: Lion(params, lr=0.1),
    "CPUAdam": lambda params: CPUAdam(params, lr=0.1),
    "CPUAdagrad": lambda params: CPUAdagrad(params, lr=0.1),
    "CPULion": lambda params: CPULion(params, lr=0.1),
}


def two_groups() -> list[dict[str, list[nn.Parameter]]]:
    torch.manual_seed(0)
    first, second = nn.Parameter(torch.randn(33)), nn.Parameter(torch.randn(8))
    return [{"params": [first]}, {"params": [second], "lr": 0.01}]


@pytest.mark.parametrize("kind", KINDS)
def test_a_copy_stepped_apart_is_the_original_stepped(kind):
    inner = KINDS[kind](two_groups())
    LambdaLR(inner, lambda step: 1.0)  # binds a `step` of its own to the instance
    tensors = list(param_group_of(inner))
    shadows = [Shadow(tensor) for tensor in tensors]
    for step in range(3):
        torch.manual_seed(step + 1)
        for tensor, shadow in zip(tensors, shadows, strict=True):
            shadow.fill(tensor, inner.state.get(tensor, {}))
            tensor.grad = torch.randn(tensor.shape)
            shadow.tensor.grad = tensor.grad.clone()
        before = [tensor.detach().clone() for tensor in tensors]
        groups = param_group_of(inner)
        work = [Apart(groups[t], s.tensor, s.state) for t, s in zip(tensors, shadows, strict=True)]
        step_apart(inner, options_of(inner), work)
        assert all(torch.equal(tensor, value) for tensor, value in zip(tensors, before, strict=True))
        inner.step()
        for tensor, shadow, value in zip(tensors, shadows, before, strict=True):
            assert torch.equal(tensor, shadow.tensor)
            assert not torch.equal(tensor, value)
            for name, value in inner.state[tensor].items():
                assert torch.equal(torch.as_tensor(value), torch.as_tensor(shadow.state[name])), name


def test_hyper_parameters_are_those_of_the_moment_they_were_taken():
    inner = torch.optim.SGD(two_groups(), lr=torch.tensor(0.5))
    options = options_of(inner)
    assert are_equal(options, options_of(inner))
    inner.param_groups[0]["lr"].fill_(2.0)
    assert not are_equal(options, options_of(inner))
    part = nn.Parameter(torch.ones(4))
    part.grad = torch.ones(4)
    step_apart(inner, options, [Apart(0, part, {})])
    assert torch.equal(part, torch.full((4,), 0.5))


def test_a_second_fill_uses_the_buffers_of_the_first():
    tensor = nn.Parameter(torch.randn(5))
    shadow = Shadow(tensor)
    shadow.fill(tensor, {"exp_avg": torch.ones(5), "step": 3})
    buffer = shadow.state["exp_avg"]
    shadow.fill(tensor, {"exp_avg": torch.zeros(5), "step": 4})
    assert shadow.state["exp_avg"] is buffer
    assert buffer.sum() == 0
    assert shadow.nbytes() == 2 * 5 * 4


def test_readings_notice_writes_through_views_and_other_tensors():
    base = torch.zeros(10)
    piece = nn.Parameter(base[2:5])
    readings = Readings([piece])
    assert readings.are_current([piece])
    assert not readings.are_current([piece, base])
    assert not readings.are_current([nn.Parameter(base[2:5])])
    base[:3].copy_(torch.ones(3))
    assert not readings.are_current([piece])


def test_an_optimizer_that_needs_whole_parameters_is_refused():
    with pytest.raises(ConfigError, match=r"zero_optimization\.zenflow.*Lamb.*element by element"):
        require_elementwise(Lamb([nn.Parameter(torch.ones(3))], lr=0.1), "zero_optimization.zenflow")
