"""Second phases start in the order of the first ones, on every rank, whatever is waited for first."""

from __future__ import annotations

import itertools
from collections import deque

import pytest

from fullspeed.comm.hierarchy import TwoPhase
from fullspeed.comm.pending import Chained, Pending, Then

NUM_TRANSFERS = 3


class Fake(Pending):
    """Complete after `num_phases` advances, over when it was waited for too."""

    def __init__(self, log, name, num_phases=1):
        self.log, self.name, self.left, self.is_released = log, name, num_phases, False
        log.append(f"begin {name}")

    def advance(self):
        self.left = max(0, self.left - 1)
        return self.left == 0

    def poll(self):
        return self.left == 0 and self.is_released

    def wait(self):
        self.left, self.is_released = 0, True
        self.log.append(f"end {self.name}")


def _make(log, num_phases):
    queue = deque()
    transfers = [
        TwoPhase(queue, Fake(log, f"first {i}", num_phases), lambda i=i: Fake(log, f"second {i}"))
        for i in range(NUM_TRANSFERS)
    ]
    return queue, transfers


@pytest.mark.parametrize("num_phases", [1, 2])
@pytest.mark.parametrize("order", list(itertools.permutations(range(NUM_TRANSFERS))))
def test_any_order_of_waits_starts_the_same_transfers(order, num_phases):
    log = []
    queue, transfers = _make(log, num_phases)
    for index in order:
        transfers[index].wait()
    begun = [entry for entry in log if entry.startswith("begin second")]
    assert begun == [f"begin second {i}" for i in range(NUM_TRANSFERS)]
    assert not queue
    for i in range(NUM_TRANSFERS):
        ends = [log.index(f"end {phase} {i}") for phase in ("first", "second")]
        assert log.index(f"begin second {i}") < ends[1]
        assert ends[0] < ends[1]


@pytest.mark.parametrize("num_phases", [1, 2])
@pytest.mark.parametrize("calls", list(itertools.product(range(NUM_TRANSFERS), repeat=4)))
def test_any_order_of_advances_and_polls_too(calls, num_phases):
    """An advance completes one phase at most, and never waits for an earlier transfer."""
    log = []
    _, transfers = _make(log, num_phases)
    for index in calls:
        transfers[index].advance()
        transfers[index].poll()
        begun = [int(entry[-1]) for entry in log if entry.startswith("begin second")]
        assert begun == list(range(len(begun)))
    assert not any(entry.startswith("end") for entry in log), "nothing was waited for"
    advanced = [calls.count(i) >= num_phases for i in range(NUM_TRANSFERS)]
    num_ready = advanced.index(False) if False in advanced else NUM_TRANSFERS
    assert len([entry for entry in log if entry.startswith("begin second")]) == num_ready


def test_a_transfer_is_over_when_both_phases_are():
    log = []
    first = Fake(log, "first")
    transfer = TwoPhase(deque(), first, lambda: Fake(log, "second"))
    assert not transfer.poll()
    assert not transfer.advance()
    assert not transfer.advance(), "peers may still read what the first phase sent"
    first.wait()
    assert transfer.advance()
    assert not transfer.poll()
    transfer.wait()
    assert transfer.poll()
    assert log.count("end first") == 1


def test_a_chain_advances_phase_by_phase():
    log = []
    chain = Chained(Fake(log, "first"), lambda: Fake(log, "second"))
    assert not chain.poll()
    assert not chain.advance()
    assert log == ["begin first", "begin second"]
    assert chain.advance()
    chain.wait()
    assert log[-1] == "end second"


@pytest.mark.parametrize("how", ["advance", "poll", "wait"])
def test_a_computation_follows_once(how):
    log = []
    inner = Fake(log, "transfer", 2)
    transfer = Then(inner, lambda: log.append("computed"))
    if how == "advance":
        assert not transfer.advance()
        assert "computed" not in log
        assert transfer.advance()
    elif how == "poll":
        assert not transfer.poll()
        inner.wait()
        assert transfer.poll()
    transfer.wait()
    transfer.wait()
    assert log.count("computed") == 1
