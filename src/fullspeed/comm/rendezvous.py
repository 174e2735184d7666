"""Meeting points: who is missing, and what went wrong on whom.

`rendezvous` uses the store of the rendezvous, not a collective, so a rank that never comes can be named, and
an early one cannot pair its message with a collective the others have under way. `together` runs one step of
a longer action on every rank and lets all of them fail if one does.
"""

from __future__ import annotations

import datetime
import time
from collections.abc import Callable
from typing import Any, TypeVar

import torch.distributed as dist

from fullspeed.base import env
from fullspeed.base.errors import CommError, FullSpeedError, UsageError
from fullspeed.comm.collectives import Group, all_gather_object, get_global_rank, get_rank, get_world_size
from fullspeed.comm.observe import emit

TIMEOUT_VARIABLE = "FULLSPEED_RENDEZVOUS_TIMEOUT"
DEFAULT_TIMEOUT_S = 30.0
_POLL_S = 0.02
_HERE, _GAVE_UP = "here", "gave up"

T = TypeVar("T")


class _Turns:
    """How many rendezvous each set of ranks has passed in this process group."""

    def __init__(self) -> None:
        self._store: Any = None
        self._passed: dict[str, int] = {}

    def next(self, store: Any, name: str) -> int:
        if self._store is not store:  # torch.distributed was torn down and begun again
            self._store, self._passed = store, {}
        return self._passed.get(name, 0)

    def advance(self, name: str) -> None:
        self._passed[name] = self._passed.get(name, 0) + 1


_turns = _Turns()


def rendezvous_timeout_s() -> float:
    """Seconds a rank waits for the others: FULLSPEED_RENDEZVOUS_TIMEOUT, or 30."""
    text = env.get(TIMEOUT_VARIABLE)
    try:
        return DEFAULT_TIMEOUT_S if text is None else float(text)
    except ValueError:
        raise UsageError(f"environment variable {TIMEOUT_VARIABLE} is {text!r}; it is a number of seconds") from None


def rendezvous(what: str, group: Group | None = None) -> None:
    """Wait until every rank of the group has come to `what`, an action all of them must take part in.

    Raises:
        CommError: some did not come in time; names them.
    """
    world_size = get_world_size(group)
    if world_size == 1:
        return
    emit("barrier", 0, 0, "", world_size)
    ranks = [get_global_rank(group, rank) for rank in range(world_size)]
    me = ranks[get_rank(group)]
    name = f"fullspeed/{what}/{','.join(map(str, ranks))}"
    store = dist.distributed_c10d._get_default_store()
    turn = _turns.next(store, name)
    keys = {rank: f"{name}/{turn}/{rank}" for rank in ranks}
    store.set(keys[me], _HERE)
    missing = _wait_for(store, keys)
    if missing:
        store.set(keys[me], _GAVE_UP)  # whoever comes now must wait until this rank calls again
        verb = "has" if len(missing) == 1 else "have"
        plural = "" if len(missing) == 1 else "s"
        raise CommError(
            f"{what} on rank {me}: rank{plural} {', '.join(map(str, missing))} {verb} not called it within "
            f"{rendezvous_timeout_s():g} s. Every rank must call {what}, also those that write nothing; if "
            f"they are only slow, set {TIMEOUT_VARIABLE} to more seconds"
        )
    _turns.advance(name)
    if turn:
        store.delete_key(f"{name}/{turn - 1}/{me}")  # everyone is at this turn: nobody reads that one any more


def _wait_for(store: Any, keys: dict[int, str]) -> list[int]:
    """Ranks that did not come in time; those that came and gave up only if nobody else is to blame."""
    deadline = time.monotonic() + rendezvous_timeout_s()
    try:
        store.wait(list(keys.values()), datetime.timedelta(seconds=rendezvous_timeout_s()))
    except RuntimeError:  # the stores differ in what they raise on a time-out
        never = [rank for rank, key in keys.items() if not store.check([key])]
        if never:
            return never
    while gone := [rank for rank, key in keys.items() if store.get(key).decode() != _HERE]:
        if time.monotonic() > deadline:
            return gone
        time.sleep(_POLL_S)
    return []


def together(action: Callable[[], T], error_type: type[FullSpeedError], group: Group | None = None) -> list[T]:
    """Run `action` on every rank; returns every rank's picklable value, in rank order.

    Raises:
        error_type: on every rank, with the first failing rank's cause, when `action` raised anywhere.
        CommError: a rank ended instead of answering.
    """
    value: T | None = None
    caught: Exception | None = None
    try:
        value = action()
    except Exception as error:  # re-raised below, on every rank
        caught = error
    try:
        outcomes = all_gather_object((value, None if caught is None else _describe(caught)), group)
    except RuntimeError as error:
        raise CommError(f"a rank ended while the others waited for it; see its own output. Here: {error}") from caught
    faults = [(rank, text) for rank, (_, text) in enumerate(outcomes) if text is not None]
    if not faults:
        return [value for value, _ in outcomes]
    rank, text = faults[0]
    everywhere = len(faults) == len(outcomes) and all(other == text for _, other in faults)
    raise error_type(text if everywhere else f"rank {get_global_rank(group, rank)}: {text}") from caught


def _describe(error: Exception) -> str:
    return str(error) if isinstance(error, FullSpeedError) else f"{type(error).__name__}: {error}"
