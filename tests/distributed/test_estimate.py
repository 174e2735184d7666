"""The memory formulas beside what an engine really holds on two ranks."""

from __future__ import annotations

import torch
from torch import nn

from fullspeed.engine.initialize import initialize
from fullspeed.sharding.estimate import FP32_ADAM, MIXED_ADAM, count_params, model_state_bytes
from tests.parity.beside import square, zero_config
from tests.ranks import ranks

DIM = 64  # a multiple of what slots are aligned to: no padding, so the formulas hold to the byte


def _adam(params):
    return torch.optim.Adam(params, lr=1e-3)


def _held(stage, dtype):
    torch.manual_seed(0)
    model = nn.Sequential(*(nn.Linear(DIM, DIM) for _ in range(3)))
    bf16 = {"bf16": {"enabled": dtype is torch.bfloat16}}
    engine, *_ = initialize(model=model, optimizer=_adam, config=zero_config(stage) | bf16)
    num_params = count_params(engine.module).total
    for _ in range(2):  # states exist from the first step on, gradients until it
        engine.backward(square(engine, torch.ones(2, DIM, dtype=dtype)))
        held = engine.memory_bytes()
        engine.step()
    engine.destroy()
    assert num_params == count_params(model).total == 3 * (DIM * DIM + DIM)
    return num_params, held


@ranks(2)
def test_formulas_are_what_an_engine_holds(rank, world_size):
    for stage in (0, 1, 2, 3):
        for dtype, element in ((torch.bfloat16, MIXED_ADAM), (torch.float32, FP32_ADAM)):
            num_params, held = _held(stage, dtype)
            expected = model_state_bytes(num_params, world_size, stage, element)
            for name, nbytes in expected._asdict().items():
                # Adam also counts its steps: one fp32 number for each of at most six pieces.
                slack = 6 * 4 if name == "optimizer" else 0
                assert nbytes <= held[name] <= nbytes + slack, (stage, dtype, name, held)
