"""The native library writes the bytes that plain PyTorch writes, and reads them to the same bits."""

from __future__ import annotations

import pytest
import torch

from fullspeed.kernels import native, quantize_native, quantize_torch
from fullspeed.kernels.format import BlockFormat
from fullspeed.kernels.quantize import DTYPES

LIBRARY = native.load()
pytestmark = pytest.mark.skipif(isinstance(LIBRARY, str), reason=f"the native library: {LIBRARY}")
SETS = () if isinstance(LIBRARY, str) else range(len(LIBRARY.instruction_sets))
NUMELS = (1, 2, 15, 47, 256, 257, 511, 4999, 200_001)


@pytest.mark.parametrize("instruction_set", SETS)
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("form", [BlockFormat(bits, block) for bits in (8, 4) for block in (2, 48, 256, 2048)])
def test_finite_values_give_the_same_bits(instruction_set, dtype, form):
    for numel in NUMELS:
        generator = torch.Generator().manual_seed(numel)
        values = torch.randn(3, 2, numel, generator=generator).mul(4).exp().sub(1).clamp(max=6e4).to(dtype)
        values[0, 0, : numel // 3] = 0
        values[1, 0] *= 1e-6 if dtype == torch.float16 else 1e-38  # subnormal
        values = values.transpose(0, 1)  # rows lie anywhere
        expected, found = (torch.zeros((2, 3, form.nbytes(numel)), dtype=torch.uint8) for _ in range(2))
        quantize_torch.quantize(values, expected, form)
        quantize_native.quantize_with(instruction_set, values, found, form)
        assert torch.equal(found, expected)
        for count in (1, 2):
            sums = [torch.full((3, numel), 7.0, dtype=dtype) for _ in range(2)]
            quantize_torch.dequantize_sum(expected[:count], sums[0], form)
            quantize_native.dequantize_sum_with(instruction_set, expected[:count], sums[1], form)
            assert torch.equal(sums[0], sums[1])


@pytest.mark.parametrize("instruction_set", SETS)
@pytest.mark.parametrize("form", [BlockFormat(8, 16), BlockFormat(4, 16)])
@pytest.mark.parametrize("bad", [float("inf"), -float("inf"), float("nan")])
def test_a_block_with_inf_or_nan_is_neither_hidden_nor_spread(instruction_set, form, bad):
    values = torch.linspace(-1, 1, 64)
    values[20] = bad
    message, out = torch.zeros((1, 1, form.nbytes(64)), dtype=torch.uint8), torch.empty(1, 64)
    quantize_native.quantize_with(instruction_set, values.view(1, 1, -1), message, form)
    quantize_native.dequantize_sum_with(instruction_set, message, out, form)
    is_finite = out[0].isfinite()
    assert not is_finite[16:32].any()
    assert is_finite[:16].all()
    assert is_finite[32:].all()
