"""16-bit training: the same numbers at every stage, close to fp32; loss scale and overflow alike on all ranks."""

from __future__ import annotations

import itertools

import pytest
import torch

from fullspeed.base.errors import ConfigError, LossScaleError, UsageError
from fullspeed.engine.initialize import initialize
from fullspeed.sharding.access import safe_get_full_fp32_param
from tests.models import deep_mlp, mlp
from tests.parity.beside import Pair, adamw, difference, sgd, square, vectors, zero_config
from tests.ranks import ranks

STAGES = (0, 1, 2, 3)
DTYPES = {"bf16": torch.bfloat16, "fp16": torch.float16}


def _sections(name):
    return {name: {"enabled": True} | ({"loss_scale": 64} if name == "fp16" else {})}


def _train(rank, world_size, config, dtype, num_steps=10, accum=1):
    """Master weights and norms after some updates."""
    model = deep_mlp()
    engine, *_ = initialize(model=model, optimizer=adamw, config=config)
    norms = []
    for step in range(num_steps):
        for micro in range(accum):
            engine.backward(square(engine, vectors(world_size, step, micro)[rank].to(dtype)).float())
            engine.step()
        norms.append(engine.get_global_grad_norm())
    masters = {name: safe_get_full_fp32_param(param) for name, param in model.named_parameters()}
    engine.destroy()
    assert all(param.dtype == dtype for param in model.parameters())
    for name, param in model.named_parameters():
        assert torch.equal(param, masters[name].to(dtype)), "stored values are the rounded masters"
    return masters, norms


@ranks(2, 4)
def test_16_bit_stages_agree(rank, world_size):
    """Stages 0 to 3 after ten updates. Within one micro-batch per update all arithmetic is the same but the order of
    additions; gradients travel in 16 bits, so a last-bit difference there may move an AdamW update by a small part
    of lr = 1e-2: masters agree to 1e-3, norms to 2 %. Against fp32 on the same data: 2e-2."""
    exact, _ = _train(rank, world_size, zero_config(0), torch.float32)
    for name, dtype in DTYPES.items():
        results = [_train(rank, world_size, zero_config(stage) | _sections(name), dtype) for stage in STAGES]
        masters, norms = results[0]
        for others, other_norms in results[1:]:
            worst = max((masters[fqn] - others[fqn]).abs().max().item() for fqn in masters)
            assert worst <= 1e-3, (name, worst)
            assert other_norms == pytest.approx(norms, rel=2e-2)
        drift = max((masters[fqn] - exact[fqn]).abs().max().item() for fqn in masters)
        assert 0 < drift < 2e-2, (name, drift)


@ranks(2)
def test_fp32_accumulation_makes_accumulated_stages_agree(rank, world_size):
    """Three micro-batches an update, summed in fp32: the same tolerance holds with accumulation."""
    for name, dtype in DTYPES.items():
        extra = _sections(name) | {"data_types": {"grad_accum_dtype": "fp32"}, "communication_data_type": "fp32"}
        results = [
            _train(rank, world_size, zero_config(stage, accum=3) | extra, dtype, accum=3, num_steps=5)[0]
            for stage in STAGES
        ]
        for others in results[1:]:
            assert max((results[0][fqn] - others[fqn]).abs().max().item() for fqn in others) <= 1e-4, name


@ranks(2)
def test_a13_bf16_with_every_accumulation_dtype(rank, world_size):
    """bf16 x stages 0 to 3 x data_types absent, bf16, fp32: all build and step."""
    for stage, accum_dtype in itertools.product(STAGES, (None, "bf16", "fp32")):
        config = zero_config(stage, accum=2) | {"bf16": {"enabled": True}}
        if accum_dtype:
            config["data_types"] = {"grad_accum_dtype": accum_dtype}
        model = mlp()
        engine, *_ = initialize(model=model, optimizer=adamw, config=config)
        for micro in range(4):
            engine.backward(square(engine, vectors(world_size, 0, micro)[rank].bfloat16()))
            engine.step()
        assert engine.global_steps == 2
        expected = torch.float32 if accum_dtype == "fp32" else torch.bfloat16
        assert engine.get_data_types() == (torch.bfloat16, expected)
        assert {group.dtypes.accum for group in engine.runtime.groups} == {expected}
        engine.destroy()
        assert max(difference(model, mlp()).values()) > 1e-3


@ranks(2)
def test_fp32_inputs_to_a_16_bit_model(rank, world_size):
    """Inputs as the user's fp32 tensors under `auto_cast`."""
    config = zero_config(2) | {"fp16": {"enabled": True, "loss_scale": 8, "auto_cast": True}}
    engine, *_ = initialize(model=mlp(), optimizer=sgd, config=config)
    engine.backward(square(engine, torch.ones(4, 5)).float())
    engine.step()
    assert engine.was_step_applied()


