"""All generators go on where they were."""

from __future__ import annotations

import random

import numpy as np
import torch

from fullspeed.checkpoint.objects import pack, unpack
from fullspeed.checkpoint.rng import restore_rng_state, rng_state


def draw() -> tuple[float, float, float, float]:
    return random.random(), float(np.random.rand()), float(np.random.randn()), float(torch.rand(()))


def test_round_trip_through_a_file(tmp_path):
    device = torch.device("cpu")
    draw()
    path = tmp_path / "rng.pt"
    path.write_bytes(pack(rng_state(device)))
    expected = draw()
    assert draw() != expected
    restore_rng_state(unpack(path), device)
    assert draw() == expected
