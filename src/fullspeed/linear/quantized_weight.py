"""A weight as codes: making them, reading them, and multiplying by what they mean.

codes: (form.nbytes(O * I),) uint8, one message as `kernels/format.py` lays it out. O outputs, I inputs.
"""

from __future__ import annotations

from typing import Any

import torch
from torch.nn import functional as F

from fullspeed.kernels.format import BlockFormat
from fullspeed.kernels.quantize import DTYPES, dequantize, quantize


def encode(weight: torch.Tensor, form: BlockFormat) -> torch.Tensor:
    """The codes of a floating-point weight (O, I), on its device."""
    values = weight.detach().contiguous()
    values = values if values.dtype in DTYPES else values.float()
    codes = torch.empty(form.nbytes(values.numel()), dtype=torch.uint8, device=values.device)
    if not values.is_meta:
        codes.zero_()  # what fills up the parts of a message must not differ between ranks
        quantize(values.view(1, 1, -1), codes.view(1, 1, -1), form)
    return codes


def decode(codes: torch.Tensor, shape: torch.Size, dtype: torch.dtype, form: BlockFormat) -> torch.Tensor:
    """The weight (O, I) that codes stand for."""
    values = torch.empty((1, shape.numel()), dtype=dtype if dtype in DTYPES else torch.float32, device=codes.device)
    dequantize(codes.detach().view(1, -1), values, form)
    return values.view(shape).to(dtype)


def linear(
    inputs: torch.Tensor, codes: torch.Tensor, shape: torch.Size, form: BlockFormat, bias: torch.Tensor | None = None
) -> torch.Tensor:
    """`F.linear(inputs, weight, bias)` in the dtype of the inputs, or of autocast where that is on.

    For backward the codes are kept, not the weight, which is decoded once more there. Codes get no gradient.
    """
    kind = inputs.device.type
    if torch.is_autocast_enabled(kind):
        inputs = inputs.to(torch.get_autocast_dtype(kind))
    output: torch.Tensor = _Linear.apply(inputs, codes, shape, form)  # type: ignore[no-untyped-call]
    return output if bias is None else output + bias.to(output.dtype)


class _Linear(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, inputs: torch.Tensor, codes: torch.Tensor, shape: torch.Size, form: BlockFormat
    ) -> torch.Tensor:
        ctx.save_for_backward(codes)
        ctx.shape, ctx.form = shape, form
        return F.linear(inputs, decode(codes, shape, inputs.dtype, form))

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> tuple[torch.Tensor, None, None, None]:
        (grad,) = grads
        (codes,) = ctx.saved_tensors
        return grad @ decode(codes, ctx.shape, grad.dtype, ctx.form), None, None, None
