"""Which slice of which parameter lives where in a flat, padded, evenly cut buffer. Integers only, no tensors.

    full    (padded_numel,)            slot 0 | gap | slot 1 | ... | slot k | tail padding
    shard r (shard_numel,)             full[r * shard_numel : (r + 1) * shard_numel]

The gather, the reduction, norms, checkpoints, memory formulas and the accessors all read this one map.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

# Slots start on multiples of this many elements: 64 bytes of fp32 (one AVX-512 register, one cache line), and
# more than the 16 bytes that tensor-core matrix products ask of a bf16 operand.
SLOT_ALIGNMENT = 16


def round_up(value: int, multiple: int) -> int:
    """Smallest multiple of `multiple` that is not below `value`."""
    return -(-value // multiple) * multiple


class Slot(NamedTuple):
    """Where one whole parameter lies in the flat buffer."""

    fqn: str
    shape: tuple[int, ...]
    numel: int
    offset: int  # first element in `full`

    @property
    def end(self) -> int:
        """One past the last element in `full`."""
        return self.offset + self.numel


class Piece(NamedTuple):
    """The part of one parameter that one rank's shard holds."""

    slot: int  # index into FlatLayout.slots
    start: int  # first element, counted in the flattened parameter
    stop: int  # one past the last, counted in the flattened parameter
    shard_offset: int  # first element, counted in the rank's shard

    @property
    def numel(self) -> int:
        """Elements in the piece, at least 1."""
        return self.stop - self.start


class FlatLayout:
    """Slots of a list of parameters in a flat buffer that `world_size` ranks cut into equal contiguous shards.

    >>> layout = FlatLayout([("w", (3, 5)), ("b", (3,))], world_size=2)
    >>> layout.padded_numel, layout.shard_numel
    (32, 16)
    >>> layout.pieces(1)
    [Piece(slot=1, start=0, stop=3, shard_offset=0)]
    """

    def __init__(
        self,
        params: Sequence[tuple[str, tuple[int, ...]]],
        world_size: int,
        alignment: int = SLOT_ALIGNMENT,
    ) -> None:
        assert world_size > 0
        assert alignment > 0
        self.world_size = world_size
        self.slots: list[Slot] = []
        offset = 0
        for fqn, shape in params:
            numel = 1
            for side in shape:
                numel *= side
            self.slots.append(Slot(fqn, tuple(shape), numel, offset))
            offset = round_up(offset + numel, alignment)
        self.shard_numel = round_up(-(-offset // world_size), alignment)
        self.padded_numel = self.shard_numel * world_size

    @property
    def numel(self) -> int:
        """Elements of the parameters themselves, without padding."""
        return sum(slot.numel for slot in self.slots)

    def shard_range(self, rank: int) -> tuple[int, int]:
        """(start, stop) of a rank's shard in `full`."""
        return rank * self.shard_numel, (rank + 1) * self.shard_numel

    def pieces(self, rank: int) -> list[Piece]:
        """The pieces a rank's shard holds, in slot order; parameters it holds nothing of are absent."""
        start, stop = self.shard_range(rank)
        return self.pieces_between(start, stop)

    def pieces_between(self, start: int, stop: int) -> list[Piece]:
        """The pieces inside `full[start:stop]`, with offsets counted from `start`."""
        found = []
        for index, slot in enumerate(self.slots):
            low, high = max(start, slot.offset), min(stop, slot.end)
            if low < high:
                found.append(Piece(index, low - slot.offset, high - slot.offset, low - start))
        return found

    def gaps(self) -> list[tuple[int, int]]:
        """(start, stop) of every stretch of `full` that belongs to no parameter."""
        found, end = [], 0
        for slot in self.slots:
            if slot.offset > end:
                found.append((end, slot.offset))
            end = slot.end
        if self.padded_numel > end:
            found.append((end, self.padded_numel))
        return found
