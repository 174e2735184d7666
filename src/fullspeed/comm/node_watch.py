"""What the nodes of a job tell each other while their ranks run: that they are alive, and what failed.

All goes through a small store on the first node. Keys: `name/<node>` is a node's name, `here/<node>` counts its
heartbeats, `reports` the nodes that ended badly, `report/<node>` says how, `left` those that have read all reports,
`lost` names a node that fell silent, `done` counts those whose ranks ended well, `seen` those that know it of all.
"""

from __future__ import annotations

import contextlib
import datetime
import threading
import time
from collections.abc import Sequence
from typing import NamedTuple

from torch._C._distributed_c10d import PrefixStore, Store, TCPStore
from torch.distributed import DistError

from fullspeed.base.errors import CommError

_TRY_S = 5  # one attempt to reach the first node's store
_EXCHANGE_S = 5.0  # how long failed nodes wait for each other's reports
_POLL_S = 0.1


class Place(NamedTuple):
    """Where a node stands among those that watch each other."""

    node: int  # its index
    num_nodes: int
    name: str  # for people
    first: str  # name of the node that keeps the store


class NodeWatch:
    """One node's view of the others. Use as a context around the time the ranks run.

    Each node watches the one after it, so that a sign of life costs the store the same however many nodes there are.
    """

    def __init__(self, store: Store, place: Place, silence_s: float) -> None:
        """Watch through `store`.

        Args:
            store: the same keys on all nodes, and no keys of an earlier watch in it.
            place: this node's.
            silence_s: seconds without a sign of life after which a node counts as lost.
        """
        self._store, self._place, self._silence_s = store, place, silence_s
        self._interval_s = min(1.0, silence_s / 5)
        self._heard_at = time.monotonic()
        self._leaving = threading.Event()
        self.reason: str | None = None  # why this node has to stop
        self.is_cut_off = False  # whether the store is gone or out of reach: calls to it may not return

    def __enter__(self) -> NodeWatch:
        for task in (self._beat, self._judge):
            threading.Thread(target=task, daemon=True, name=f"node watch {task.__name__}").start()
        return self

    def __exit__(self, *exc: object) -> None:
        self._leaving.set()

    def is_stopped(self) -> bool:
        """Whether another node failed or fell silent, so that this one's ranks have to end."""
        return self.reason is not None

    def has_ended(self, wait_s: float) -> bool:
        """Whether this watch is over, after so many seconds at most."""
        return self._leaving.wait(wait_s) or self.is_stopped()

    def finish(self) -> None:
        """This node's ranks ended well: wait until all nodes' did, or `is_stopped`."""
        try:
            self._store.add("done", 1)
            while not self.is_stopped() and self._is_unfinished():
                time.sleep(_POLL_S)
        except DistError as error:
            self._stop_without_first(error)
        if not self.is_stopped():
            self._leaving.set()
            self._leave("seen", max(self._silence_s, _EXCHANGE_S))

    def tell(self, report: str) -> None:
        """Tell the others how this node ended, which ends them too. Does nothing when the first node is gone."""
        if self.is_cut_off:
            return
        with contextlib.suppress(DistError):
            self._store.set(f"report/{self._place.node}", report)
            self._store.add("reports", 1)

    def hear(self) -> list[str]:
        """How all nodes ended that told; waits a few seconds for those still ending. Empty when the first is gone."""
        if self.is_cut_off:
            return []
        try:
            self._wait_for_all("reports", _EXCHANGE_S)
            nodes = [node for node in range(self._place.num_nodes) if self._store.check([f"report/{node}"])]
            heard = [self._store.get(f"report/{node}").decode() for node in nodes]
        except DistError:
            return []
        self._leave("left", _EXCHANGE_S)
        return heard

    def _leave(self, key: str, limit_s: float) -> None:
        """Make no more use of the store. It ends with the first node's process, so that one leaves last.

        The others do not look back: the first may be gone before this node's count has been acknowledged.
        """
        with contextlib.suppress(DistError):
            self._store.add(key, 1)
            if self._place.node == 0:
                self._wait_for_all(key, limit_s)

    def _wait_for_all(self, key: str, limit_s: float) -> None:
        """Wait until all nodes have counted themselves under `key`, for so many seconds at most."""
        deadline = time.monotonic() + limit_s
        while self._store.add(key, 0) < self._place.num_nodes and time.monotonic() < deadline:
            time.sleep(_POLL_S)

    def _beat(self) -> None:
        """Show that this node is alive, and see whether the next one is."""
        count, changed_at = -1, time.monotonic()
        after = (self._place.node + 1) % self._place.num_nodes
        try:
            self._store.set(f"name/{self._place.node}", self._place.name)
            while not self.has_ended(self._interval_s):
                self._store.add(f"here/{self._place.node}", 1)
                before, count = count, self._store.add(f"here/{after}", 0)
                changed_at = changed_at if count == before else time.monotonic()
                if self._store.add("reports", 0) > 0:
                    self._stop("another node's ranks failed")
                elif self._store.check(["lost"]):
                    self._stop(self._store.get("lost").decode())
                elif time.monotonic() - changed_at > self._silence_s and self._is_unfinished():
                    text = f"nothing was heard of host {self._name(after)} for {self._silence_s:g} s"
                    self._store.set("lost", text)
                    self._stop(text)
                self._heard_at = time.monotonic()
        except DistError as error:
            self._stop_without_first(error)

    def _is_unfinished(self) -> bool:
        """Whether the ranks of any node still run: one that knows of none leaves."""
        return self._store.add("done", 0) < self._place.num_nodes

    def _name(self, node: int) -> str:
        key = f"name/{node}"
        return self._store.get(key).decode() if self._store.check([key]) else f"number {node}"

    def _judge(self) -> None:
        """Notice when the store itself does not answer: a call to an unreachable host does not return."""
        while not self.has_ended(self._interval_s):
            if time.monotonic() - self._heard_at > self._silence_s:
                text = f"the first node, {self._place.first}, has not answered for {self._silence_s:g} s"
                self._stop(text, is_cut_off=True)

    def _stop_without_first(self, error: DistError) -> None:
        self._stop(f"the first node, {self._place.first}, is gone: {error}", is_cut_off=True)

    def _stop(self, reason: str, is_cut_off: bool = False) -> None:
        if not self._leaving.is_set() and self.reason is None:
            self.is_cut_off = is_cut_off
            self.reason = reason  # last: whoever sees it sees the rest