# ------------------------------------------------------------------------------------------------ overflow


def _fp16(stage, **fp16):
    return zero_config(stage) | {"fp16": {"enabled": True, **fp16}}


def _poison(engine, rank, on_rank, value=float("inf")):
    """A hook that makes one named weight's gradient infinite on one rank only."""
    param = engine.module[2].weight
    if rank != on_rank:
        return None
    return param.register_hook(lambda grad: torch.full_like(grad, value))


def _step(engine, world_size, rank, step=0):
    batch = vectors(world_size, step, 0)[rank].half()
    engine.backward(square(engine, batch).float())
    engine.step()


@ranks(2)
def test_f2_hysteresis(rank, world_size):
    """Hysteresis 2: the first overflow leaves the scale and says 2->1, the second halves; weights stay."""
    for stage in STAGES:
        config = _fp16(stage, initial_scale_power=8, hysteresis=2)
        engine, optimizer, *_ = initialize(model=mlp(), optimizer=sgd, config=config)
        before = [safe_get_full_fp32_param(param) for param in engine.module.parameters()]
        hook = _poison(engine, rank, on_rank=1)
        for expected, text in ((256, "2->1"), (128, "256 -> 128")):
            _step(engine, world_size, rank)
            assert optimizer.overflow
            assert not engine.was_step_applied()
            assert optimizer.loss_scale == expected
            assert text in optimizer.last_change.message
        assert engine.skipped_steps == 2
        assert engine.get_global_grad_norm() == -1
        if hook:
            hook.remove()
        for param, old in zip(engine.module.parameters(), before, strict=True):
            assert torch.equal(safe_get_full_fp32_param(param), old)
        _step(engine, world_size, rank)
        assert engine.was_step_applied()
        assert engine.skipped_steps == 2
        engine.destroy()


@ranks(2, 4)
def test_f4_overflow_at_the_smallest_scale(rank, world_size):
    """Infinite on rank 1 only: all ranks skip, then all raise with the parameter's name, the rank and the step."""
    for stage in STAGES:
        for value in (float("inf"), float("nan")):
            config = _fp16(stage, initial_scale_power=1, hysteresis=1, min_loss_scale=1)
            engine, optimizer, *_ = initialize(model=mlp(), optimizer=sgd, config=config)
            _step(engine, world_size, rank)
            assert engine.was_step_applied()
            _poison(engine, rank, on_rank=1, value=value)
            _step(engine, world_size, rank)
            assert not engine.was_step_applied()
            assert optimizer.loss_scale == 1
            with pytest.raises(LossScaleError) as caught:
                _step(engine, world_size, rank)
            text = str(caught.value)
            assert "2.weight" in text
            assert "rank 1" in text
            assert "minimum 1" in text
            engine.destroy()


@ranks(2)
def test_f5_a_static_scale_stays(rank, world_size):
    """`loss_scale: 128` stays 128, also through an overflow."""
    for stage in STAGES:
        engine, optimizer, *_ = initialize(model=mlp(), optimizer=sgd, config=_fp16(stage, loss_scale=128))
        for step in range(3):
            _step(engine, world_size, rank, step)
        assert optimizer.loss_scale == optimizer.cur_scale == 128
        assert not engine.dynamic_loss_scale()
        _poison(engine, rank, on_rank=0)
        _step(engine, world_size, rank)
        assert not engine.was_step_applied()
        assert optimizer.loss_scale == 128
        engine.destroy()


@ranks(2)
def test_f7_counters_of_skipped_steps(rank, world_size):
    """A skipped update counts in global_steps and skipped_steps; schedule and optimizer stand still."""
    for stage in STAGES:
        config = _fp16(stage, initial_scale_power=8, hysteresis=4) | {
            "optimizer": {"type": "AdamW", "params": {"lr": 1e-2}},
            "scheduler": {"type": "WarmupLR", "params": {"warmup_num_steps": 10, "warmup_type": "linear"}},
        }
        engine, optimizer, _, scheduler = initialize(model=mlp(), config=config)
        for _ in range(2):
            _step(engine, world_size, rank)
        lr, iteration = engine.get_lr(), scheduler.last_batch_iteration
        hook = _poison(engine, rank, on_rank=1)
        _step(engine, world_size, rank)
        if hook:
            hook.remove()
        assert (engine.global_steps, engine.skipped_steps) == (3, 1)
        assert (engine.get_lr(), scheduler.last_batch_iteration) == (lr, iteration)
        _step(engine, world_size, rank)
        assert (engine.global_steps, engine.skipped_steps) == (4, 1)
        assert engine.get_lr() != lr
        steps = {int(state["step"]) for state in optimizer.state.values()}
        assert steps == {3}
        engine.destroy()


