"""Which dtype each copy of a value has: stored, computed with, accumulated, sent, updated."""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

import torch

from fullspeed.accelerator import Accelerator
from fullspeed.config import Config

DTYPES = {"fp32": torch.float32, "fp16": torch.float16, "bf16": torch.bfloat16}


def torch_dtype(name: str | None) -> torch.dtype | None:
    """The torch dtype of a configuration's dtype name; None stays None."""
    return None if name is None else DTYPES[name]


class CopyDtypes(NamedTuple):
    """Dtypes of the copies of a parameter and of its gradient."""

    storage: torch.dtype  # of the values that are kept and sent
    compute: torch.dtype  # of the values forward and backward read
    master: torch.dtype  # of the values the optimizer updates
    accum: torch.dtype  # in which gradients add up
    wire: torch.dtype  # of gradients while they travel


@dataclass(frozen=True)
class PrecisionPolicy:
    """Dtypes of training.

    Attributes:
        param: dtype floating-point parameters are stored and sent in; None leaves each parameter its own.
        compute: dtype forward and backward see for `param`. Wider than `param` on devices without fast 16-bit matrix
            products: a CPU without native bf16 multiplies bf16 at a fiftieth of its fp32 speed, and fp32 products of
            the same stored values are more exact as well.
        grad_accum: dtype gradients are accumulated in; None is the stored dtype.
        wire: dtype gradients travel in; None is the stored dtype.
        buffers: dtype floating-point buffers are cast to; None leaves them.
    """

    param: torch.dtype | None
    compute: torch.dtype | None
    grad_accum: torch.dtype | None
    wire: torch.dtype | None
    buffers: torch.dtype | None

    @property
    def is_half(self) -> bool:
        """Whether parameters are stored in 16 bits beside fp32 masters."""
        return self.param is not None

    @property
    def widens(self) -> bool:
        """Whether compute is wider than storage."""
        return self.param != self.compute

    @classmethod
    def from_config(cls, config: Config, accelerator: Accelerator) -> PrecisionPolicy:
        """The policy of a configuration on this accelerator."""
        name = config.precision_dtype()
        param = None if name == "fp32" else DTYPES[name]
        compute = param
        if param is not None and not accelerator.has_native_matmul(param):
            compute = torch.float32
        accum = torch_dtype(config.data_types.grad_accum_dtype)
        if config.bf16.immediate_grad_update and accum is None:
            accum = torch.float32
        return cls(
            param=param,
            compute=compute,
            grad_accum=accum,
            wire=torch_dtype(config.communication_data_type),
            buffers=torch_dtype(config.data_types.buffer_dtype),
        )

    def dtypes_of(self, original: torch.dtype, wire: torch.dtype | None = None) -> CopyDtypes:
        """The dtypes of a parameter that had the dtype `original` before; `wire` overrides that of its gradients."""
        if not original.is_floating_point:
            return CopyDtypes(original, original, original, original, original)
        storage = self.param or original
        return CopyDtypes(
            storage=storage,
            compute=self.compute or original,
            master=original if self.param is None else torch.float32,
            accum=self.grad_accum or storage,
            wire=wire or self.wire or storage,
        )
