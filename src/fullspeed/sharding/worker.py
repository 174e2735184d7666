"""A thread that steps optimizers while the model computes, and what its failure does: every rank learns of it."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from typing import TypeVar

import torch

from fullspeed.base.errors import UpdateError
from fullspeed.comm import Agreement, Group
from fullspeed.comm.rendezvous import together

T = TypeVar("T")


class BackgroundWorker:
    """One thread that carries out actions in the order they are given. They use no collective.

    It starts with the first action and ends with this object.
    """

    def __init__(self, num_threads: int, group: Group) -> None:
        """`num_threads`: how many cores torch may use for one action. `group`: who learns of a failure. Collective."""
        self._num_threads, self._group = num_threads, group
        self._agreement = Agreement(group)
        self._executor: ThreadPoolExecutor | None = None

    def submit(self, action: Callable[[], T]) -> Future[T]:
        """Carry out `action` when those before it are done."""
        if self._executor is None:
            # torch keeps the number for each thread.
            self._executor = ThreadPoolExecutor(1, "update", torch.set_num_threads, (self._num_threads,))
        return self._executor.submit(action)

    def wait(self, actions: Sequence[Future[T]]) -> None:
        """Return when these actions are done. Collective.

        Raises:
            UpdateError: on every rank, if an action failed on any.
        """
        errors = [error for action in actions if (error := action.exception()) is not None]
        if not any(has_failed for (has_failed,) in self._agreement.exchange([int(bool(errors))])):
            return

        def report() -> None:
            if errors:
                raise UpdateError(f"an update in the background failed: {type(errors[0]).__name__}: {errors[0]}")

        together(report, UpdateError, self._group)
