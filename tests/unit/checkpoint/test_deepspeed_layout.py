"""Spans of parameters in DeepSpeed's flat tensors: each element lies in exactly one place, for every world size."""

from __future__ import annotations

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from fullspeed.checkpoint.deepspeed.layout import Span, flat_shard_numel, flat_spans, part_numel, part_spans

NUMELS = st.lists(st.integers(0, 40), min_size=1, max_size=6)
RANKS = st.integers(1, 9)


def check_cover(numels: list[int], all_spans: list[list[Span]], shard_numel: int, world_size: int) -> None:
    """Spans of a parameter follow one another; none overlap in a rank's tensor or leave it."""
    used = set()
    for numel, spans in zip(numels, all_spans, strict=True):
        assert [element for span in spans for element in range(span.start, span.stop)] == list(range(numel))
        for span in spans:
            assert span.numel > 0
            assert 0 <= span.rank < world_size
            assert span.offset + span.numel <= shard_numel
            used |= {(span.rank, offset) for offset in range(span.offset, span.offset + span.numel)}
    assert len(used) == sum(numels)


@given(NUMELS, RANKS, st.data())
def test_flat_groups(numels, world_size, data):
    gaps = [data.draw(st.integers(0, 7)) for _ in numels]
    padded = [numel + gap for numel, gap in zip(numels, gaps, strict=True)]
    shard_numel = flat_shard_numel(padded, world_size)
    if not shard_numel:
        return
    all_spans = flat_spans(numels, gaps, shard_numel)
    check_cover(numels, all_spans, shard_numel, world_size)
    begins = [span.rank * shard_numel + span.offset - span.start for spans in all_spans for span in spans[:1]]
    expected = [sum(padded[:index]) for index, numel in enumerate(numels) if numel]
    assert begins == expected


@given(NUMELS, RANKS)
def test_parameters_cut_by_themselves(numels, world_size):
    all_spans = part_spans(numels, world_size)
    check_cover(numels, all_spans, sum(part_numel(numel, world_size) for numel in numels), world_size)
    for numel, spans in zip(numels, all_spans, strict=True):
        assert len({span.offset for span in spans}) <= 1
        assert len(spans) == (math.ceil(numel / part_numel(numel, world_size)) if numel else 0)


@pytest.mark.parametrize("world_size", range(1, 17))
@pytest.mark.parametrize("numel", [0, 1, 2, 26, 117])
def test_shards_are_even_and_hold_an_even_number(numel, world_size):
    """26 elements on 2 ranks: 14 each, as DeepSpeed pads them."""
    shard_numel = flat_shard_numel([numel], world_size)
    assert shard_numel % 2 == 0
    assert 0 <= shard_numel * world_size - numel < 2 * world_size
    assert flat_shard_numel([15, 3, 6, 2], 2) == 14
