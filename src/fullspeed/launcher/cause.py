"""What went wrong first, from how ranks ended and what they recorded."""

from __future__ import annotations

import signal
from collections.abc import Mapping, Sequence
from typing import NamedTuple

from fullspeed.launcher.rank import FailureRecord


class RankEnd(NamedTuple):
    """A rank that did not end with 0."""

    rank: int
    exit_code: int  # negative: the number of the signal that killed it

    def describe(self) -> str:
        """How it ended, for people."""
        if self.exit_code >= 0:
            return f"exit code {self.exit_code}"
        name = signal.Signals(-self.exit_code).name
        return f"killed by {name}" + (", often because memory ran out" if name == "SIGKILL" else "")


class Cause(NamedTuple):
    """The first failure of a job."""

    exit_code: int  # what the launcher returns: the rank's own, or 128 + signal
    text: str


def find_first_cause(
    ends: Sequence[RankEnd], records: Sequence[FailureRecord], hosts: Mapping[int, str] | None = None
) -> Cause:
    """The failure the others followed from.

    A rank that died without a record (killed, or left with an exit code) is taken for the cause, its peers'
    records for consequences; only an abort is not: transports abort a process whose peer has gone.
    Among records the earliest is the cause: it was written before its process ended and peers could notice.

    Args:
        ends: how ranks ended, at least one, as the agent saw them.
        records: of any rank, also of one that the agent ended before it was seen to fail.
        hosts: where ranks ran, for the text; of several hosts' records their clocks decide which is earliest.
    """
    recorded = {record.rank for record in records}
    silent = [end for end in ends if end.rank not in recorded]
    died = [end for end in silent if end.exit_code not in (-signal.SIGABRT, -signal.SIGTERM)]
    codes = {end.rank: end.exit_code for end in ends}
    if died or not records:
        first = min(died or silent or ends)
        told = ""
    else:
        record = min(records, key=lambda record: record.at_ns)
        # A rank the agent had to end while it was still failing would have left with Python's code 1.
        first = RankEnd(record.rank, codes.get(record.rank, 1))
        told = f":\n{record.text.rstrip()}"
    # The agent ends the other ranks with SIGTERM; those did not fail.
    others = [end for end in sorted(ends) if end.rank != first.rank and end.exit_code != -signal.SIGTERM]
    before = "".join(f"{_name(end, hosts)} failed later ({end.describe()})\n" for end in others)
    text = f"{before}{_name(first, hosts)} failed first ({first.describe()}){told}"
    return Cause(first.exit_code if first.exit_code >= 0 else 128 - first.exit_code, text)


def _name(end: RankEnd, hosts: Mapping[int, str] | None) -> str:
    host = (hosts or {}).get(end.rank)
    return f"rank {end.rank} on {host}" if host else f"rank {end.rank}"
