"""What went wrong first, from how ranks ended and what they recorded."""

from __future__ import annotations

import signal
from collections.abc import Mapping, Sequence
from typing import NamedTuple

from fullspeed.launcher.rank import FailureRecord

# A rank that had time to save leaves with the code a shell gives to a process that a signal killed.
_AFTER_SIGNALS = {128 + number: number.name for number in (signal.SIGINT, signal.SIGTERM)}


class RankEnd(NamedTuple):
    """A rank that did not end with 0."""

    rank: int
    exit_code: int  # negative: the number of the signal that killed it

    def describe(self) -> str:
        """How it ended, for people."""
        if self.exit_code in _AFTER_SIGNALS:
            return f"exit code {self.exit_code}, after {_AFTER_SIGNALS[self.exit_code]}"
        if self.exit_code >= 0:
            return f"exit code {self.exit_code}"
        name = signal.Signals(-self.exit_code).name
        return f"killed by {name}" + (", often because memory ran out" if name == "SIGKILL" else "")


class Whereabouts(NamedTuple):
    """Where ranks were, as far as that is known; by rank."""

    hosts: Mapping[int, str]
    steps: Mapping[int, int]  # updates behind them


NOWHERE = Whereabouts({}, {})


class Cause(NamedTuple):
    """The first failure of a job."""

    exit_code: int  # what the launcher returns: the rank's own, or 128 + signal
    text: str


def find_first_cause(ends: Sequence[RankEnd], records: Sequence[FailureRecord], where: Whereabouts = NOWHERE) -> Cause:
    """The failure the others followed from.

    A rank that died without a record (killed, or left with an exit code) is taken for the cause, its peers'
    records for consequences; only an abort is not: transports abort a process whose peer has gone.
    Among records the earliest is the cause: it was written before its process ended and peers could notice.

    Args:
        ends: how ranks ended; at least one, or one record.
        records: of any rank, also of one that the agent ended before it was seen to fail.
        where: for the text; of several hosts' records their clocks decide which is earliest.
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
    before = "".join(f"{_name(end, where)} failed later ({end.describe()})\n" for end in others)
    steps = where.steps.get(first.rank)
    step = "" if steps is None else f"; after step {steps}"
    text = f"{before}{_name(first, where)} failed first ({first.describe()}{step}){told}"
    return Cause(first.exit_code if first.exit_code >= 0 else 128 - first.exit_code, text)


def _name(end: RankEnd, where: Whereabouts) -> str:
    host = where.hosts.get(end.rank)
    return f"rank {end.rank} on {host}" if host else f"rank {end.rank}"
