"""Saving and leaving when a signal asks the job to end (`checkpoint.save_on_signal`)."""

from __future__ import annotations

import os
import signal
import threading
from collections.abc import Callable
from types import FrameType
from typing import Any

from fullspeed.base.errors import UsageError
from fullspeed.base.log import log_dist
from fullspeed.base.progress import note_saves
from fullspeed.comm import Agreement, get_world_group

SIGNALS = (signal.SIGTERM, signal.SIGINT)


class SaveOnSignal:
    """One engine's answer to SIGTERM and SIGINT: at the next boundary all ranks save, then leave.

    The first signal is only noted. Ranks say at every boundary whether they have one, so one signalled rank is enough.
    A second signal ends the process at once. Of several engines in a process the newest answers.
    """

    def __init__(self, save: Callable[[], object]) -> None:
        """Begin to listen. Collective: every rank must make one.

        Args:
            save: saves what is to be kept; collective.

        Raises:
            UsageError: not in the main thread, where Python would refuse handlers.
        """
        if threading.current_thread() is not threading.main_thread():
            raise UsageError(
                "checkpoint.save_on_signal needs the main thread, which alone may handle signals; call initialize "
                "there or set it to false"
            )
        self._save = save
        self._noted = 0
        self._agreement = Agreement(get_world_group())
        self._before: dict[int, Any] = {number: signal.signal(number, self._note) for number in SIGNALS}
        note_saves()

    def at_boundary(self) -> None:
        """Save and leave if any rank has been signalled. Collective, once per update.

        Raises:
            SystemExit: after saving, with the code 128 + signal.
        """
        number = max(noted for (noted,) in self._agreement.exchange([self._noted]))
        if not number:
            return
        log_dist(f"saving before this job ends, as {signal.Signals(number).name} asks")
        self._save()
        raise SystemExit(128 + number)

    def close(self) -> None:
        """Leave the signals to whoever had them before."""
        for number, handler in self._before.items():
            if signal.getsignal(number) == self._note:
                signal.signal(number, handler)

    def _note(self, number: int, frame: FrameType | None) -> None:
        if self._noted:
            signal.signal(number, signal.SIG_DFL)
            os.kill(os.getpid(), number)
        self._noted = number
