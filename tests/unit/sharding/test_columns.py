"""Choosing columns by importance, and the rhythm of choices and deferred updates."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from fullspeed.sharding.columns import MAX_DEFERRED, Rhythm, Weight, important, row_numel

NOTHING = Weight(0.0, 0.0)


def test_rows_are_everything_behind_the_first_dimension():
    assert [row_numel(shape) for shape in [(), (5,), (3, 4), (2, 3, 5)]] == [0, 0, 4, 15]


@settings(max_examples=60, deadline=None)
@given(
    rows=st.integers(1, 5),
    row=st.integers(1, 9),
    ratio=st.sampled_from([0.0, 0.1, 0.34, 0.5, 1.0]),
    cut=st.data(),
)
def test_the_chosen_columns_are_those_with_the_largest_sums_of_squares(rows, row, ratio, cut):
    """Of any contiguous piece of any matrix."""
    start = cut.draw(st.integers(0, rows * row - 1))
    stop = cut.draw(st.integers(start + 1, rows * row))
    values = torch.randn(rows * row, generator=torch.Generator().manual_seed(rows * row + start))
    mask = important(values[start:stop], start, row, ratio)
    inside = torch.zeros(rows * row)
    inside[start:stop] = values[start:stop].square()
    sums = inside.view(rows, row).sum(0)
    expected = torch.zeros(row, dtype=torch.bool)
    expected[sums.topk(max(1, int(ratio * row))).indices] = True
    assert torch.equal(mask, expected.repeat(rows)[start:stop])


def test_a_given_interval_and_warm_up():
    """Two whole updates, a choice at every sixth after them, deferred updates at every third."""
    rhythm, chosen, applied = Rhythm(select_every=6, update_every=3, auto_ratio=0.99, warm_up=2), [], []
    for update in range(16):
        if rhythm.chooses:
            chosen.append(update)
        is_applied = rhythm.chooses or rhythm.is_due(NOTHING, NOTHING)
        if update >= 2 and is_applied:
            applied.append(update)
        rhythm.advance(is_applied=is_applied)
    assert chosen == [2, 8, 14]
    assert applied == [2, 5, 8, 11, 14]


def test_without_an_interval_the_sums_that_wait_are_weighed():
    rhythm = Rhythm(select_every=100, update_every=None, auto_ratio=0.5, warm_up=0)
    chosen = Weight(squares=40.0, numel=10)
    assert not rhythm.is_due(Weight(squares=190.0, numel=100), chosen)
    assert rhythm.is_due(Weight(squares=200.0, numel=100), chosen)


def test_without_an_interval_nothing_waits_for_ever():
    rhythm, waited = Rhythm(select_every=100, update_every=None, auto_ratio=1.0, warm_up=0), 0
    rhythm.advance(is_applied=True)
    while not rhythm.is_due(Weight(1e-9, 10), Weight(1.0, 10)):
        rhythm.advance(is_applied=False)
        waited += 1
    assert waited == MAX_DEFERRED - 1


@pytest.mark.parametrize("update_every", [None, 4])
def test_counts_come_back(update_every):
    rhythm = Rhythm(select_every=5, update_every=update_every, auto_ratio=0.9, warm_up=0)
    rhythm.advance(is_applied=True)
    rhythm.advance(is_applied=False)
    other = Rhythm(select_every=5, update_every=update_every, auto_ratio=0.9, warm_up=0)
    other.load_state_dict(rhythm.state_dict())
    assert other == rhythm
    other.load_state_dict({})
    assert (other.num_updates, other.num_deferred) == (0, 0)
