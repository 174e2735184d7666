"""How DeepSpeed cuts parameters into the flat tensors of its files. Integers only, no tensors.

Stages 1 and 2 put the parameters of a param group one after another and cut the result evenly, so that a cut may go
through a parameter. Stage 3 cuts each parameter evenly, and puts a rank's parts one after another.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from fullspeed.base.layout import round_up

_ALIGNMENT = 2  # elements; every shard of a flat group has a multiple of them


class Span(NamedTuple):
    """Elements [start, stop) of a flattened parameter, and where they are: in one rank's flat tensor, from `offset`."""

    start: int
    stop: int
    rank: int
    offset: int

    @property
    def numel(self) -> int:
        """Elements in the span, at least 1."""
        return self.stop - self.start


def flat_shard_numel(numels: Sequence[int], world_size: int) -> int:
    """Elements each rank gets of a flat group, with the padding at its end.

    >>> flat_shard_numel([15, 3, 6, 2], 2)
    14
    """
    return round_up(sum(numels), _ALIGNMENT * world_size) // world_size


def flat_spans(numels: Sequence[int], gaps: Sequence[int], shard_numel: int) -> list[list[Span]]:
    """For each parameter of a flat group, the spans it was cut into.

    Args:
        numels: elements of each parameter, in the group's order.
        gaps: elements of padding behind each parameter.
        shard_numel: elements of a rank's shard.

    >>> flat_spans([15, 3], [0, 0], 9)
    [[Span(start=0, stop=9, rank=0, offset=0), Span(start=9, stop=15, rank=1, offset=0)], \
[Span(start=0, stop=3, rank=1, offset=6)]]
    """
    found = []
    begin = 0
    for numel, gap in zip(numels, gaps, strict=True):
        spans, start = [], 0
        while start < numel:
            rank, offset = divmod(begin + start, shard_numel)
            stop = min(numel, start + shard_numel - offset)
            spans.append(Span(start, stop, rank, offset))
            start = stop
        found.append(spans)
        begin += numel + gap
    return found


def part_numel(numel: int, world_size: int) -> int:
    """Elements each rank gets of a parameter that is cut by itself, padding included."""
    return -(-numel // world_size)


def part_spans(numels: Sequence[int], world_size: int) -> list[list[Span]]:
    """For each parameter of a group that is cut parameter by parameter, the spans it was cut into.

    >>> part_spans([15, 3], 2)
    [[Span(start=0, stop=8, rank=0, offset=0), Span(start=8, stop=15, rank=1, offset=0)], \
[Span(start=0, stop=2, rank=0, offset=8), Span(start=2, stop=3, rank=1, offset=8)]]
    """
    found = []
    offset = 0
    for numel in numels:
        part = part_numel(numel, world_size)
        cuts = [(rank, rank * part, min(numel, (rank + 1) * part)) for rank in range(world_size)]
        found.append([Span(start, stop, rank, offset) for rank, start, stop in cuts if start < stop])
        offset += part
    return found
