"""What the nodes of a job tell each other while their ranks run: that they are alive, and what failed.

All goes through a small store on the first node. Keys: `here/<node>` counts a node's heartbeats, `reports` the
nodes that ended badly, `report/<node>` says how, `left` those that have read all reports, `lost` names a node that fell
silent, `done` counts those whose ranks ended well, `seen` those that know it of all.
"""

from __future__ import annotations

import contextlib
import datetime
import threading
import time
from collections.abc import Sequence

from torch._C._distributed_c10d import PrefixStore, Store, TCPStore
from torch.distributed import DistError

from fullspeed.base.errors import CommError

_TRY_S = 5  # one attempt to reach the first node's store
_EXCHANGE_S = 5.0  # how long failed nodes wait for each other's reports
_POLL_S = 0.1


class NodeWatch:
    """One node's view of the others. Use as a context around the time the ranks run."""

    def __init__(self, store: Store, node: int, hosts: Sequence[str], silence_s: float) -> None:
        """Watch through `store`.

        Args:
            store: of `meet`, which all nodes have entered.
            node: index of this node.
            hosts: name of every node, for people.
            silence_s: seconds without a sign of life after which a node counts as lost.
        """
        self._store, self._node, self._hosts, self._silence_s = store, node, hosts, silence_s
        self._interval_s = min(1.0, silence_s / 5)
        self._heard_at = time.monotonic()
        self._leaving = threading.Event()
        self.reason: str | None = None  # why this node has to stop

    def __enter__(self) -> NodeWatch:
        for task in (self._beat, self._judge):
            threading.Thread(target=task, daemon=True, name=f"node watch {task.__name__}").start()
        return self

    def __exit__(self, *exc: object) -> None:
        self._leaving.set()

    def is_stopped(self) -> bool:
        """Whether another node failed or fell silent, so that this one's ranks have to end."""
        return self.reason is not None

    def finish(self) -> None:
        """This node's ranks ended well: wait until all nodes' did, or `is_stopped`."""
        self._store.add("done", 1)
        while not self.is_stopped() and self._store.add("done", 0) < len(self._hosts):
            time.sleep(_POLL_S)
        if not self.is_stopped():
            self._leaving.set()
            # The store ends with the first node's process, so that one leaves last.
            self._store.add("seen", 1)
            self._wait_for("seen", len(self._hosts) if self._node == 0 else 0)

    def tell(self, report: str) -> None:
        """Tell the others how this node ended, which ends them too. Does nothing when the first node is gone."""
        with contextlib.suppress(DistError):
            self._store.set(f"report/{self._node}", report)
            self._store.add("reports", 1)

    def hear(self) -> list[str]:
        """How all nodes ended that told; waits a few seconds for those still ending. Empty when the first is gone."""
        try:
            self._wait_for("reports", len(self._hosts))
            nodes = [node for node in range(len(self._hosts)) if self._store.check([f"report/{node}"])]
            heard = [self._store.get(f"report/{node}").decode() for node in nodes]
            # The store ends with the first node's process, so that one leaves last.
            self._store.add("left", 1)
            self._wait_for("left", len(self._hosts) if self._node == 0 else 0)
            return heard
        except DistError:
            return []

    def _wait_for(self, key: str, count: int) -> None:
        """Wait until `count` nodes have counted themselves under `key`, for as long as an exchange may take."""
        deadline = time.monotonic() + _EXCHANGE_S
        while self._store.add(key, 0) < count and time.monotonic() < deadline:
            time.sleep(_POLL_S)

    def _beat(self) -> None:
        """Show that this node is alive and see whether the others are; the first node watches all."""
        counts: list[bytes] = []
        changed_at = [time.monotonic()] * len(self._hosts)
        try:
            while not self._leaving.wait(self._interval_s) and not self.is_stopped():
                self._store.add(f"here/{self._node}", 1)
                if self._store.add("reports", 0) > 0:
                    self._stop("another node's ranks failed")
                elif self._store.check(["lost"]):
                    self._stop(self._store.get("lost").decode())
                elif self._node == 0 and self._store.add("done", 0) < len(self._hosts):
                    counts = self._find_lost(counts, changed_at)
                self._heard_at = time.monotonic()
        except DistError as error:
            self._stop(f"the first node, {self._hosts[0]}, is gone: {error}")

    def _find_lost(self, before: Sequence[bytes], changed_at: list[float]) -> list[bytes]:
        """Compare heartbeats with those seen before; a node without new ones for too long is lost."""
        counts: list[bytes] = self._store.multi_get([f"here/{node}" for node in range(len(self._hosts))])
        now = time.monotonic()
        for node, count in enumerate(counts):
            if not before or count != before[node]:
                changed_at[node] = now
            elif now - changed_at[node] > self._silence_s:
                text = f"nothing was heard of host {self._hosts[node]} for {self._silence_s:g} s"
                self._store.set("lost", text)
                self._stop(text)
        return counts

    def _judge(self) -> None:
        """Notice when the store itself does not answer: a call to an unreachable host does not return."""
        while not self._leaving.wait(self._interval_s) and not self.is_stopped():
            if time.monotonic() - self._heard_at > self._silence_s:
                self._stop(f"the first node, {self._hosts[0]}, has not answered for {self._silence_s:g} s")

    def _stop(self, reason: str) -> None:
        if not self._leaving.is_set() and self.reason is None:
            self.reason = reason


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
