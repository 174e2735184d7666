"""Bytes each rank holds: ZeRO's formulas for 16-bit Adam (arXiv:1910.02054, section 3), and real storages."""

from __future__ import annotations

import gc

import torch
from torch import nn

from fullspeed.engine.initialize import initialize
from tests.parity.beside import square, zero_config
from tests.ranks import ranks

DIM, LAYERS = 256, 6
NUMEL = LAYERS * (DIM * DIM + DIM)
LAYER = DIM * DIM + DIM


def _model():
    torch.manual_seed(0)
    return nn.Sequential(*(nn.Linear(DIM, DIM) for _ in range(LAYERS)))


def _adam(params):
    return torch.optim.Adam(params, lr=1e-3)


def _held(config, dtype):
    """Bytes by kind where each is largest: gradients just before the step, states after the first one."""
    engine, *_ = initialize(model=_model(), optimizer=_adam, config=config)
    x = torch.ones(2, DIM, dtype=dtype)
    engine.backward(square(engine, x))
    before = engine.memory_bytes()
    engine.step()
    engine.backward(square(engine, x))
    held = engine.memory_bytes()
    assert held["grads"] == before["grads"]
    assert before["optimizer"] == 0 < held["optimizer"]
    return engine, held


@ranks(4)
def test_bytes_of_bf16_adam(rank, world_size):
    """16P; 4P + 12P/N; 2P + 14P/N; 16P/N: two bytes for parameters, two for gradients, twelve for masters and
    moments. `live` (whole or widened values around their use) is counted apart."""
    n = world_size
    for stage, expected in enumerate((16, 4 + 12 / n, 2 + 14 / n, 16 / n)):
        engine, held = _held(zero_config(stage) | {"bf16": {"enabled": True}}, torch.bfloat16)
        shares = {
            "params": 2 / (n if stage == 3 else 1),
            "grads": 2 / (n if stage >= 2 else 1),
            "master": 4 / (n if stage >= 1 else 1),
            "optimizer": 8 / (n if stage >= 1 else 1),
        }
        for name, share in shares.items():
            assert abs(held[name] - share * NUMEL) <= 0.02 * share * NUMEL, (stage, name, held)
        total = sum(held[name] for name in shares)
        assert abs(total - expected * NUMEL) <= 0.02 * expected * NUMEL, (stage, held)
        assert held["live"] == 0, "outside forward and backward nothing is live"
        engine.destroy()


@ranks(4)
def test_bytes_of_fp32_adam(rank, world_size):
    """fp32 needs no masters: 16P again, as 4 + 4 + 8."""
    n = world_size
    for stage, expected in enumerate((16, 8 + 8 / n, 4 + 12 / n, 16 / n)):
        engine, held = _held(zero_config(stage), torch.float32)
        assert held["master"] == 0
        total = held["params"] + held["grads"] + held["optimizer"]
        assert abs(total - expected * NUMEL) <= 0.02 * expected * NUMEL, (stage, held)
        engine.destroy()


def _storage_bytes():
    gc.collect()
    storages = {}
    with torch._C.DisableTorchFunctionSubclass():
        for item in gc.get_objects():
            if isinstance(item, torch.Tensor) and item.layout == torch.strided and item.device.type == "cpu":
                storage = item.untyped_storage()
                storages[storage._cdata] = storage.nbytes()
    return sum(storages.values())


@ranks(4)
def test_real_storages_agree(rank, world_size):
    """Not what the engine says but what this process holds, after a step: gradients gone, the rest resident."""
    n = world_size
    for stage, expected in enumerate((4 + 4 + 8, 4 + 4 + 8 / n, 4 + 8 / n, 12 / n)):
        before = _storage_bytes()
        engine, *_ = initialize(model=_model(), optimizer=_adam, config=zero_config(stage))
        for _ in range(2):
            engine.backward(square(engine, torch.ones(2, DIM)))
            engine.step()
        held = _storage_bytes() - before
        # Stages 0 and 1 keep their gradient buffer allocated between steps.
        assert abs(held - expected * NUMEL) <= 0.02 * expected * NUMEL + 4096, (stage, held / NUMEL, expected)
        engine.destroy()
        del engine


@ranks(2, 4)
def test_live_values_stay_within_the_budget(rank, world_size):
    """Stage 3's gathered values: at most the budget, or what one demand needs beyond it."""
    for budget in (0, 2 * LAYER + 10, 4 * LAYER, 10**9):
        for prefetch in (0, 3 * LAYER):
            config = zero_config(
                3,
                accum=2,
                stage3_max_live_parameters=budget,
                stage3_prefetch_bucket_size=prefetch,
                stage3_max_reuse_distance=10**9,
            )
            engine, *_ = initialize(model=_model(), optimizer=_adam, config=config)
            for _ in range(3):
                for _ in range(2):
                    engine.backward(square(engine, torch.ones(2, DIM)))
                    engine.step()
            peak = engine.runtime.gatherer.peak_live_numel
            assert engine.memory_bytes()["peak_live"] == 4 * peak
            largest = max(group.numel for group in engine.runtime.groups)
            if budget == 10**9:
                assert peak == LAYERS * largest, "a large budget keeps everything between forward and backward"
            else:
                assert peak <= max(budget, largest), (budget, prefetch, peak / LAYER)
            engine.destroy()


@ranks(2)
def test_small_stages_hold_no_live_values_in_fp32(rank, world_size):
    """Whole parameters in their own dtype are computed with where they are."""
    for stage in (0, 1, 2):
        engine, held = _held(zero_config(stage), torch.float32)
        assert held["live"] == held["peak_live"] == 0
        engine.destroy()
