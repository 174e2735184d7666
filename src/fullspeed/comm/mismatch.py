"""Debug mode: before a collective moves data, its ranks compare what each of them is about to do.

They compare through the store of the rendezvous, which pairs no calls with one another: so ranks that do different
things all learn what the others do. FULLSPEED_DEBUG_COLLECTIVES=1 switches it on; collectives then take milliseconds
more.
"""

from __future__ import annotations

import functools
import json
import sys
from typing import Any, NamedTuple

import torch
import torch.distributed as dist

from fullspeed.base import env
from fullspeed.base.errors import CommError
from fullspeed.comm.stacks import user_line

VARIABLE = "FULLSPEED_DEBUG_COLLECTIVES"


@functools.cache
def is_on() -> bool:
    """Whether this process compares collectives before it enters them."""
    return env.get(VARIABLE, "0") != "0"


class Intent(NamedTuple):
    """What one rank is about to do."""

    what: str  # operation, shapes and dtypes of its tensors, reduction or source
    caller: str  # the user's line; ranks may come from different ones

    @classmethod
    def of(cls, op: str, tensors: tuple[torch.Tensor, ...], detail: object = "") -> Intent:
        """The intent of the code that calls this, with its caller's line."""
        told = [f"{tuple(tensor.shape)} {tensor.dtype}" for tensor in tensors]
        what = f"{op} {' and '.join(told)} {detail}"
        return cls(" ".join(what.split()), user_line(sys._getframe(1)))


def own_store() -> Any:
    """A connection of its own to the ranks' store: a wait of one thread holds its connection against the others."""
    origin: Any = dist.distributed_c10d._get_default_store()
    return origin.clone()


class Channel:
    """One sequence of collectives that the same ranks enter in the same order."""

    def __init__(self, name: str, ranks: tuple[int, ...]) -> None:
        """Make one, as every rank does.

        Args:
            name: the same on all ranks, and no other channel's of these ranks.
            ranks: global ranks that take part, this one among them.
        """
        self._name, self._ranks = f"fullspeed/debug/{','.join(map(str, ranks))}/{name}", ranks
        self.origin: Any = dist.distributed_c10d._get_default_store()
        self._store = own_store()
        self._rank = dist.get_rank()
        self._turn = 0

    def compare(self, intent: Intent) -> None:
        """Wait for the other ranks and return if all intend the same.

        Raises:
            CommError: on every rank, with what each of them intends; or some ranks did not come in the time a
                collective may take.
        """
        keys = {rank: self._key(self._turn, rank) for rank in self._ranks}
        text = json.dumps(intent)
        self._store.set(self._now_key(self._rank), text)
        self._store.set(keys[self._rank], text)
        try:
            self._store.wait(list(keys.values()), self.origin.timeout)
        except RuntimeError:  # the stores differ in what they raise on a time-out
            raise CommError(self._describe_missing(keys, intent)) from None
        intents = {rank: self._read(key) for rank, key in keys.items()}
        if self._turn:
            self._store.delete_key(self._key(self._turn - 1, self._rank))  # all are here, so all have read it
        self._turn += 1
        if any(other.what != intent.what for other in intents.values()):
            said = "".join(f"\n  rank {rank}: {one.what}, called at {one.caller}" for rank, one in intents.items())
            raise CommError(
                f"ranks enter different collectives; all must make the same calls in the same order, with the same "
                f"shapes and dtypes:{said}"
            )

    def _describe_missing(self, keys: dict[int, str], intent: Intent) -> str:
        lines = []
        for rank in [rank for rank, key in keys.items() if not self._store.check([key])]:
            entered = self._store.check([self._now_key(rank)])
            last = self._read(self._now_key(rank)) if entered else None
            told = "it entered none yet" if last is None else f"the last it entered: {last.what} at {last.caller}"
            lines.append(f"\n  rank {rank} did not come; {told}")
        return (
            f"rank {self._rank} waited {self.origin.timeout.total_seconds():g} s in {intent.what} of ranks "
            f"{', '.join(map(str, self._ranks))}, called at {intent.caller}:{''.join(lines)}"
        )

    def _key(self, turn: int, rank: int) -> str:
        return f"{self._name}/{turn}/{rank}"

    @staticmethod
    def _now_key(rank: int) -> str:
        return f"fullspeed/debug/now/{rank}"

    def _read(self, key: str) -> Intent:
        return Intent(*json.loads(self._store.get(key)))


_channels: dict[tuple[int, ...], Channel] = {}


def check(op: str, group: dist.ProcessGroup | None, *tensors: torch.Tensor, detail: object = "") -> None:
    """Compare a collective that this rank enters now with what the group's other ranks enter; nothing when off.

    Raises:
        CommError: as `Channel.compare`.
    """
    if not is_on():
        return
    ranks = tuple(dist.get_process_group_ranks(group or dist.group.WORLD))
    channel = _channels.get(ranks)
    if channel is None or channel.origin is not dist.distributed_c10d._get_default_store():
        channel = _channels[ranks] = Channel("calls", ranks)
    channel.compare(Intent.of(op, tensors, detail))
