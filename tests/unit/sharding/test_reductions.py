"""When a backward's reductions start and are waited for, told by groups that only note what is asked of them."""

from typing import Any

import torch

from fullspeed.sharding.order import LaunchCount
from fullspeed.sharding.reductions import ReductionPolicy, Reductions


class Alone:
    """An agreement of one rank."""

    def exchange(self, values: list[int]) -> list[list[int]]:
        return [values]

    def maximum(self, values: torch.Tensor) -> torch.Tensor:
        return values


class Noted:
    """A group, and its gradients: writes down what is done with its reduction. The result comes when waited for."""

    def __init__(self, index: int, events: list[str], num_params: int = 1) -> None:
        self.index, self.numel, self._events = index, 10, events
        self.params = [f"{index}.{slot}" for slot in range(num_params)]
        self.trained = [True] * num_params
        self.touched = [False] * num_params
        self.has_local = False
        self.grads = self
        self._is_reducing = False
        self.is_summed = False  # the result would be there without waiting

    def begin_reduce(self) -> None:
        self._events.append(f"begin {self.index}")
        self._is_reducing, self.has_local = True, False

    def advance_reduce(self) -> None:
        if self._is_reducing:
            self._events.append(f"advance {self.index}")

    def try_finish_reduce(self) -> bool:
        self._is_reducing = self._is_reducing and not self.is_summed
        return not self._is_reducing

    def finish_reduce(self) -> None:
        self._is_reducing = False

    def adopt_exposed(self) -> None:
        pass

    def expose(self) -> None:
        self._events.append(f"expose {self.index}")


def make(
    num_groups: int, *, num_params: int = 1, overlap: bool = True, max_in_flight_numel: int = 10**9
) -> tuple[Reductions, list[Any], LaunchCount, list[str]]:
    events: list[str] = []
    groups: list[Any] = [Noted(index, events, num_params) for index in range(num_groups)]
    policy = ReductionPolicy(overlap=overlap, max_in_flight_numel=max_in_flight_numel, each_backward=True)
    agreement: Any = Alone()
    launches = LaunchCount()
    return Reductions(groups, policy, agreement, launches), groups, launches, events


def begun(events: list[str]) -> list[int]:
    return [int(event.split()[1]) for event in events if event.startswith("begin")]


def test_a_reduction_starts_with_the_last_gradient_of_its_group() -> None:
    reductions, groups, launches, events = make(2, num_params=2)
    reductions.begin_pass()
    assert not reductions.arrived(groups[1])
    assert events == []
    assert reductions.arrived(groups[1])
    assert begun(events) == [1]
    reductions.launch_remaining()
    assert begun(events) == [1, 0]
    assert launches.mine == 2


def test_without_overlap_all_start_at_the_end() -> None:
    reductions, groups, _, events = make(3, overlap=False)
    reductions.begin_pass()
    for group in (groups[2], groups[0], groups[1]):
        assert reductions.arrived(group)
    assert events == []
    reductions.launch_remaining()
    assert begun(events) == [2, 1, 0]


def test_a_pass_that_does_not_reduce_starts_nothing() -> None:
    reductions, groups, launches, events = make(1)
    reductions.policy.each_backward = reductions.policy.is_boundary = False
    reductions.begin_pass()
    assert reductions.arrived(groups[0])
    reductions.launch_remaining()
    reductions.finish_pass()
    assert events == []
    assert launches.mine == 0


def test_as_many_gradients_are_expected_as_came_in_the_pass_before() -> None:
    reductions, groups, _, events = make(1, num_params=3)
    for is_complete in ([False, False], [False, True]):
        reductions.begin_pass()
        assert [reductions.arrived(groups[0]) for _ in is_complete] == is_complete
        reductions.expect_alike()
        reductions.launch_remaining()
        reductions.finish_pass()
    assert begun(events) == [0, 0]


def test_later_passes_follow_the_order_of_the_first() -> None:
    reductions, groups, _, events = make(4)
    arrivals = (groups[0], groups[3], groups[1])
    for _ in range(2):
        events.clear()
        reductions.begin_pass()
        for group in arrivals:
            reductions.arrived(group)
        early = begun(events)
        reductions.launch_remaining()
        reductions.finish_pass()
    assert early == [0, 3, 1]
    assert begun(events) == [0, 3, 1, 2], "a group without gradients comes last"
    reductions.restart(groups)
    reductions.begin_pass()
    reductions.arrived(groups[0])
    assert begun(events) == [0, 3, 1, 2], "a fresh start expects the reverse of the forward again"


def test_too_much_in_flight_waits_for_the_oldest_that_all_ranks_have_started() -> None:
    reductions, groups, launches, events = make(3, max_in_flight_numel=10)
    launches.by_all = 0
    reductions.begin_pass()
    reductions.arrived(groups[2])
    reductions.arrived(groups[1])
    assert events == ["begin 2", "begin 1"], "a peer may be waiting for this rank to gather"
    launches.by_all = 1
    reductions.arrived(groups[0])
    assert events == ["begin 2", "begin 1", "begin 0", "advance 2"]


def test_what_no_pass_reduced_is_reduced_before_the_step() -> None:
    reductions, groups, _, events = make(2, num_params=2)
    assert not any(reductions.reduce_rest().values())
    assert events == []
    groups[0].has_local = groups[0].touched[1] = True
    assert reductions.reduce_rest() == {"0.0": False, "0.1": True, "1.0": False, "1.1": False}
    assert begun(events) == [1, 0]


def test_who_asks_is_told_of_each_reduction_that_is_complete_once_and_early_where_it_is() -> None:
    reductions, groups, _, _ = make(3)
    told: list[int] = []
    reductions.on_reduced = lambda group: told.append(group.index)
    reductions.begin_pass()
    groups[2].is_summed = True
    reductions.arrived(groups[2])
    reductions.arrived(groups[1])
    assert told == [2], "the second is not complete yet"
    groups[1].is_summed = groups[0].is_summed = True
    reductions.arrived(groups[0])
    assert told == [2, 1, 0]
    reductions.launch_remaining()
    reductions.finish_pass()
    assert told == [2, 1, 0]


def test_who_asks_is_told_at_the_end_of_backward_of_those_that_were_waited_for() -> None:
    reductions, groups, _, _ = make(2)
    told: list[int] = []
    reductions.on_reduced = lambda group: told.append(group.index)
    for is_boundary, expected in ((False, []), (True, [1, 0])):
        reductions.policy.is_boundary = is_boundary
        reductions.begin_pass()
        reductions.arrived(groups[1])
        reductions.launch_remaining()
        reductions.finish_pass()
        assert told == expected, "only the backward before a step counts"
