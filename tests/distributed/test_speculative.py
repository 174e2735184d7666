"""Speculative steps: whatever happens between backward and step, the numbers are those of a plain run, bit for bit."""

from __future__ import annotations

import itertools
import threading
from collections.abc import Callable
from typing import Any

import pytest
import torch

from fullspeed.base.errors import ConfigError, UpdateError
from fullspeed.engine.engine import Engine
from fullspeed.engine.initialize import initialize
from fullspeed.optim.factory import declare_elementwise
from fullspeed.optim.lamb import Lamb
from fullspeed.sharding.access import (
    safe_get_full_grad,
    safe_set_full_fp32_param,
    safe_set_full_grad,
    safe_set_full_optimizer_state,
    safe_set_local_grad,
)
from fullspeed.sharding.speculative import SpeculativeStepper
from tests.models import stack
from tests.parity.beside import adamw, square, vectors, zero_config
from tests.ranks import ranks

SPECULATIVE = {"offload_optimizer": {"device": "cpu", "super_offload": True}}
Edit = Callable[[Engine, int], None]


def nothing(engine: Engine, step: int) -> None:
    pass


def make(stage: int, zero: dict[str, Any], optimizer: Any = adamw, **sections: Any) -> Engine:
    config = zero_config(stage, accum=sections.pop("accum", 1), clip=sections.pop("clip", 0.0), **zero)
    return initialize(model=stack(), optimizer=optimizer, config=config | sections)[0]


def backward(engine: Engine, step: int, micro: int = 0) -> torch.Tensor:
    x = vectors(engine.world_size, step, micro)[engine.global_rank].to(engine.get_data_types()[0])
    loss = square(engine, x).float()
    engine.backward(loss)
    return loss.detach()


def run(engine: Engine, edit: Edit, steps: int = 4) -> list[torch.Tensor]:
    """Every loss and norm, and at the end the weights; `edit` comes between the last backward and the step."""
    seen = []
    for step in range(steps):
        for micro in range(engine.gradient_accumulation_steps()):
            seen.append(backward(engine, step, micro))
            if engine.is_gradient_accumulation_boundary():
                edit(engine, step)
            engine.step()
        seen.append(torch.tensor(engine.get_global_grad_norm()))
    engine.destroy()
    return seen + [param.detach().clone() for param in engine.module.parameters()]


def compare(stage: int, edit: Edit = nothing, **sections: Any) -> SpeculativeStepper:
    """Train plainly and speculatively; every number must be equal."""
    plain = run(make(stage, {}, **sections), edit)
    engine = make(stage, SPECULATIVE, **sections)
    stepper = engine.optimizer.stepper
    assert isinstance(stepper, SpeculativeStepper)
    found = run(engine, edit)
    assert len(found) == len(plain)
    assert all(torch.equal(mine, other) for mine, other in zip(found, plain, strict=True))
    return stepper


@ranks(1, 2)
def test_every_guess_holds_where_nothing_is_clipped(rank, world_size):
    cases = [{}, {"accum": 2, "clip": 1e6}, {"bf16": {"enabled": True}}]
    for stage, sections in itertools.product((1, 2, 3), cases):
        stepper = compare(stage, **sections)
        assert stepper.num_taken > 4
        assert stepper.num_redone == 0


@ranks(2)
@pytest.mark.parametrize("stage", [1, 3])
def test_clipping_and_overflow_are_noticed_at_the_step(rank, world_size, stage):
    stepper = compare(stage, clip=0.1)
    assert stepper.num_taken == 0
    assert stepper.num_redone > 4
    # Gradients times 2^18 overflow; each skipped step halves the scale until they fit.
    fp16 = {"enabled": True, "initial_scale_power": 18, "hysteresis": 1, "loss_scale_window": 2}
    overflows = []

    def look(engine: Engine, step: int) -> None:
        overflows.append(engine.skipped_steps)

    stepper = compare(stage, look, fp16=fp16)
    assert overflows[-1] > 0
    assert stepper.num_taken > 0


