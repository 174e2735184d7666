"""The map of a flat buffer: every element of every parameter is held once, and everything else is a gap."""

from __future__ import annotations

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from fullspeed.base.layout import SLOT_ALIGNMENT, FlatLayout, Piece, round_up

SHAPES = st.lists(st.lists(st.integers(0, 7), max_size=3).map(tuple), max_size=6)
LAYOUTS = st.builds(
    lambda shapes, world_size, alignment: FlatLayout(
        [(f"p{index}", shape) for index, shape in enumerate(shapes)], world_size, alignment
    ),
    SHAPES,
    st.integers(1, 9),
    st.sampled_from([1, 2, 16]),
)


@given(LAYOUTS)
def test_every_element_is_held_exactly_once(layout):
    held = [
        (piece.slot, element)
        for rank in range(layout.world_size)
        for piece in layout.pieces(rank)
        for element in range(piece.start, piece.stop)
    ]
    expected = [(index, element) for index, slot in enumerate(layout.slots) for element in range(slot.numel)]
    assert sorted(held) == expected
    assert len(held) == layout.numel


@given(LAYOUTS)
def test_a_piece_lies_where_its_slot_does(layout):
    for rank in range(layout.world_size):
        start, stop = layout.shard_range(rank)
        for piece in layout.pieces(rank):
            assert piece.numel > 0
            assert start + piece.shard_offset == layout.slots[piece.slot].offset + piece.start
            assert piece.shard_offset + piece.numel <= stop - start


@given(LAYOUTS)
def test_slots_and_gaps_tile_the_buffer(layout):
    parts = [(slot.offset, slot.end) for slot in layout.slots if slot.numel] + layout.gaps()
    end = 0
    for start, stop in sorted(parts):
        assert start == end
        assert stop > start
        end = stop
    assert end == layout.padded_numel == layout.world_size * layout.shard_numel


@given(LAYOUTS, st.integers(0, 400), st.integers(0, 400))
def test_any_range_is_cut_like_the_shards(layout, start, length):
    pieces = layout.pieces_between(start, start + length)
    inside = [
        element
        for slot in layout.slots
        for element in range(slot.offset, slot.end)
        if start <= element < start + length
    ]
    assert [start + piece.shard_offset + i for piece in pieces for i in range(piece.numel)] == inside


@given(SHAPES, st.integers(1, 9))
def test_default_alignment(shapes, world_size):
    layout = FlatLayout([(f"p{index}", shape) for index, shape in enumerate(shapes)], world_size)
    assert [slot.numel for slot in layout.slots] == [math.prod(shape) for shape in shapes]
    assert all(slot.offset % SLOT_ALIGNMENT == 0 for slot in layout.slots)
    assert layout.shard_numel % SLOT_ALIGNMENT == 0
    waste = layout.padded_numel - layout.numel
    assert waste < SLOT_ALIGNMENT * (len(shapes) + world_size + 1)


def test_a_parameter_across_two_ranks():
    layout = FlatLayout([("w", (5, 4)), ("b", (3,))], world_size=2, alignment=1)
    assert (layout.numel, layout.shard_numel, layout.padded_numel) == (23, 12, 24)
    assert layout.pieces(0) == [Piece(slot=0, start=0, stop=12, shard_offset=0)]
    assert layout.pieces(1) == [Piece(0, 12, 20, 0), Piece(1, 0, 3, 8)]
    assert layout.gaps() == [(23, 24)]


@pytest.mark.parametrize(("value", "expected"), [(0, 0), (1, 16), (16, 16), (17, 32)])
def test_round_up(value, expected):
    assert round_up(value, 16) == expected
