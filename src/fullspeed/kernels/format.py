"""How quantised values are laid out as bytes. Arithmetic, and views of a message; used by every implementation.

A message of n values: the codes, 4-bit ones two to a byte with the even element low, then one fp32 scale a block, each
part filled up to 16 bytes. Scales are fp32 because gradients use the range that fp16 lacks; at 256 values a block they
add 1.6 % to 8-bit codes.
"""

from __future__ import annotations

from typing import NamedTuple

import torch

from fullspeed.base.layout import round_up

LEAST_SCALE = 2.0**-126  # smallest normal fp32: smaller scales lose digits, and so the bound on the error
ZERO_OF_4_BITS = 8  # 4-bit codes are stored with this added, 1 to 15
_ALIGNMENT_BYTES = 16


class BlockFormat(NamedTuple):
    """How values are quantised, and where a message keeps what."""

    bits: int  # 8 or 4
    block: int  # values per scale; even, so that no byte holds codes of two blocks

    @property
    def largest_code(self) -> int:
        """Q: 127 or 7."""
        return int((1 << (self.bits - 1)) - 1)

    def num_blocks(self, numel: int) -> int:
        """Scales of `numel` values; the last block may be short."""
        return -(-numel // self.block)

    def codes_nbytes(self, numel: int) -> int:
        """Bytes of the codes of `numel` values."""
        return -(-numel * self.bits // 8)

    def scales_begin(self, numel: int) -> int:
        """Where in a message the scales begin, in bytes."""
        return round_up(self.codes_nbytes(numel), _ALIGNMENT_BYTES)

    def nbytes(self, numel: int) -> int:
        """Bytes of a message of `numel` values."""
        return self.scales_begin(numel) + round_up(4 * self.num_blocks(numel), _ALIGNMENT_BYTES)

    def split(self, message: torch.Tensor, numel: int) -> tuple[torch.Tensor, torch.Tensor]:
        """The codes (codes_nbytes,) uint8 and the scales (num_blocks,) fp32 of a message, as views of it."""
        begin = self.scales_begin(numel)
        scales = message[begin : begin + 4 * self.num_blocks(numel)]
        return message[: self.codes_nbytes(numel)], scales.view(torch.float32)
