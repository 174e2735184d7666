"""Both ways to copy past the caches copy every byte and no other, at any alignment and length."""

from __future__ import annotations

import pytest
import torch

from fullspeed.kernels import native
from fullspeed.kernels.copy import copy_past_caches
from fullspeed.kernels.registry import using

CPU = torch.device("cpu")


@pytest.mark.parametrize("implementation", ["native", "torch"])
@pytest.mark.parametrize("length", [0, 1, 63, 64, 65, 127, 128, 1000, 70_001])
def test_every_byte_and_no_other(implementation, length):
    if implementation == "native" and (obstacle := native.needs_native(CPU)):
        pytest.skip(obstacle)
    source = torch.randint(0, 255, (length + 128,), dtype=torch.uint8)
    with using(staging_copy=implementation):
        for begin, source_begin in ((0, 0), (1, 0), (63, 7), (64, 64), (17, 33)):
            target = torch.full((length + 128,), 255, dtype=torch.uint8)
            copy_past_caches(target[begin : begin + length], source[source_begin : source_begin + length])
            assert torch.equal(target[begin : begin + length], source[source_begin : source_begin + length])
            assert target[:begin].eq(255).all()
            assert target[begin + length :].eq(255).all()
