"""The order in which groups are used, remembered from pass to pass: what to fetch next, what to keep. Integers only."""

from __future__ import annotations

from collections.abc import Sequence

# A pass longer than this (forwards with gradients that no backward ever ends) starts over, so the record is bounded.
_MAX_USES = 100_000


class UseTrace:
    """Recorded order of group uses in one pass (forward and backward of a micro-batch, say).

    The first pass is only recorded. Later passes are followed along the record; where a pass leaves it, predictions
    stop until the pass meets it again, and the new order replaces the record when the pass ends. An order is a hint:
    nothing that is computed depends on it.

    >>> trace = UseTrace([10, 20])
    >>> for group in (0, 1, 1, 0): trace.use(group)
    >>> trace.end_pass(); trace.use(0); trace.upcoming()
    [1, 1, 0]
    >>> trace.use(1); trace.reuse_distance(0), trace.reuse_distance(1)
    (20, 0)
    """

    def __init__(self, numels: Sequence[int]) -> None:
        self._numels = list(numels)
        self._recorded: list[int] = []
        self._current: list[int] = []
        self._cursor = 0  # next expected position in the record

    def use(self, group: int) -> None:
        """Note that `group` is used now."""
        if len(self._current) >= _MAX_USES:
            self.end_pass()
        self._current.append(group)
        try:
            self._cursor = self._recorded.index(group, self._cursor) + 1
        except ValueError:
            self._cursor = min(self._cursor, len(self._recorded))

    def end_pass(self) -> None:
        """Close the pass: its order is the record for the next one. An empty pass changes nothing."""
        if self._current:
            self._recorded, self._current = self._current, []
        self._cursor = 0

    def upcoming(self) -> list[int]:
        """Uses still expected in this pass, nearest first."""
        return self._recorded[self._cursor :]

    def reuse_distance(self, group: int) -> int | None:
        """Elements of other groups used before `group` is expected again in this pass; None when it is not."""
        distance = 0
        for other in self._recorded[self._cursor :]:
            if other == group:
                return distance
            distance += self._numels[other]
        return None
