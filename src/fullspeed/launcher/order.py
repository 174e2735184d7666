"""What every node of a job is told: one value, the same for all nodes, that fits into one word of a command line."""

from __future__ import annotations

import json
from typing import NamedTuple

from fullspeed.base import env
from fullspeed.base.errors import UsageError

ENV = "env:"


class ElasticOrder(NamedTuple):
    """How many nodes an elastic job may have."""

    min_nodes: int
    max_nodes: int
    wait_s: int  # once the least are there, how long to wait for more


class NodeOrder(NamedTuple):
    """A job as its nodes see it."""

    hosts: tuple[str, ...]
    slots: tuple[tuple[int, ...] | int, ...]  # of each host: the slots to use, or only how many ranks
    master_addr: str
    master_port: int
    run_id: str
    kind: str  # SCRIPT, MODULE or PROGRAM of `launcher.rank`
    target: str
    words: tuple[str, ...]
    passes_local_rank: bool
    each_rank_log: str | None
    save_pid: bool
    log_level: str
    cores: str | None  # "" for all; None: ranks are not bound
    elastic: ElasticOrder | None
    node_timeout_s: float
    ends_with_stdin: bool = False  # whether the end of its input means that the launching host is gone

    def to_word(self) -> str:
        """One command-line word of ASCII characters."""
        return json.dumps(self)

    @classmethod
    def from_word(cls, word: str) -> NodeOrder:
        """The order that `to_word` wrote."""
        told = dict(zip(cls._fields, json.loads(word), strict=True))
        return cls(
            **told
            | {
                "hosts": tuple(told["hosts"]),
                "slots": tuple(tuple(one) if isinstance(one, list) else one for one in told["slots"]),
                "words": tuple(told["words"]),
                "elastic": None if told["elastic"] is None else ElasticOrder(*told["elastic"]),
            }
        )

    def find_node(self, which: str) -> int:
        """Index of the node that `which` stands for.

        Args:
            which: an index, a host's name, or `env:NAME,...`: the first of these variables that is set holds either.

        Raises:
            UsageError: when it stands for none, with what was found.
        """
        found = (env.first(*which.removeprefix(ENV).split(",")) or "") if which.startswith(ENV) else which
        names = [host.rpartition("@")[2] for host in self.hosts]
        if found in names:
            return names.index(found)
        if found.isdecimal() and int(found) < len(names):
            return int(found)
        raise UsageError(
            f"{which!r} says that this is node {found!r}; the nodes are 0..{len(names) - 1}: {', '.join(self.hosts)}"
        )
