"""What nodes learn of each other through their store."""

from __future__ import annotations

import threading
import time

from torch.distributed import DistNetworkError, HashStore

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


class _Ending(HashStore):
    """The second node's view of a store whose process ends as soon as that node has counted itself under a key."""

    def __init__(self, last_key: str) -> None:
        super().__init__()
        self._last_key, self.is_gone = last_key, False

    def add(self, key: str, amount: int) -> int:
        if self.is_gone:
            raise DistNetworkError("the server is gone")
        self.is_gone = key == self._last_key and amount > 0
        return super().add(key, amount)


def test_a_node_that_ended_well_does_not_look_back_at_a_store_that_may_be_gone():
    store = _Ending("seen")
    store.add("done", 1)  # the first node's ranks
    with NodeWatch(store, Place(1, 2, "work2", "work1"), 60) as watch:
        watch.finish()
    assert store.is_gone
    assert not watch.is_stopped()


def test_a_node_keeps_the_reports_it_heard_when_the_store_ends_with_them():
    store = _Ending("left")
    watch = NodeWatch(store, Place(1, 2, "work2", "work1"), 60)
    store.set("report/0", "rank 0 was killed")
    store.add("reports", 1)
    watch.tell("ended with it")
    assert watch.hear() == ["rank 0 was killed", "ended with it"]
    assert store.is_gone


def test_a_node_whose_first_is_gone_before_all_ended_well_says_so():
    store = _Ending("done")
    watch = NodeWatch(store, Place(1, 2, "work2", "work1"), 60)
    watch.finish()
    assert watch.is_cut_off
    assert watch.reason == "the first node, work1, is gone: the server is gone"


def test_the_first_node_leaves_last():
    first, second = watches(2)
    ended = []

    def finish_first() -> None:
        first.finish()
        ended.append("first")

    with first, second:
        thread = threading.Thread(target=finish_first)
        thread.start()
        time.sleep(SILENCE_S / 2)
        assert not ended
        second.finish()
        thread.join()
    assert not first.is_stopped()
    assert not second.is_stopped()
