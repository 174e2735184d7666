"""Block-wise quantisation as Triton kernels; the same messages as `fullspeed.kernels.quantize_torch`.

A program works on a tile of whole blocks, (T, W): T blocks of one row, W the block size rounded up to a power of two.
Shape letters: R rows, K messages that are added, n values per row.
"""

# mypy: disable-error-code="import-not-found, import-untyped, no-untyped-def, untyped-decorator"
# Triton need not be installed, and types a kernel's arguments itself.
from __future__ import annotations

import torch
import triton
import triton.language as tl

from fullspeed.kernels.format import LEAST_SCALE, ZERO_OF_4_BITS, BlockFormat

_TILE_NUMEL = 4096  # values per program: 32 per thread of four warps
# Adding and subtracting this rounds to the nearest even integer, as torch.round does: fp32 has no fraction bits there.
_ROUNDER = tl.constexpr(1.5 * 2**23)
_LEAST = tl.constexpr(LEAST_SCALE)
_ZERO = tl.constexpr(ZERO_OF_4_BITS)


def quantize(values: torch.Tensor, messages: torch.Tensor, form: BlockFormat) -> None:
    """See `fullspeed.kernels.quantize.quantize`."""
    outer, inner, numel = values.shape
    tile, width = _tile(form)
    grid = (triton.cdiv(form.num_blocks(numel), tile), outer * inner)
    _quantize_kernel[grid](
        values, messages, messages.view(torch.float32), inner, values.stride(0), values.stride(1),
        numel, messages.shape[-1], form.scales_begin(numel) // 4,
        BITS=form.bits, BLOCK=form.block, LARGEST=form.largest_code, T=tile, W=width,
    )  # fmt: skip


def dequantize(messages: torch.Tensor, out: torch.Tensor, form: BlockFormat) -> None:
    """See `fullspeed.kernels.quantize.dequantize`."""
    dequantize_sum(messages[None], out, form)


def dequantize_sum(messages: torch.Tensor, out: torch.Tensor, form: BlockFormat) -> None:
    """See `fullspeed.kernels.quantize.dequantize_sum`."""
    rows, numel = out.shape
    tile, width = _tile(form)
    grid = (triton.cdiv(form.num_blocks(numel), tile), rows)
    _sum_kernel[grid](
        messages, messages.view(torch.float32), out, len(messages), rows, out.stride(0),
        numel, messages.shape[-1], form.scales_begin(numel) // 4,
        BITS=form.bits, BLOCK=form.block, T=tile, W=width,
    )  # fmt: skip


def _tile(form: BlockFormat) -> tuple[int, int]:
    width = triton.next_power_of_2(form.block)
    return max(1, _TILE_NUMEL // width), width


@triton.jit
def _quantize_kernel(
    values, codes, scales, inner, outer_stride, inner_stride, numel, message_nbytes, scales_begin,
    BITS: tl.constexpr, BLOCK: tl.constexpr, LARGEST: tl.constexpr, T: tl.constexpr, W: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(1).to(tl.int64)
    blocks = tl.program_id(0) * T + tl.arange(0, T)
    columns = tl.arange(0, W)
    places = blocks[:, None].to(tl.int64) * BLOCK + columns[None, :]  # (T, W)
    is_value = (columns[None, :] < BLOCK) & (places < numel)
    source = values + (row // inner) * outer_stride + (row % inner) * inner_stride
    x = tl.load(source + places, mask=is_value, other=0.0).to(tl.float32)

    size = tl.abs(x)
    # A maximum may drop a nan; as an inf it cannot be lost.
    largest = tl.max(tl.where(size <= float("inf"), size, float("inf")), axis=1)
    scale = tl.maximum(largest / LARGEST, _LEAST)
    where = scales + row * (message_nbytes // 4) + scales_begin + blocks
    tl.store(where, scale, mask=blocks * BLOCK < numel)

    code = (x * (1.0 / scale)[:, None] + _ROUNDER) - _ROUNDER
    target = codes + row * message_nbytes
    if BITS == 8:
        tl.store(target + places, (code.to(tl.int32) & 255).to(tl.uint8), mask=is_value)
    else:
        low, high = tl.split(tl.reshape((code + _ZERO).to(tl.int32) & 15, (T, W // 2, 2)))
        pairs = tl.arange(0, W // 2)
        even = blocks[:, None].to(tl.int64) * BLOCK + 2 * pairs[None, :]
        is_pair = (2 * pairs[None, :] < BLOCK) & (even < numel)
        tl.store(target + even // 2, (low | (high << 4)).to(tl.uint8), mask=is_pair)


@triton.jit
def _sum_kernel(
    codes, scales, out, num_messages, rows, out_stride, numel, message_nbytes, scales_begin,
    BITS: tl.constexpr, BLOCK: tl.constexpr, T: tl.constexpr, W: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(1).to(tl.int64)
    blocks = tl.program_id(0) * T + tl.arange(0, T)
    columns = tl.arange(0, W)
    places = blocks[:, None].to(tl.int64) * BLOCK + columns[None, :]  # (T, W)
    is_value = (columns[None, :] < BLOCK) & (places < numel)
    total = tl.zeros((T, W), dtype=tl.float32)
    for index in range(num_messages):
        message = (index * rows + row) * message_nbytes
        scale = tl.load(scales + message // 4 + scales_begin + blocks, mask=blocks * BLOCK < numel, other=0.0)
        if BITS == 8:
            code = tl.load(codes + message + places, mask=is_value, other=0).to(tl.int8, bitcast=True).to(tl.float32)
        else:
            pairs = tl.arange(0, W // 2)
            even = blocks[:, None].to(tl.int64) * BLOCK + 2 * pairs[None, :]
            is_pair = (2 * pairs[None, :] < BLOCK) & (even < numel)
            pair = tl.load(codes + message + even // 2, mask=is_pair, other=0).to(tl.int32)
            code = tl.reshape(tl.join(pair & 15, pair >> 4), (T, W)).to(tl.float32) - _ZERO
        total += code * scale[:, None]
    tl.store(out + row * out_stride + places, total.to(out.dtype.element_ty), mask=is_value)
