"""In which order groups are reduced, the same on every rank whatever order gradients arrive in, and how many have been.

Integers only.
"""

from __future__ import annotations

import math
from collections.abc import Sequence


class LaunchCount:
    """How many reductions have been started, over all passes.

    Attributes:
        mine: by this rank.
        by_all: by every rank, as far as this one knows; infinite where ranks need not know it of each other.
    """

    def __init__(self) -> None:
        self.mine = 0
        self.by_all: float = math.inf


class ReductionOrder:
    """Launches reductions along one agreed order; a group that is ready early waits for its turn.

    Ranks whose models take different branches get gradients in different orders; collectives must not. The end of a
    pass launches what is left, so every pass reduces every group exactly once on every rank.

    >>> order = ReductionOrder([2, 1, 0])
    >>> order.ready(1), order.ready(2), order.remaining()
    ([], [2, 1], [0])
    """

    def __init__(self, order: Sequence[int]) -> None:
        self.order = list(order)
        self._ready: set[int] = set()
        self.num_launched = 0

    def begin_pass(self) -> None:
        """Nothing is ready, nothing launched."""
        self._ready.clear()
        self.num_launched = 0

    def ready(self, group: int) -> list[int]:
        """Note that `group` has all its gradients; returns the groups whose turn has come, in order."""
        self._ready.add(group)
        launched = []
        while self.num_launched < len(self.order) and self.order[self.num_launched] in self._ready:
            launched.append(self.order[self.num_launched])
            self.num_launched += 1
        return launched

    def remaining(self) -> list[int]:
        """Every group not launched yet, in order; they count as launched now."""
        left = self.order[self.num_launched :]
        self.num_launched = len(self.order)
        return left
