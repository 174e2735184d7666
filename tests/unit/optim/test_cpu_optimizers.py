"""Optimizers for host memory: torch's numbers and state dicts, 16-bit gradients and copies, and what they refuse."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from fullspeed.base.errors import ConfigError, UsageError
from fullspeed.kernels.native import needs_native
from fullspeed.kernels.registry import using
from fullspeed.optim.cpu import CPUAdagrad, CPUAdam, CPULion
from fullspeed.optim.lion import Lion

KERNELS = ["torch"] if needs_native(torch.device("cpu")) else ["torch", "native"]
PAIRS = {
    "adamw": (
        lambda params: CPUAdam(params, lr=0.01, weight_decay=0.1),
        lambda params: torch.optim.AdamW(params, lr=0.01, weight_decay=0.1),
    ),
    "adam": (
        lambda params: CPUAdam(params, 0.01, betas=(0.8, 0.9), weight_decay=0.1, adamw_mode=False),
        lambda params: torch.optim.Adam(params, lr=0.01, betas=(0.8, 0.9), weight_decay=0.1),
    ),
    "adagrad": (
        lambda params: CPUAdagrad(params, lr=0.05, weight_decay=0.1),
        lambda params: torch.optim.Adagrad(params, lr=0.05, weight_decay=0.1),
    ),
    "lion": (
        lambda params: CPULion(params, lr=0.01, weight_decay=0.1),
        lambda params: Lion(params, lr=0.01, weight_decay=0.1),
    ),
}


@pytest.fixture(params=KERNELS)
def kernel(request):
    with using(optimizer_update=request.param):
        yield request.param


def make_params(dtype: torch.dtype = torch.float32) -> list[nn.Parameter]:
    generator = torch.Generator().manual_seed(2)
    shapes = ((4, 3), (5,), (0,), (2, 3, 4, 4), ())
    params = [nn.Parameter(torch.randn(shape, generator=generator).to(dtype)) for shape in shapes]
    params[3].data = params[3].data.to(memory_format=torch.channels_last)
    return params


def train(optimizer: torch.optim.Optimizer, steps: range) -> None:
    for step in steps:
        generator = torch.Generator().manual_seed(step)
        for index, param in enumerate(p for group in optimizer.param_groups for p in group["params"]):
            grad = torch.randn(param.shape, generator=generator).to(param.dtype)
            param.grad = None if (index + step) % 4 == 0 else grad
        optimizer.step()


def assert_equal(mine: list[nn.Parameter], theirs: list[nn.Parameter], tolerance: float = 1e-6) -> None:
    for a, b in zip(mine, theirs, strict=True):
        torch.testing.assert_close(a, b, rtol=tolerance, atol=tolerance)


@pytest.mark.parametrize("name", PAIRS)
def test_steps_are_torchs(name, kernel):
    mine, theirs = make_params(), make_params()
    ours, reference = PAIRS[name][0](mine), PAIRS[name][1](theirs)
    train(ours, range(1, 7))
    train(reference, range(1, 7))
    assert_equal(mine, theirs)
    assert not torch.equal(mine[0], make_params()[0])
    assert float(ours.state[mine[1]]["step"]) == 5 if "step" in ours.state[mine[1]] else False


def test_param_groups_have_their_own_settings(kernel):
    def groups(params):
        return [{"params": params[:2], "lr": 0.1, "betas": (0.5, 0.6)}, {"params": params[2:], "weight_decay": 0.3}]

    mine, theirs = make_params(), make_params()
    train(CPUAdam(groups(mine), lr=0.01), range(1, 5))
    train(torch.optim.AdamW(groups(theirs), lr=0.01, weight_decay=0), range(1, 5))
    assert_equal(mine, theirs)


@pytest.mark.parametrize("name", ["adamw", "adam", "adagrad"])
@pytest.mark.parametrize("is_to_torch", [True, False])
def test_training_goes_on_from_the_other_kinds_state_dict(name, is_to_torch, kernel):
    first, second = PAIRS[name] if is_to_torch else PAIRS[name][::-1]
    params, whole = make_params(), make_params()
    optimizer, straight = first(params), first(whole)
    train(optimizer, range(1, 4))
    other = second(params)
    other.load_state_dict(optimizer.state_dict())
    train(other, range(4, 7))
    train(straight, range(1, 7))
    assert_equal(params, whole)


def test_16_bit_gradients_are_read_and_copies_written_in_the_same_step(kernel):
    master, reference = (nn.Parameter(torch.randn(100, generator=torch.Generator().manual_seed(1))) for _ in range(2))
    grad, copy = torch.randn(100).bfloat16(), torch.zeros(100, dtype=torch.bfloat16)
    ours, theirs = CPUAdam([master], lr=0.01), torch.optim.AdamW([reference], lr=0.01, weight_decay=0)
    ours.attach(master, grad=grad, copy=copy)
    for _ in range(3):
        reference.grad = grad.float()
        ours.step()
        theirs.step()
        assert torch.equal(copy, master.detach().bfloat16())
        grad.mul_(-1.5)
    assert_equal([master], [reference])


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_16_bit_parameters_keep_fp32_states_also_through_a_state_dict(dtype, kernel):
    params, whole = make_params(dtype), make_params(dtype)
    optimizer, straight = CPUAdam(params, lr=0.01), CPUAdam(whole, lr=0.01)
    train(optimizer, range(1, 4))
    saved = optimizer.state_dict()
    loaded = CPUAdam(params, lr=0.01)
    loaded.load_state_dict(saved)
    assert loaded.state[params[0]]["exp_avg"].dtype == torch.float32
    train(loaded, range(4, 6))
    train(straight, range(1, 6))
    assert_equal(params, whole, 0)


def test_states_follow_bf16_parameters_without_fp32_states(kernel):
    params = make_params(torch.bfloat16)
    optimizer = CPUAdam(params, lr=0.01, fp32_optimizer_states=False)
    train(optimizer, range(1, 3))
    assert optimizer.state[params[0]]["exp_avg_sq"].dtype == torch.bfloat16


def test_a_closure_runs_with_autograd_on(kernel):
    param = nn.Parameter(torch.ones(3))
    optimizer = CPULion([param], lr=0.5)

    def closure():
        loss = param.square().sum()
        loss.backward()
        return loss

    assert optimizer.step(closure).item() == 3
    assert param.tolist() == [0.5] * 3


def test_what_cannot_be_stepped_is_refused():
    with pytest.raises(ConfigError, match="amsgrad"):
        CPUAdam(make_params(), amsgrad=True)
    with pytest.raises(UsageError, match="float64"):
        CPUAdam(make_params(torch.float64))
    with pytest.raises(UsageError, match="meta"):
        CPUAdagrad([nn.Parameter(torch.empty(2, device="meta"))])
    with pytest.raises(UsageError, match="fp32_optimizer_states"):
        CPUAdam(make_params(torch.float16), fp32_optimizer_states=False)
    embedding = nn.Embedding(4, 2, sparse=True)
    embedding(torch.tensor([1])).sum().backward()
    with pytest.raises(UsageError, match="sparse"):
        CPUAdam(embedding.parameters()).step()
    amsgrad = torch.optim.AdamW(make_params(), amsgrad=True)
    train(amsgrad, range(1, 2))
    with pytest.raises(UsageError, match="amsgrad"):
        CPUAdam(make_params()).load_state_dict(amsgrad.state_dict())
    param = nn.Parameter(torch.zeros(3))
    for wrong in (torch.zeros(3), torch.zeros(4, dtype=torch.bfloat16), torch.zeros(6, dtype=torch.bfloat16)[::2]):
        with pytest.raises(UsageError, match="attach"):
            CPUAdam([param]).attach(param, copy=wrong)
