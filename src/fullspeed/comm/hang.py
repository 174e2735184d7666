"""Notices that ranks stand still, says who waits for whom and where, and ends them.

FULLSPEED_HANG_TIMEOUT is how many seconds a rank may go without beginning or ending a collective and without an update.
When they have passed, every rank that stands still tells the others where; then each ends itself with a CommError that
shows all of them. It is off unless that variable is set; a rank that only waits still gives up after DEEPSPEED_TIMEOUT.
"""

from __future__ import annotations

import contextlib
import faulthandler
import json
import os
import platform
import sys
import threading
import time
import traceback
from collections.abc import Mapping, Sequence
from types import FrameType
from typing import NamedTuple

import torch.distributed as dist

from fullspeed.base import env
from fullspeed.base.errors import CommError, UsageError
from fullspeed.base.progress import last_step
from fullspeed.comm.mismatch import own_store
from fullspeed.comm.observe import CommEvent, Finish, add_observer, remove_observer
from fullspeed.comm.stacks import is_communicating, user_line

VARIABLE = "FULLSPEED_HANG_TIMEOUT"
_LOOKS = 20  # per time limit
_HEAR_S = 3.0  # how long the others may take at least to say where they stand
_POLL_S = 0.05


class Standing(NamedTuple):
    """Where one rank stands still."""

    host: str
    step: int  # updates behind it
    num_begun: int  # collectives so far
    last: str  # of these, in words
    is_waiting: bool  # inside communication
    line: str  # the user's
    stack: str

    @classmethod
    def of_frame(cls, frame: FrameType | None, num_begun: int, last: CommEvent | None) -> Standing:
        """That of this process's main thread, whose innermost frame is given."""
        told = "none" if last is None else f"{last.op} of {last.numel} elements {last.dtype}".rstrip()
        return cls(
            host=platform.node(),
            step=last_step(),
            num_begun=num_begun,
            last=told,
            is_waiting=is_communicating(frame),
            line=user_line(frame),
            stack="".join(traceback.format_stack(frame)),
        )


def describe(standings: Mapping[int, Standing], silent: Sequence[int]) -> str:
    """Who waits for whom, and the stacks of those that are waited for.

    Args:
        standings: by rank, of those that answered.
        silent: ranks that did not answer.
    """
    most = max(one.num_begun for one in standings.values())
    awaited = {rank for rank, one in standings.items() if not one.is_waiting or one.num_begun < most} | set(silent)
    lines = []
    for rank, one in standings.items():
        place = f"rank {rank} on {one.host}, after step {one.step},"
        others = ", ".join(f"rank {other}" for other in sorted(awaited - {rank})) or "the others"
        if one.is_waiting:
            lines.append(f"{place} waits for {others} in collective {one.num_begun} ({one.last}) at {one.line}")
        else:
            lines.append(f"{place} is in no collective (its last was {one.num_begun}, {one.last})")
        if rank in awaited or not awaited:
            lines.append(f"it stands at\n{one.stack.rstrip()}")
    for rank in silent:
        lines.append(f"rank {rank} does not answer: it goes on, has ended, or is held in code that Python cannot enter")
    return "\n".join(lines)


class HangWatch:
    """A thread that looks whether this rank gets on. Ends the process when it does not."""

    def __init__(self, limit_s: float) -> None:
        self._limit_s = limit_s
        self._hear_s = max(_HEAR_S, 2 * limit_s / _LOOKS)
        self._rank, self._world_size = dist.get_rank(), dist.get_world_size()
        self._store = own_store()
        self._main = threading.main_thread().ident
        self._num_begun = self._num_ended = 0
        self._last: CommEvent | None = None
        self._leaving = threading.Event()
        self._thread = threading.Thread(target=self._watch, daemon=True, name="hang watch")

    def start(self) -> None:
        """Watch from now on."""
        add_observer(self._begin)
        self._arm(self._limit_s)
        self._thread.start()

    def stop(self) -> None:
        """Watch no more."""
        remove_observer(self._begin)
        self._leaving.set()
        self._thread.join()
        faulthandler.cancel_dump_traceback_later()

    def _begin(self, event: CommEvent) -> Finish:
        self._num_begun += 1
        self._last = event
        return self._end

    def _end(self) -> None:
        self._num_ended += 1

    def _progress(self) -> tuple[int, int, int]:
        return self._num_begun, self._num_ended, last_step()

    def _watch(self) -> None:
        seen, changed_at = self._progress(), time.monotonic()
        while not self._leaving.wait(self._limit_s / _LOOKS):
            self._arm(self._limit_s)
            if self._progress() != seen:
                seen, changed_at = self._progress(), time.monotonic()
            elif time.monotonic() - changed_at > self._limit_s:
                self._give_up(seen)
                changed_at = time.monotonic()

    def _give_up(self, seen: tuple[int, int, int]) -> None:
        """End this process after telling why; returns if it gets on again meanwhile."""
        self._arm(self._limit_s + 2 * self._hear_s)
        frame = None if self._main is None else sys._current_frames().get(self._main)
        mine = Standing.of_frame(frame, self._num_begun, self._last)
        heard = {self._rank: mine}
        with contextlib.suppress(RuntimeError):  # the store may end with its rank
            self._store.set(self._key(self._rank), json.dumps(mine))
            heard = self._hear()
        if self._progress() != seen or self._leaving.is_set():
            self._store.delete_key(self._key(self._rank))
            return
        silent = [rank for rank in range(self._world_size) if rank not in heard]
        text = f"no collective began or ended and no update was made for {self._limit_s:g} s ({VARIABLE}):\n"
        # As if the main thread had raised it: a launcher's hook records it, else it is printed.
        sys.excepthook(CommError, CommError(text + describe(heard, silent)), None)
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(1)

    @staticmethod
    def _arm(seconds: float) -> None:
        """Let this process show its stacks and end unless it arms again in time.

        It cannot when the main thread is in code that keeps the interpreter's lock.
        """
        faulthandler.dump_traceback_later(seconds, exit=True, file=sys.__stderr__ or 2)

    def _hear(self) -> dict[int, Standing]:
        """Where ranks stand still, by rank; waits a little for those that have not said it yet."""
        deadline = time.monotonic() + self._hear_s
        ranks = range(self._world_size)
        while time.monotonic() < deadline and not all(self._store.check([self._key(rank)]) for rank in ranks):
            time.sleep(_POLL_S)
        told = {rank: self._key(rank) for rank in ranks if self._store.check([self._key(rank)])}
        standings = {rank: Standing(*json.loads(self._store.get(key))) for rank, key in told.items()}
        time.sleep(4 * _POLL_S)  # for the others, who read the same from a store that may be this rank's
        return standings

    @staticmethod
    def _key(rank: int) -> str:
        return f"fullspeed/hang/{rank}"


_watches: list[HangWatch] = []


def watch_for_hangs() -> None:
    """Begin to watch this rank if the environment asks for it; does nothing when it does, or for a world of one.

    Raises:
        UsageError: the variable is no positive number of seconds.
    """
    text = env.get(VARIABLE)
    if text is None or _watches or dist.get_world_size() == 1:
        return
    try:
        limit_s = float(text)
    except ValueError:
        limit_s = 0.0
    if not limit_s > 0:
        raise UsageError(f"environment variable {VARIABLE} is {text!r}; it is a number of seconds above 0")
    _watches.append(HangWatch(limit_s))
    _watches[0].start()


def stop_watching() -> None:
    """Undo `watch_for_hangs`; does nothing when it did nothing."""
    while _watches:
        _watches.pop().stop()
