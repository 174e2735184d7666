"""Rounds of an elastic job: who takes part in one start of the ranks, and whether all are still there."""

from __future__ import annotations

import contextlib
import threading

from torch._C._distributed_c10d import PrefixStore
from torch.distributed.elastic.rendezvous import RendezvousError, RendezvousHandler, RendezvousInfo

from fullspeed.base.errors import CommError
from fullspeed.base.log import logger
from fullspeed.comm.node_watch import NodeWatch, Place

_POLL_S = 0.5
_out_of_reach: list[RendezvousHandler] = []  # kept: collecting one waits for its thread, whose call does not return


class Rounds(RendezvousHandler):
    """A rendezvous whose nodes watch each other between two rounds.

    torchrun's own removes a silent node from its books, and ends nothing: ranks would wait for those of a host whose
    cable is out. It also asks the first node in the agent's main thread, in a call that does not return when that
    node is out of reach; here a thread asks, and the agent reads what it last heard.
    """

    def __init__(self, inner: RendezvousHandler, name: str, first: str, silence_s: float) -> None:
        """Watch over `inner`.

        Args:
            inner: torchrun's rendezvous.
            name: this node's, for people.
            first: address of the node that keeps the meeting.
            silence_s: seconds without a sign of life after which a node counts as lost.
        """
        self._inner, self._name, self._first, self._silence_s = inner, name, first, silence_s
        self._watch: NodeWatch | None = None
        self._num_waiting = 0

    def is_broken(self) -> bool:
        """Whether a node of the present round is lost, or this one is cut off from the first."""
        return self._watch is not None and self._watch.is_stopped()

    def next_rendezvous(self) -> RendezvousInfo:
        """Wait until enough nodes are there. Raises CommError when this one is cut off from the first."""
        self._end_watch()
        info = self._inner.next_rendezvous()
        # A connection of its own: agents wait on theirs for each other, during which no sign of life could be given.
        store = PrefixStore("watch", info.store.clone())  # type: ignore[attr-defined]
        self._num_waiting = 0
        place = Place(info.rank, info.world_size, self._name, self._first)
        self._watch = NodeWatch(store, place, self._silence_s).__enter__()
        threading.Thread(target=self._count_waiting, args=(self._watch,), daemon=True, name="count new nodes").start()
        return info

    def num_nodes_waiting(self) -> int:
        """How many nodes want to join, as of a moment ago."""
        return self._num_waiting

    def shutdown(self) -> bool:
        """Leave the rendezvous and close it, if the first node can be reached."""
        if self._watch is not None:
            self._watch.__exit__()
            if self._watch.is_cut_off:
                return False
        return self._inner.shutdown()

    def get_backend(self) -> str:
        """The name of torchrun's back end."""
        return self._inner.get_backend()

    def get_run_id(self) -> str:
        """What tells jobs apart."""
        return self._inner.get_run_id()

    def is_closed(self) -> bool:
        """Whether the job is over."""
        return self._inner.is_closed()

    def set_closed(self) -> None:
        """Say that the job is over."""
        self._inner.set_closed()

    def _end_watch(self) -> None:
        """End the watch over the last round, and say how it ended."""
        if self._watch is None:
            return
        self._watch.__exit__()
        if self._watch.is_cut_off:
            _out_of_reach.append(self._inner)
            raise CommError(str(self._watch.reason))
        if self._watch.reason is not None:
            logger.warning(f"{self._watch.reason}; the ranks start anew without it")

    def _count_waiting(self, watch: NodeWatch) -> None:
        """Count nodes that want to join, until another round begins or a call does not return."""
        with contextlib.suppress(RendezvousError):  # the watch finds out by itself that the first node is gone
            while not watch.has_ended(_POLL_S):
                num_waiting = self._inner.num_nodes_waiting()
                if watch is self._watch:
                    self._num_waiting = num_waiting
