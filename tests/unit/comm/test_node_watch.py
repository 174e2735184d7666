"""What nodes learn of each other through their store."""

from __future__ import annotations

import time

from torch.distributed import HashStore

from fullspeed.comm.node_watch import NodeWatch, Place

SILENCE_S = 0.4
NAMES = ("work1", "work2", "work3")


def watches(num_nodes: int) -> list[NodeWatch]:
    store = HashStore()
    places = [Place(node, num_nodes, NAMES[node], NAMES[0]) for node in range(num_nodes)]
    return [NodeWatch(store, place, SILENCE_S) for place in places]


def wait_until_stopped(watch: NodeWatch) -> None:
    deadline = time.monotonic() + 20
    while not watch.is_stopped():
        assert time.monotonic() < deadline
        time.sleep(0.02)


def test_all_nodes_that_live_hear_which_one_fell_silent():
    first, second, third = watches(3)
    with first, second:
        with third:
            time.sleep(2 * SILENCE_S)
            assert not any(watch.is_stopped() for watch in (first, second, third))
        for watch in (first, second):
            wait_until_stopped(watch)
            assert watch.reason == f"nothing was heard of host work3 for {SILENCE_S:g} s"
            assert not watch.is_cut_off


def test_a_node_that_never_gave_a_sign_of_life_is_lost_too():
    first, _ = watches(2)
    with first:
        wait_until_stopped(first)
    assert first.reason == f"nothing was heard of host number 1 for {SILENCE_S:g} s"


class _Unreachable(HashStore):
    """A store whose host can be cut off: calls to it do not return then."""

    is_cut = False

    def add(self, key: str, amount: int) -> int:
        while self.is_cut:
            time.sleep(0.05)
        return super().add(key, amount)


def test_a_node_that_is_cut_off_from_the_first_says_so_and_calls_it_no_more():
    store = _Unreachable()
    watch = NodeWatch(store, Place(1, 2, "work2", "work1"), SILENCE_S)
    with watch, NodeWatch(store, Place(0, 2, "work1", "work1"), SILENCE_S):
        time.sleep(SILENCE_S / 2)
        store.is_cut = True
        wait_until_stopped(watch)
        assert watch.reason == f"the first node, work1, has not answered for {SILENCE_S:g} s"
        assert watch.is_cut_off
        watch.tell("a report")  # returns
        assert watch.hear() == []
    store.is_cut = False