def replace_grad(engine: Engine, step: int) -> None:
    param = next(engine.module.parameters())
    safe_set_full_grad(param, safe_get_full_grad(param) * 0.5)


def replace_local_grad(engine: Engine, step: int) -> None:
    param = next(engine.module.parameters())
    if param in engine.optimizer.owned:
        safe_set_local_grad(param, torch.zeros(engine.optimizer.owned[param].tensor.shape))


def replace_master(engine: Engine, step: int) -> None:
    param = next(engine.module.parameters())
    safe_set_full_fp32_param(param, torch.full(param.shape, 0.1 * step))


def replace_moment(engine: Engine, step: int) -> None:
    param = next(engine.module.parameters())
    if step:
        safe_set_full_optimizer_state(param, torch.full(param.shape, 0.1), "exp_avg_sq")


def change_lr(engine: Engine, step: int) -> None:
    engine.optimizer.param_groups[0]["lr"] = 0.1 / (step + 1)


def backward_again(engine: Engine, step: int) -> None:
    backward(engine, step + 100)


def forget(engine: Engine, step: int) -> None:
    engine.zero_grad()
    backward(engine, step + 100)


@ranks(2)
@pytest.mark.parametrize("stage", [1, 3])
def test_e6_what_is_edited_between_backward_and_step_counts(rank, world_size, stage):
    for edit in (replace_grad, replace_local_grad, replace_master, replace_moment):
        stepper = compare(stage, edit)
        assert rank == 1 or stepper.num_redone > 0, edit  # the first parameter lies on rank 0
        assert stepper.num_taken > stepper.num_redone, edit  # groups that were not edited
    stepper = compare(stage, change_lr)
    assert stepper.num_taken == 0
    for edit in (backward_again, forget):
        stepper = compare(stage, edit)
        assert stepper.num_taken > 0, edit
        assert stepper.num_redone == 0, edit  # the second backward's reductions are stepped in its course


@ranks(1)
def test_a_group_is_stepped_before_backward_is_over(rank, world_size):
    """And what others may read stays as it was until the step."""
    engine = make(3, SPECULATIVE)
    stepper, first = engine.optimizer.stepper, engine.runtime.groups[0]
    before = [group.master.clone() for group in engine.runtime.groups]
    done_early = []
    weight = first.params[0]
    weight.register_hook(
        lambda grad: done_early.append([guess.done.exception() for guess in stepper._guesses.values()])
    )
    backward(engine, 0)
    assert done_early[0]
    assert set(done_early[0]) == {None}
    stepper._worker.wait([guess.done for guess in stepper._guesses.values()])
    groups = engine.runtime.groups
    assert all(torch.equal(group.master, value) for group, value in zip(groups, before, strict=True))
    masters = sum(param.numel() for param in engine.module.parameters()) * 4
    num_params = len(list(engine.module.parameters()))
    # Masters and two moments once more, and a step count of each parameter.
    assert engine.memory_bytes()["shadow"] == 3 * masters + 4 * num_params
    engine.step()
    assert all(not torch.equal(group.master, value) for group, value in zip(groups, before, strict=True))


@declare_elementwise
class Fragile(torch.optim.SGD):
    """Steps in the main thread only."""

    def step(self, closure: Any = None) -> Any:
        if threading.current_thread() is not threading.main_thread():
            raise ArithmeticError("not here")
        return super().step(closure)


@ranks(2)
def test_a_failure_in_the_background_is_raised_at_the_step_on_every_rank(rank, world_size):
    kind = Fragile if rank == 1 else declare_elementwise(type("Sturdy", (torch.optim.SGD,), {}))
    engine = make(2, SPECULATIVE, optimizer=lambda params: kind(params, lr=0.1))
    backward(engine, 0)
    with pytest.raises(UpdateError, match="rank 1: an update in the background failed: ArithmeticError: not here"):
        engine.step()


@ranks(1)
def test_an_optimizer_that_needs_whole_parameters_is_refused(rank, world_size):
    with pytest.raises(ConfigError, match=r"super_offload.*Lamb.*element by element"):
        make(2, SPECULATIVE, optimizer=lambda params: Lamb(params, lr=0.1))