@ranks(2)
def test_bf16_overflow(rank, world_size):
    """bf16 has no scale to lower, but an infinite gradient does not reach the weights either."""
    for stage in STAGES:
        for checks in (True, False):
            config = zero_config(stage) | {"bf16": {"enabled": True, "check_grad_overflow": checks}}
            engine, *_ = initialize(model=mlp(), optimizer=sgd, config=config)
            _poison(engine, rank, on_rank=1)
            engine.backward(square(engine, torch.ones(4, 5).bfloat16()))
            engine.step()
            assert engine.was_step_applied() != checks
            weight = safe_get_full_fp32_param(engine.module[2].weight)
            assert torch.isfinite(weight).all() == checks
            engine.destroy()


@ranks(2)
def test_a_plain_backward_needs_the_scale(rank, world_size):
    """With a loss scale, `loss.backward()` is an error that says what to call; `engine.scale(loss)` works."""
    for stage in STAGES:
        engine, *_ = initialize(model=mlp(), optimizer=sgd, config=_fp16(stage, loss_scale=64))
        batch = torch.ones(4, 5).half()
        with pytest.raises(UsageError, match=r"engine\.scale"):
            square(engine, batch).float().backward()
        engine.zero_grad()
        engine.scale(square(engine, batch).float()).backward()
        engine.step()
        assert engine.was_step_applied()
        plain = mlp()
        square(plain, torch.ones(4, 5)).backward()
        expected = torch.stack([param.grad.norm() for param in plain.parameters()]).norm().item()
        assert engine.get_global_grad_norm() == pytest.approx(expected, rel=5e-3)
        engine.destroy()


# ------------------------------------------------------------------------------------- scaling and wires


@ranks(2, 4)
def test_predivide_and_prescale(rank, world_size):
    """Where the division happens changes no number."""
    for stage in STAGES:
        for extra in ({"gradient_predivide_factor": 2.0}, {"prescale_gradients": True},
                      {"prescale_gradients": True, "gradient_predivide_factor": 4.0}):  # fmt: skip
            Pair(rank, world_size, mlp, zero_config(stage, accum=2) | extra, adamw).train(3).check()


@ranks(2)
def test_sum_instead_of_mean(rank, world_size):
    """`gradient_allreduce_op: sum` leaves out the division by the ranks; stage 3 refuses it."""
    for stage in (0, 1, 2):
        config = zero_config(stage, accum=2) | {"gradient_allreduce_op": "sum"}
        pair = Pair(rank, world_size, mlp, config, sgd)
        for step in range(3):
            for micro in range(2):
                batches = vectors(world_size, step, micro)
                pair.engine.backward(square(pair.engine, batches[rank]))
                pair.engine.step()
                pair.reference_backward(batches, lambda module, x: world_size * square(module, x))
            pair.reference_step()
        pair.check()
    with pytest.raises(ConfigError, match="gradient_allreduce_op"):
        initialize(model=mlp(), optimizer=sgd, config=zero_config(3) | {"gradient_allreduce_op": "sum"})


@ranks(2)
def test_communication_dtype(rank, world_size):
    """fp32 training whose gradients travel as bf16: rounded to 8 bits, never wrong."""
    for stage in STAGES:
        config = zero_config(stage, accum=2) | {"communication_data_type": "bf16"}
        pair = Pair(rank, world_size, mlp, config, lambda params: torch.optim.SGD(params, lr=0.1))
        pair.tolerance = 1e-2
        pair.train(3)
        assert {group.dtypes.wire for group in pair.engine.runtime.groups} == {torch.bfloat16}
        pair.engine.destroy()
        worst = max(difference(pair.model, pair.reference).values())
        assert 0 < worst < 5e-3, worst


@ranks(2)
def test_torch_autocast(rank, world_size):
    """Forward under autocast, parameters and updates in fp32; equal to torch.autocast by hand."""
    for stage in STAGES:
        config = zero_config(stage, accum=2) | {
            "torch_autocast": {"enabled": True, "dtype": "bf16"},
            "communication_data_type": "fp32",
        }
        pair = Pair(rank, world_size, mlp, config, adamw)
        dtypes = []
        for step in range(3):
            for micro in range(2):
                batches = vectors(world_size, step, micro)
                out = pair.engine(batches[rank])
                dtypes.append(out.dtype)
                pair.engine.backward((out - 0.5).square().mean().float())
                pair.engine.step()
                for batch in batches:  # a context each: within one, casts of weights are shared
                    with torch.autocast("cpu", torch.bfloat16):
                        out = pair.reference(batch)
                    ((out - 0.5).square().mean().float() / world_size / 2).backward()
            pair.reference_step()
        assert set(dtypes) == {torch.bfloat16}
        assert {param.dtype for param in pair.model.parameters()} == {torch.float32}
        pair.check()
