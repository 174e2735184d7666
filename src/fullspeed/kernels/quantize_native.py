"""`fullspeed.kernels.quantize` in the native library: a call for each row, in one pass over memory."""

from __future__ import annotations

import torch

from fullspeed.kernels.format import BlockFormat
from fullspeed.kernels.native import DTYPES, BlocksStruct, MessageStruct, require


def quantize(values: torch.Tensor, messages: torch.Tensor, form: BlockFormat) -> None:
    """See `fullspeed.kernels.quantize.quantize`."""
    quantize_with(require().best_set, values, messages, form)


def dequantize(messages: torch.Tensor, out: torch.Tensor, form: BlockFormat) -> None:
    """See `fullspeed.kernels.quantize.dequantize`."""
    dequantize_sum(messages[None], out, form)


def dequantize_sum(messages: torch.Tensor, out: torch.Tensor, form: BlockFormat) -> None:
    """See `fullspeed.kernels.quantize.dequantize_sum`."""
    dequantize_sum_with(require().best_set, messages, out, form)


def quantize_with(instruction_set: int, values: torch.Tensor, messages: torch.Tensor, form: BlockFormat) -> None:
    """`quantize`, by one of the instruction sets that the library names."""
    numel, run = values.shape[2], require().functions.fs_quantize
    blocks = BlocksStruct(DTYPES[values.dtype], form.bits, form.block, numel)
    for outer, outer_messages in zip(values, messages, strict=True):
        for row, message in zip(outer, outer_messages, strict=True):
            codes, scales = _parts(message, numel, form)
            code = run(blocks, row.data_ptr(), codes, scales, torch.get_num_threads(), instruction_set)
            assert code == 0, values.dtype


def dequantize_sum_with(instruction_set: int, messages: torch.Tensor, out: torch.Tensor, form: BlockFormat) -> None:
    """`dequantize_sum`, by one of the instruction sets that the library names."""
    numel, run = out.shape[1], require().functions.fs_dequantize_sum
    blocks = BlocksStruct(DTYPES[out.dtype], form.bits, form.block, numel)
    for row, of_row in zip(out, messages.unbind(1), strict=True):
        parts = (MessageStruct * len(of_row))(*(MessageStruct(*_parts(message, numel, form)) for message in of_row))
        code = run(blocks, parts, len(of_row), row.data_ptr(), torch.get_num_threads(), instruction_set)
        assert code == 0, out.dtype


def _parts(message: torch.Tensor, numel: int, form: BlockFormat) -> tuple[int, int]:
    """Addresses of a message's codes and scales."""
    begin = message.data_ptr()
    return begin, begin + form.scales_begin(numel)
