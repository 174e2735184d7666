"""Serving the other ranks' gathers while this rank has left the model: ranks may run different numbers of forwards.

A gather needs every rank. A rank that has finished its evaluation forwards may be anywhere in the user's code: in a
barrier, in a collective of its own, at the end of the program. A thread then answers for it: it takes part in the
agreement's rounds as a rank that asks for nothing, and gives its shards, touching no parameter. Training needs none of
this, as each forward there is followed by a backward that meets the others.
"""

from __future__ import annotations

import atexit
import threading
import time
import weakref
from collections.abc import Callable

from fullspeed.base.errors import CommError, StorageError

_FIRST_NAP_S, _LONGEST_NAP_S = 1e-3, 2e-2

# A rank that is only a little behind the others takes part itself: served rounds would gather its groups once more.
_GRACE_S = 0.05


class Attendant:
    """Answers for one runtime between `leave` and `come_back`.

    Args:
        is_called: whether another rank asks for something. Called often, from the attendant's thread.
        serve: answer once, as a rank that asks for nothing.
        finish: serve until every rank has come to its end; called when the program ends while the rank is away.
    """

    def __init__(self, is_called: Callable[[], bool], serve: Callable[[], None], finish: Callable[[], None]) -> None:
        self._is_called, self._serve, self._finish = is_called, serve, finish
        self._lock = threading.Lock()  # held while serving: the rank comes back between rounds
        self._away = threading.Event()
        self._thread: threading.Thread | None = None
        self._error: BaseException | None = None
        self._left_at = 0.0

    def leave(self) -> None:
        """The rank leaves the model: answer from now on."""
        self._left_at = time.monotonic()
        self._away.set()
        if self._thread is None:
            self._thread = threading.Thread(target=_attend, args=(weakref.ref(self),), daemon=True)
            self._thread.start()
            _attendants.add(self)

    def come_back(self) -> None:
        """The rank is about to take part itself. Raises what stopped the thread, if anything did."""
        if self._away.is_set():
            with self._lock:
                self._away.clear()
        if self._error is not None:
            error, self._error = self._error, None
            raise error

    def attend(self) -> bool:
        """Serve one round if a rank asks for it; returns whether one did."""
        with self._lock:
            is_late = time.monotonic() - self._left_at > _GRACE_S
            if not self._away.is_set() or not is_late or not self._is_called():
                return False
            try:
                self._serve()
            except StorageError as error:  # all ranks raise it, and the others may need this one to end their forward
                self._error = error
            except BaseException as error:  # raised in the rank's own thread, when it comes back
                self._error = error
                self._away.clear()
            return True

    def finish(self) -> None:
        """The program ends while the rank is away: others may still need its shards."""
        if self._away.is_set():
            self.come_back()
            self._finish()


def _attend(reference: weakref.ref[Attendant]) -> None:
    """The thread: looks for rounds to serve, less and less often; ends with its attendant."""
    nap = threading.Event()
    seconds = _FIRST_NAP_S
    while (attendant := reference()) is not None:
        away = attendant._away
        seconds = _FIRST_NAP_S if attendant.attend() else min(2 * seconds, _LONGEST_NAP_S)
        del attendant
        if not away.is_set():
            away.wait(1.0)  # now and then it looks whether the attendant is still there
            seconds = _FIRST_NAP_S
        nap.wait(seconds)


_attendants: weakref.WeakSet[Attendant] = weakref.WeakSet()


@atexit.register
def _finish_all() -> None:
    for attendant in list(_attendants):
        try:
            attendant.finish()
        except (CommError, RuntimeError):
            return  # the others are gone, or torch.distributed is: there is nobody to serve
