"""How long each recomputed unit takes, in the forward and again in backward."""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Literal, NamedTuple

from fullspeed.accelerator import get_accelerator
from fullspeed.base.log import log_dist

Phase = Literal["forward", "recompute"]


class UnitTimes(NamedTuple):
    """One unit in one pass."""

    unit: int  # the how-manieth checkpointed call of the pass
    forward_ms: float
    recompute_ms: float  # 0 until backward reaches the unit; without the gradients that follow


class Stopwatch:
    """What happens at the boundaries of a unit: waiting for the device, noting times, both, or nothing."""

    def __init__(self, *, synchronize: bool, profile: bool) -> None:
        """`profile` notes times, which on a device mean something only if it is waited for: so it waits, too."""
        self._waits = synchronize or profile
        self._notes = profile
        self._spent: dict[int, dict[Phase, float]] = {}

    def begin_pass(self) -> None:
        """The first unit of a pass is about to run: log the times of the pass before, and forget them."""
        if self._spent:
            shown = ", ".join(f"{t.unit}: {t.forward_ms:.2f} + {t.recompute_ms:.2f}" for t in self.times())
            log_dist(f"checkpointed units, forward + recompute in ms: {shown}")
        self._spent = {}

    def times(self) -> list[UnitTimes]:
        """The units of the present pass."""
        return [UnitTimes(unit, ms.get("forward", 0.0), ms.get("recompute", 0.0)) for unit, ms in self._spent.items()]

    @contextmanager
    def around(self, unit: int, phase: Phase) -> Iterator[None]:
        """Around a unit's forward or recompute; recomputes of one unit add up."""
        begin_s = self._boundary()
        try:
            yield
        finally:
            end_s = self._boundary()
            if self._notes:
                spent = self._spent.setdefault(unit, {})
                spent[phase] = spent.get(phase, 0.0) + 1e3 * (end_s - begin_s)

    def _boundary(self) -> float:
        if self._waits:
            get_accelerator().synchronize()
        return time.perf_counter()
