"""The tracker of named random states."""

from __future__ import annotations

import pytest
import torch

from fullspeed.activation.rng import RngTracker, get_rng_tracker, reseed_tensor_parallel, seed_tensor_parallel
from fullspeed.base.errors import UsageError


def _draws(seed, count=3):
    return torch.randn(count, generator=torch.Generator().manual_seed(seed))


def test_a_fork_draws_from_its_own_seed_and_goes_on_where_it_left():
    tracker = RngTracker()
    torch.manual_seed(1)
    tracker.add("other", 7)
    with tracker.fork("other"):
        first = torch.randn(1)
    outside = torch.randn(3)
    with tracker.fork("other"):
        rest = torch.randn(2)
    assert torch.equal(torch.cat([first, rest]), _draws(7))
    assert torch.equal(outside, _draws(1))


def test_a_fork_that_raises_gives_the_generator_back():
    tracker = RngTracker()
    torch.manual_seed(1)
    tracker.add("other", 7)

    def draw_and_fail():
        with tracker.fork("other"):
            torch.randn(1)
            raise KeyError("mine")

    with pytest.raises(KeyError, match="mine"):
        draw_and_fail()
    assert torch.equal(torch.randn(3), _draws(1))


def test_states_can_be_put_back():
    tracker = RngTracker()
    tracker.add("other", 7)
    before = tracker.get_states()
    with tracker.fork("other"):
        first = torch.randn(3)
    tracker.set_states(before)
    with tracker.fork("other"):
        assert torch.equal(torch.randn(3), first)


def test_names_and_seeds_are_taken_once():
    tracker = RngTracker()
    tracker.add("one", 7)
    with pytest.raises(UsageError, match="'one' is there already"):
        tracker.add("one", 8)
    with pytest.raises(UsageError, match="has seed 7"):
        tracker.add("two", 7)
    tracker.reset()
    assert tracker.get_states() == {}
    tracker.add("one", 7)


def test_an_unknown_name_is_told_with_the_known_ones():
    tracker = RngTracker()
    tracker.add("one", 7)
    with pytest.raises(UsageError, match=r"'model-parallel-rng' \(there: 'one'\)"), tracker.fork():
        pass


def test_tensor_parallel_ranks_draw_apart_and_alike_outside():
    for tp_rank in (0, 3):
        seed_tensor_parallel(11, tp_rank)
        with get_rng_tracker().fork():
            apart = torch.randn(3)
        assert torch.equal(apart, _draws(11 + 2718 + tp_rank))
        assert torch.equal(torch.randn(3), _draws(11))


def test_reseeding_begins_the_tensor_parallel_state_anew():
    seed_tensor_parallel(11, 2)
    reseed_tensor_parallel(20, 2)
    with get_rng_tracker().fork():
        assert torch.equal(torch.randn(3), _draws(20 + 2718 + 2))
    assert torch.equal(torch.randn(3), _draws(11))
