"""Block-wise quantisation of flat tensors to 8 or 4 bits, for messages that have to be small.

    scale of a block  s = max |x| / Q              Q = 127 (8 bits) or 7 (4 bits)
    code of a value   c = round(x / s)             so that  |x - c * s| <= s / 2

Symmetric, so that zero, and with it all padding, is exact (arXiv:2306.10209, section 3.1). A block that holds an inf or
a nan gets an inf or a nan for its scale, and all its values come back as inf or nan: an overflow is never hidden.
"""

from __future__ import annotations

from collections.abc import Callable

import torch

from fullspeed.kernels.format import BlockFormat
from fullspeed.kernels.native import needs_native
from fullspeed.kernels.registry import Implementation, Op, needs_triton, runs_anywhere

DTYPES = (torch.float32, torch.bfloat16, torch.float16)
"""What can be quantised."""


def _op(name: str) -> Op[Callable[[torch.Tensor, torch.Tensor, BlockFormat], None]]:
    return Op(
        name,
        Implementation("triton", f"fullspeed.kernels.quantize_triton:{name}", needs_triton),
        Implementation("native", f"fullspeed.kernels.quantize_native:{name}", needs_native),
        Implementation("torch", f"fullspeed.kernels.quantize_torch:{name}", runs_anywhere),
    )


_quantize, _dequantize, _dequantize_sum = _op("quantize"), _op("dequantize"), _op("dequantize_sum")


def quantize(values: torch.Tensor, messages: torch.Tensor, form: BlockFormat) -> None:
    """Write the message of each row of values.

    values: (P, Q, n) of a dtype in `DTYPES`; a row is contiguous, but may lie anywhere.
    messages: (P, Q, form.nbytes(n)) uint8, contiguous.
    """
    assert messages.shape == (*values.shape[:2], form.nbytes(values.shape[2]))
    _check(values, messages)
    _quantize.on(values.device)(values, messages, form)


def dequantize(messages: torch.Tensor, out: torch.Tensor, form: BlockFormat) -> None:
    """Read messages (R, form.nbytes(n)) into the rows of `out` (R, n), rounded to its dtype; both contiguous."""
    assert messages.shape == (len(out), form.nbytes(out.shape[1]))
    _check(out, messages)
    _dequantize.on(out.device)(messages, out, form)


def dequantize_sum(messages: torch.Tensor, out: torch.Tensor, form: BlockFormat) -> None:
    """Add up messages: out[r] = sum over k of the values of messages[k, r], in that order, in fp32, rounded once.

    messages: (K, R, form.nbytes(n)) uint8. out: (R, n). Both contiguous.
    """
    assert messages.shape[1:] == (len(out), form.nbytes(out.shape[1]))
    _check(out, messages)
    _dequantize_sum.on(out.device)(messages, out, form)


def _check(values: torch.Tensor, messages: torch.Tensor) -> None:
    assert values.dtype in DTYPES, values.dtype
    assert values.stride(-1) == 1
    assert messages.dtype == torch.uint8
    assert messages.is_contiguous()
