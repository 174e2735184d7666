"""The reductions of a backward: which groups have all their gradients, which start now, which are waited for.

A group's reduction starts with the last gradient that is expected of it, while backward goes on, in an order that all
ranks share (`sharding/order.py`). How one group's gradients are summed is `sharding/gradients.py`.
"""

from __future__ import annotations

import itertools
import math
from collections import deque
from collections.abc import Callable, Sequence

import torch
from torch import nn

from fullspeed.comm import Agreement
from fullspeed.sharding.group import FlatGroup
from fullspeed.sharding.order import LaunchCount, ReductionOrder

# Besides the limit on elements: each reduction under way holds its buffers, however small the groups are.
MAX_REDUCTIONS_IN_FLIGHT = 16


class ReductionPolicy:
    """When gradients are reduced.

    Attributes:
        is_boundary: the coming backward is the last before a step; set by the engine.
        each_backward: reduce in every backward (gradients are sharded), not only in the last.
        overlap: start a group's reduction as soon as its last gradient is there.
        max_in_flight_numel: elements of gradient being reduced at once; the oldest is waited for beyond it.
    """

    def __init__(self, *, overlap: bool, max_in_flight_numel: int, each_backward: bool) -> None:
        self.is_boundary = True
        self.each_backward = each_backward
        self.overlap = overlap
        self.max_in_flight_numel = max_in_flight_numel

    @property
    def in_backward(self) -> bool:
        """Whether the backward that runs now reduces."""
        return self.is_boundary or self.each_backward


class Reductions:
    """The reductions of one model's trained groups.

    In a pass: `begin_pass`; `arrived` with each gradient; `expect_alike`, if it comes to its end; `launch_remaining`;
    and, when every rank has come so far, `finish_pass`. Before a step: `reduce_rest`.
    """

    def __init__(
        self, groups: Sequence[FlatGroup], policy: ReductionPolicy, agreement: Agreement, launches: LaunchCount
    ) -> None:
        self.policy = policy
        self.on_reduced: Callable[[FlatGroup], None] | None = (
            None  # told of each that a backward before a step completes
        )
        self._agreement = agreement
        self._launches = launches
        self._in_flight: deque[FlatGroup] = deque()  # the oldest first
        self._advanced: list[FlatGroup] = []  # summed, but peers may still be reading
        self._clock = itertools.count()
        self.restart(groups)

    def restart(self, groups: Sequence[FlatGroup]) -> None:
        """`groups` are trained from now on: forget what gradients were expected and the order that was learned."""
        self._groups = {group.index: group for group in groups}
        self._order = ReductionOrder([group.index for group in reversed(groups)])
        self._order_is_learned = False
        self._last_arrival: dict[int, int] = {}  # group -> when its last gradient came
        self._num_arrived = dict.fromkeys(self._groups, 0)
        # Gradients per pass: one for each parameter at first, then as many as in the last pass.
        self._num_expected = {group.index: sum(group.trained) for group in groups}

    # ------------------------------------------------------------------ a pass

    def begin_pass(self) -> None:
        """A backward begins: no gradient has come, nothing is launched."""
        self._order.begin_pass()
        self._num_arrived = dict.fromkeys(self._num_arrived, 0)

    def arrived(self, group: FlatGroup) -> bool:
        """A gradient of the group is in its buffer: start what is due. Returns whether the group expects no more."""
        index = group.index
        self._num_arrived[index] += 1
        self._last_arrival[index] = next(self._clock)
        if self._num_arrived[index] != self._num_expected[index]:
            return False
        if self.policy.in_backward and self.policy.overlap:
            for due in self._order.ready(index):
                self._launch(self._groups[due])
        return True

    def expect_alike(self) -> None:
        """As many gradients as came in this pass are expected in the next."""
        self._num_expected = dict(self._num_arrived)

    def launch_remaining(self) -> None:
        """Backward is over: start every reduction that has not been started."""
        if self.policy.in_backward:
            for index in self._order.remaining():
                self._launch(self._groups[index])

    def finish_pass(self) -> None:
        """Every rank has started this pass's reductions: wait for them all, learn the order, show what is whole."""
        if not self.policy.in_backward:
            return
        for group in self._groups.values():
            group.grads.advance_reduce()
        for group in (*self._advanced, *self._in_flight):
            group.grads.finish_reduce()
            self._tell_reduced(group)
        self.finish()
        self._learn_order()
        for group in self._groups.values():
            group.grads.expose()

    def finish(self) -> None:
        """Wait for every reduction under way."""
        self._in_flight.clear()
        self._advanced.clear()
        for group in self._groups.values():
            group.grads.finish_reduce()

    def _launch(self, group: FlatGroup) -> None:
        self._in_flight.append(group)
        self._launches.mine += 1
        group.grads.begin_reduce()
        in_flight_numel = sum(waiting.numel for waiting in self._in_flight)
        while in_flight_numel > self.policy.max_in_flight_numel or len(self._in_flight) > MAX_REDUCTIONS_IN_FLIGHT:
            # In mid-backward, wait only for what every rank has started: another may be waiting for us to gather.
            number = self._launches.mine - len(self._in_flight)
            if number >= self._launches.by_all:
                break
            oldest = self._in_flight.popleft()
            in_flight_numel -= oldest.numel
            oldest.grads.advance_reduce()
            self._advanced.append(oldest)
        self._advanced = [waiting for waiting in self._advanced if not self._is_finished(waiting)]
        while self.on_reduced is not None and self._in_flight and self._is_finished(self._in_flight[0]):
            self._in_flight.popleft()

    def _is_finished(self, group: FlatGroup) -> bool:
        """Finish a reduction under way if that takes no waiting."""
        if not group.grads.try_finish_reduce():
            return False
        self._tell_reduced(group)
        return True

    def _tell_reduced(self, group: FlatGroup) -> None:
        if self.on_reduced is not None and self.policy.is_boundary:
            self.on_reduced(group)

    def _learn_order(self) -> None:
        """After the first pass, reduce in the order in which rank 0 completed its groups, those without any last."""
        if self._order_is_learned:
            return
        self._order_is_learned = True
        mine = sorted(self._order.order, key=lambda index: self._last_arrival.get(index, math.inf))
        self._order = ReductionOrder(self._agreement.exchange(mine)[0])

    # ----------------------------------------------------------------- a step

    def reduce_rest(self) -> dict[nn.Parameter, bool]:
        """Reduce whatever no pass has reduced. Collective.

        Returns, for every parameter of these groups, whether any rank's gradient reached it since the last step.
        """
        flags = self._agreement.maximum(self._flags())
        if flags[0]:
            for index in self._order.order:
                self._groups[index].grads.begin_reduce()
            self.finish()
        touched = iter(flags[1:].tolist())
        return {param: bool(next(touched)) for group in self._groups.values() for param in group.params}

    def _flags(self) -> torch.Tensor:
        """Whether this rank has gradients to reduce, then, for every parameter, whether it got one."""
        flags = [any(group.grads.has_local for group in self._groups.values())]
        for group in self._groups.values():
            group.grads.adopt_exposed()
            flags.extend(group.grads.touched)
        return torch.tensor(flags, dtype=torch.uint8)
