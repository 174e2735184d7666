"""At most one checkpoint being written while training goes on, and what its failure does: every rank learns of it."""

from __future__ import annotations

import logging
import threading
import time

from fullspeed.base.errors import CheckpointError
from fullspeed.base.log import log_dist
from fullspeed.checkpoint.writing import Writing
from fullspeed.comm import Agreement, Group
from fullspeed.comm.rendezvous import together

_POLL_S = 0.01
_RUNNING, _DONE, _FAILED = 0, 1, 2


class BackgroundSave:
    """Writes in a thread, which uses no collective. All methods are collective, and free when nothing is written.

    Python waits for the thread before the program ends.
    """

    def __init__(self, group: Group) -> None:
        self._group = group
        self._agreement: Agreement | None = None
        self._thread: threading.Thread | None = None
        self._writing: Writing | None = None
        self._error: str | None = None
        self._stop = threading.Event()

    def begin(self, writing: Writing) -> None:
        """Write from now on. There must be nothing under way, see `wait`."""
        assert self._thread is None
        if self._agreement is None:
            self._agreement = Agreement(self._group)
        self._writing, self._error = writing, None
        self._stop.clear()
        self._thread = threading.Thread(target=self._run, args=(writing,), name=f"checkpoint {writing.pending.tag}")
        self._thread.start()

    def poll(self) -> bool:
        """Whether nothing is under way any more.

        Raises:
            CheckpointError: on every rank, once: a rank could not write, or rank 0 could not commit.
        """
        if self._thread is None:
            return True
        assert self._agreement is not None
        assert self._writing is not None
        state = _RUNNING if self._thread.is_alive() else _DONE if self._error is None else _FAILED
        states = [state for (state,) in self._agreement.exchange([state])]
        if _FAILED in states:
            self._stop.set()
        elif _RUNNING in states:
            return False
        self._thread.join()
        writing, self._thread, self._writing = self._writing, None, None
        causes = together(lambda: self._error, CheckpointError, self._group)
        failed = {rank: cause for rank, cause in enumerate(causes) if cause is not None}
        if failed:
            writing.abandon()
            rank, cause = max(failed.items())  # rank 0 fails when another one does, so that one is the cause
            what = f"checkpoint {writing.pending.tag!r} was not completed in the background, and is gone"
            raise CheckpointError(f"{what}: rank {rank}: {cause}")
        return True

    def wait(self) -> None:
        """Return when nothing is under way; raises as `poll`."""
        while not self.poll():
            time.sleep(_POLL_S)

    def _run(self, writing: Writing) -> None:
        try:
            writing.run_alone(self._stop)
        except Exception as error:  # raised on every rank by the next `poll`
            self._error = str(error) if isinstance(error, CheckpointError) else f"{type(error).__name__}: {error}"
            if not threading.main_thread().is_alive():  # nobody will call `poll`
                writing.abandon()
                log_dist(f"checkpoint {writing.pending.tag!r} was not completed: {self._error}", [-1], logging.ERROR)
