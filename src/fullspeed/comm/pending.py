"""Transfers under way: what one can do, and how several become one."""

from __future__ import annotations

from collections.abc import Callable
from typing import Protocol

import torch.distributed as dist
from typing_extensions import override

from fullspeed.comm.observe import Finish


class Pending(Protocol):
    """A transfer under way."""

    def advance(self) -> bool:
        """Wait for the phase under way and start the next, if there is one; bounds what is in flight.

        Returns whether the result is complete, though peers may still be reading what was sent.
        """

    def poll(self) -> bool:
        """Do what can be done without waiting; whether `wait` would return at once now. May err towards no."""

    def wait(self) -> None:
        """Return when the result is complete (on an accelerator: when the current stream may use it)."""


class Done(Pending):
    """A transfer that needed no waiting."""

    @override
    def advance(self) -> bool:
        return True

    @override
    def poll(self) -> bool:
        return True

    @override
    def wait(self) -> None:
        """Nothing to wait for."""


class Finishing(Pending):
    """Works to wait for, then a local computation that makes their result usable."""

    def __init__(self, works: list[dist.Work], finish: Callable[[], None] | None = None) -> None:
        self._works = works
        self._finish = finish

    @override
    def advance(self) -> bool:
        self.wait()
        return True

    @override
    def poll(self) -> bool:
        if all(work.is_completed() for work in self._works):
            self.wait()
        return not self._works

    @override
    def wait(self) -> None:
        for work in self._works:
            work.wait()
        self._works = []
        if self._finish is not None:
            finish, self._finish = self._finish, None
            finish()


class Chained(Pending):
    """A transfer whose second phase can start only when the first, which has one phase, is complete."""

    def __init__(self, first: Pending, start_second: Callable[[], Pending]) -> None:
        self._first, self._start_second = first, start_second
        self._second: Pending | None = None

    @override
    def advance(self) -> bool:
        if self._second is not None:
            return self._second.advance()
        self._first.advance()
        self._second = self._start_second()
        return False

    @override
    def poll(self) -> bool:
        if self._second is None and self._first.poll():
            self._second = self._start_second()
        return self._second is not None and self._second.poll()

    @override
    def wait(self) -> None:
        if self._second is None:
            self.advance()
        assert self._second is not None
        self._second.wait()


class Then(Pending):
    """A transfer, then a local computation on its result."""

    def __init__(self, first: Pending, finish: Callable[[], object]) -> None:
        self._first = first
        self._finish: Callable[[], object] | None = finish

    @override
    def advance(self) -> bool:
        return self._first.advance() and self._complete()

    @override
    def poll(self) -> bool:
        return self._first.poll() and self._complete()

    @override
    def wait(self) -> None:
        self._first.wait()
        self._complete()

    def _complete(self) -> bool:
        if self._finish is not None:
            finish, self._finish = self._finish, None
            finish()
        return True


class _Observed(Pending):
    """A transfer whose end someone wants to know."""

    def __init__(self, transfer: Pending, finish: Finish) -> None:
        self._transfer = transfer
        self._finish: Finish | None = finish

    @override
    def advance(self) -> bool:
        return self._transfer.advance()

    @override
    def poll(self) -> bool:
        return self._transfer.poll()

    @override
    def wait(self) -> None:
        self._transfer.wait()
        if self._finish is not None:
            finish, self._finish = self._finish, None
            finish()


def observed(transfer: Pending, finish: Finish | None) -> Pending:
    """`transfer`, with `finish` (what `emit` returned) called when it has been waited for."""
    return transfer if finish is None else _Observed(transfer, finish)
