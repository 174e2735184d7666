"""Clipping: one global norm, unscaled, of the averaged gradients; and gradients the user changes before the step."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from fullspeed.base.errors import ConfigError
from fullspeed.engine.initialize import initialize
from fullspeed.sharding.access import (
    safe_get_full_fp32_param,
    safe_get_full_grad,
    safe_get_full_optimizer_state,
    safe_set_full_grad,
)
from tests.models import deep_mlp, mlp
from tests.parity.beside import Pair, adamw, difference, sgd, square, vectors, zero_config
from tests.ranks import ranks

STAGES = (0, 1, 2, 3)


@ranks(2, 4)
def test_e2_one_norm_over_all_groups(rank, world_size):
    """Two groups, one of which would clip alone and one not: both are scaled by the global factor."""

    def halves(module):
        return [{"params": list(module[0].parameters())}, {"params": list(module[2].parameters())}]

    for stage in STAGES:
        pair = Pair(rank, world_size, mlp, zero_config(stage, clip=0.1), sgd, groups=halves).train(4)
        assert min(pair.norms) > 0.1
        pair.check()


@ranks(2)
def test_clipping_above_the_norm_changes_nothing(rank, world_size):
    for stage in STAGES:
        pair = Pair(rank, world_size, mlp, zero_config(stage, clip=1e6), sgd).train(3)
        assert pair.engine.get_clipped_grad_norm() == pytest.approx(pair.norms[-1])
        pair.check()


@ranks(2)
def test_e7_the_limit_in_force_is_told(rank, world_size):
    """`engine.gradient_clipping()` is the effective value; the same key inside the optimizer is refused."""
    engine, *_ = initialize(model=mlp(), optimizer=sgd, config=zero_config(1, clip=0.7))
    assert engine.gradient_clipping() == 0.7
    config = zero_config(1) | {"optimizer": {"type": "AdamW", "params": {"lr": 1e-3, "max_grad_norm": 1.0}}}
    with pytest.raises(ConfigError, match="gradient_clipping"):
        initialize(model=mlp(), config=config)


@ranks(2)
def test_e3_norm_is_unscaled_with_the_scale_of_its_backward(rank, world_size):
    """fp16 with a dynamic scale that doubles after each good step: the norm stays the reference's."""
    for stage in STAGES:
        config = zero_config(stage, clip=0.1) | {
            "fp16": {"enabled": True, "initial_scale_power": 4, "loss_scale_window": 1, "hysteresis": 1}
        }
        model, plain = mlp(), mlp()
        engine, optimizer, *_ = initialize(model=model, optimizer=sgd, config=config)
        reference = sgd(plain.parameters())
        scales = []
        for step in range(5):
            batches = vectors(world_size, step, 0)
            scales.append(optimizer.loss_scale)
            engine.backward(square(engine, batches[rank].half()).float())
            engine.step()
            assert engine.was_step_applied()
            sum(square(plain, batch) / world_size for batch in batches).backward()
            norm = nn.utils.clip_grad_norm_(plain.parameters(), 0.1).item()
            reference.step()
            reference.zero_grad()
            # fp16 rounds weights and gradients to 11 bits.
            assert engine.get_global_grad_norm() == pytest.approx(norm, rel=5e-3)
            assert engine.get_clipped_grad_norm() == pytest.approx(0.1, rel=1e-3)
        assert scales[0] == 16
        assert len(set(scales)) > 2, "the scale never moved"
        engine.destroy()


@ranks(2, 4)
def test_e6_gradients_changed_between_backward_and_step(rank, world_size):
    """Every parameter's whole averaged gradient can be read and replaced; the step uses the new ones."""
    for stage in STAGES:
        for accum in (1, 2):
            pair = Pair(rank, world_size, deep_mlp, zero_config(stage, accum=accum, clip=0.05), adamw)
            for step in range(3):
                for micro in range(accum):
                    batches = vectors(world_size, step, micro)
                    pair.engine.backward(square(pair.engine, batches[rank]))
                    pair.reference_backward(batches)
                    if micro == accum - 1:
                        _double_and_shift(pair.model, pair.reference)
                    pair.engine.step()
                pair.reference_step()
            pair.check()


def _double_and_shift(model, reference):
    for param, other in zip(model.parameters(), reference.parameters(), strict=True):
        grad = safe_get_full_grad(param)
        assert grad.shape == param.shape
        assert torch.allclose(grad, other.grad, atol=1e-6)
        new = 2 * grad + 0.25
        safe_set_full_grad(param, new)
        assert torch.equal(safe_get_full_grad(param), new)
        other.grad.copy_(2 * other.grad + 0.25)


@ranks(2, 4)
def test_e6_values_and_states_can_be_read(rank, world_size):
    for stage in STAGES:
        pair = Pair(rank, world_size, deep_mlp, zero_config(stage), adamw)
        assert safe_get_full_optimizer_state(pair.model[0].weight, "exp_avg") is None
        pair.train(3)
        for param, other in zip(pair.model.parameters(), pair.reference.parameters(), strict=True):
            assert torch.allclose(safe_get_full_fp32_param(param), other, atol=1e-6)
            for key in ("exp_avg", "exp_avg_sq"):
                state = safe_get_full_optimizer_state(param, key)
                assert state.shape == param.shape
                assert torch.allclose(state, pair.reference_optimizer.state[other][key], atol=1e-6)
        pair.train(2).check()


@ranks(2)
def test_e6_gradients_of_16_bit_training(rank, world_size):
    """Read unscaled, whatever the loss scale."""
    for stage in STAGES:
        config = zero_config(stage) | {"fp16": {"enabled": True, "loss_scale": 128}}
        model, plain = mlp(), mlp()
        engine, *_ = initialize(model=model, optimizer=sgd, config=config)
        batches = vectors(world_size, 0, 0)
        engine.backward(square(engine, batches[rank].half()).float())
        sum(square(plain, batch) / world_size for batch in batches).backward()
        for param, other in zip(model.parameters(), plain.parameters(), strict=True):
            assert torch.allclose(safe_get_full_grad(param), other.grad, atol=2e-3)
            safe_set_full_grad(param, torch.full(param.shape, 0.5))
        before = [safe_get_full_fp32_param(param) for param in model.parameters()]
        engine.step()
        for param, old in zip(model.parameters(), before, strict=True):
            assert torch.allclose(safe_get_full_fp32_param(param), old - 5e-2 * 0.5, atol=1e-6)
        engine.destroy()


@ranks(2)
def test_whole_gradients_are_visible_as_grad(rank, world_size):
    """Stage 0 behaves like torch: `param.grad` is there between backward and step, and counts when changed."""
    pair = Pair(rank, world_size, mlp, zero_config(0), adamw)
    for step in range(3):
        batches = vectors(world_size, step, 0)
        pair.engine.backward(square(pair.engine, batches[rank]))
        pair.reference_backward(batches)
        for module in (pair.model, pair.reference):
            for param in module.parameters():
                param.grad.clamp_(-0.01, 0.01)
            if step == 1:
                module[0].weight.grad = torch.ones(7, 5)
            if step == 2:
                module[2].bias.grad = None
        mine = [param.grad for param in pair.model.parameters() if param.grad is not None]
        theirs = [param.grad for param in pair.reference.parameters() if param.grad is not None]
        assert len(mine) == len(theirs)
        assert all(torch.allclose(a, b, atol=1e-6) for a, b in zip(mine, theirs, strict=True))
        pair.engine.step()
        pair.reference_step(with_norm=step < 2)
    assert max(difference(pair.model, mlp()).values()) > 1e-3
    pair.check()
