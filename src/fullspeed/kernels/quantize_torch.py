"""Block-wise quantisation in plain PyTorch: the specification of `fullspeed.kernels.quantize`.

Works through chunks that a core's cache holds, so no temporary of the values' size is made.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from typing import NamedTuple

import torch

from fullspeed.kernels.format import LEAST_SCALE, ZERO_OF_4_BITS, BlockFormat

_CHUNK_NUMEL = 1 << 18  # 1 MiB of fp32: measured best of 2^13 to 2^20, where calls or cache misses take over


def quantize(values: torch.Tensor, messages: torch.Tensor, form: BlockFormat) -> None:
    """See `fullspeed.kernels.quantize.quantize`."""
    numel = values.shape[2]
    for outer, outer_messages in zip(values, messages, strict=True):
        for row, message in zip(outer, outer_messages, strict=True):
            codes, scales = form.split(message, numel)
            for chunk in _chunks(numel, form):
                _quantize_chunk(row[chunk.values].float(), codes[chunk.codes], scales[chunk.blocks], form)


def dequantize(messages: torch.Tensor, out: torch.Tensor, form: BlockFormat) -> None:
    """See `fullspeed.kernels.quantize.dequantize`."""
    dequantize_sum(messages[None], out, form)


def dequantize_sum(messages: torch.Tensor, out: torch.Tensor, form: BlockFormat) -> None:
    """See `fullspeed.kernels.quantize.dequantize_sum`."""
    numel = out.shape[1]
    for row, of_row in zip(out, messages.unbind(1), strict=True):
        parts = [form.split(message, numel) for message in of_row]
        for chunk in _chunks(numel, form):
            (codes, scales), *others = [(codes[chunk.codes], scales[chunk.blocks]) for codes, scales in parts]
            total = _dequantized(codes, scales, chunk.numel, form)
            for codes, scales in others:
                total += _dequantized(codes, scales, chunk.numel, form)
            row[chunk.values] = total


class _Chunk(NamedTuple):
    """Values that are worked on together, and where their blocks and codes lie."""

    numel: int
    values: slice
    blocks: slice
    codes: slice


def _chunks(numel: int, form: BlockFormat) -> Iterator[_Chunk]:
    """Runs of whole blocks, then the short block, if there is one, by itself."""
    length = max(1, _CHUNK_NUMEL // form.block) * form.block
    whole = numel - numel % form.block
    bounds = [*range(0, whole, length), whole, numel]
    for start, stop in itertools.pairwise(bounds):
        if start < stop:
            blocks = slice(form.num_blocks(start), form.num_blocks(stop))
            codes = slice(form.codes_nbytes(start), form.codes_nbytes(stop))
            yield _Chunk(stop - start, slice(start, stop), blocks, codes)


def _quantize_chunk(values: torch.Tensor, codes: torch.Tensor, scales: torch.Tensor, form: BlockFormat) -> None:
    blocks = values.view(len(scales), -1)  # (blocks, values per block)
    torch.div(blocks.abs().amax(1), form.largest_code, out=scales).clamp_(min=LEAST_SCALE)
    rounded = torch.mul(blocks, scales.reciprocal()[:, None]).round_()
    if form.bits == 8:
        codes.view(torch.int8).copy_(rounded.view(-1))
    else:
        codes.copy_(_packed(rounded.add_(ZERO_OF_4_BITS).view(-1).to(torch.int8)))


def _dequantized(codes: torch.Tensor, scales: torch.Tensor, numel: int, form: BlockFormat) -> torch.Tensor:
    """The fp32 values (numel,) of whole blocks, or of one short block."""
    is_packed = form.bits == 4
    values = _unpacked(codes)[:numel].float().sub_(ZERO_OF_4_BITS) if is_packed else codes.view(torch.int8).float()
    return values.view(len(scales), -1).mul_(scales[:, None]).view(-1)


def _packed(codes: torch.Tensor) -> torch.Tensor:
    """(n,) int8, each 0 to 15 -> (ceil(n / 2),) uint8: two at a time as one 16-bit integer, the even one low."""
    if len(codes) % 2:
        codes = torch.cat([codes, codes.new_full((1,), ZERO_OF_4_BITS)])
    pairs = codes.view(torch.int16)
    return (pairs >> 4).bitwise_or_(pairs).to(torch.uint8)


def _unpacked(packed: torch.Tensor) -> torch.Tensor:
    """The inverse of `_packed`: (m,) uint8 -> (2 m,) int8."""
    pairs = packed.to(torch.int16)
    return (pairs << 4).bitwise_or_(pairs).bitwise_and_(0x0F0F).view(torch.int8)