def meet(address: str, port: int, run_id: str, node: int, hosts: Sequence[str], limit_s: float) -> Store:
    """The store of this job's nodes, as soon as all are there.

    Args:
        address: of the first node, which opens the store.
        port: free there.
        run_id: tells jobs apart.
        node: index of this node.
        hosts: name of every node, for people.
        limit_s: how long to wait for the others.

    Raises:
        CommError: naming the hosts that did not come in time, or why the store cannot be reached.
    """
    deadline = time.monotonic() + limit_s
    store = PrefixStore(f"nodes/{run_id}", _open(address, port, node == 0, deadline))
    store.add(f"here/{node}", 1)
    missing = list(range(len(hosts)))
    while missing := [one for one in missing if not store.check([f"here/{one}"])]:
        if time.monotonic() > deadline:
            names = ", ".join(hosts[one] for one in missing)
            raise CommError(
                f"{names} did not come to {address}:{port} within {limit_s:g} s; check that every node was started "
                "and that --master_addr is reachable from it"
            )
        time.sleep(_POLL_S)
    return store


def _open(address: str, port: int, is_first: bool, deadline: float) -> Store:
    """The store at `address`, opened by the first node and joined by the others, who may come before it."""
    while True:
        try:
            return TCPStore(
                address,
                port,
                is_master=is_first,
                timeout=datetime.timedelta(seconds=_TRY_S),
                wait_for_workers=False,
                multi_tenant=True,  # the agent of the first node listens on the same port
            )
        except (DistError, RuntimeError) as error:
            if is_first or time.monotonic() > deadline:
                what = "cannot listen on" if is_first else "cannot reach the first node at"
                raise CommError(f"{what} {address}:{port}: {error}; check --master_addr and --master_port") from error
