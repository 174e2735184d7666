"""The Triton kernels write and read the same messages as plain PyTorch; by Triton's interpreter where there is no GPU.

A process of its own: Triton decides at import whether its interpreter runs.
"""

from __future__ import annotations

import os
import subprocess
import sys

import pytest
import torch

from fullspeed.kernels import quantize_torch
from fullspeed.kernels.format import BlockFormat

DTYPES = (torch.float32, torch.bfloat16, torch.float16)


def test_both_implementations_agree():
    pytest.importorskip("triton")
    has_gpu = torch.cuda.is_available()
    environment = os.environ if has_gpu else {**os.environ, "TRITON_INTERPRET": "1"}
    command = [sys.executable, __file__, "cuda" if has_gpu else "cpu"]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, check=False, timeout=250)
    assert done.returncode == 0, done.stderr[-3000:]
    assert "compared 72" in done.stdout


def compare(device: str) -> None:
    count = 0
    for bits in (8, 4):
        for block in (2, 48, 256):
            for numel in (1, 47, 257, 4999):
                for dtype in DTYPES:
                    _compare(BlockFormat(bits, block), numel, dtype, device)
                    count += 1
    print("compared", count)


def _compare(form: BlockFormat, numel: int, dtype: torch.dtype, device: str) -> None:
    from fullspeed.kernels import quantize_triton

    generator = torch.Generator().manual_seed(numel)
    values = torch.randn(2, 3, numel, generator=generator).to(device, dtype).transpose(0, 1)  # (3, 2, numel)
    values[2, 0, : numel // 2] = 0
    if numel > 50:
        values[0, 0, 5], values[1, 1, 50] = float("nan"), float("inf")
    plain = torch.zeros((3, 2, form.nbytes(numel)), dtype=torch.uint8, device=device)
    ours = plain.clone()
    quantize_torch.quantize(values, plain, form)
    quantize_triton.quantize(values, ours, form)
    results = []
    for module, messages in ((quantize_torch, plain), (quantize_triton, plain), (quantize_triton, ours)):
        # fp32: the interpreter cuts digits off where a device rounds to bf16.
        out = torch.empty((2, numel), dtype=torch.float32 if dtype == torch.bfloat16 else dtype, device=device)
        module.dequantize_sum(messages, out, form)
        results.append(out)
    expected, read, written = results
    is_finite = expected.isfinite()
    assert is_finite.any()
    assert torch.equal(is_finite, read.isfinite())
    assert torch.equal(is_finite, written.isfinite())
    # A device's division may differ in the last bit, and so a product.
    assert torch.allclose(expected[is_finite], read[is_finite], rtol=1e-6, atol=0)
    # ... or a value half-way between two codes go to the other one.
    step = values[values.isfinite()].abs().max().item() / form.largest_code
    assert (expected[is_finite] - written[is_finite]).abs().max() <= step * 1.001


if __name__ == "__main__":
    compare(sys.argv[1])
