"""Which hosts and slots ranks run on: the hostfile, `--num_nodes`, `--num_gpus`, `--include`, `--exclude`. No torch."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import NamedTuple

from fullspeed.base.errors import UsageError

_HOST_LINE = re.compile(r"(\S+)\s+slots=([1-9]\d*)")


class Wish(NamedTuple):
    """Which hosts and slots the user asked for."""

    num_hosts: int | None = None  # the first so many; None for all
    num_slots: int | None = None  # the first so many of each host; None for all
    include: str = ""  # "HOST[:SLOT,...][@HOST...]": only these; no slots means all of the host
    exclude: str = ""  # the same form: all but these


def read_hostfile(text: str, path: str) -> dict[str, int]:
    """Hosts and their numbers of slots, in order, from lines `host slots=N`; `#` begins a comment.

    Raises:
        UsageError: quoting the first line that is wrong.
    """
    hosts: dict[str, int] = {}
    for number, line in enumerate(text.splitlines(), 1):
        content = line.partition("#")[0].strip()
        if not content:
            continue
        match = _HOST_LINE.fullmatch(content)
        if match is None:
            raise UsageError(f"line {number} of hostfile {path} is {line!r}; write 'host slots=N' with N at least 1")
        if match[1] in hosts:
            raise UsageError(f"line {number} of hostfile {path} is {line!r}; host {match[1]!r} is there already")
        hosts[match[1]] = int(match[2])
    if not hosts:
        raise UsageError(f"hostfile {path} names no host; write one line 'host slots=N' for each")
    return hosts


def choose_slots(hosts: Mapping[str, int], wish: Wish) -> dict[str, tuple[int, ...]]:
    """The slots to use of each host, rising; hosts without any are left out.

    Args:
        hosts: number of slots of each host.
        wish: what to take of them.

    Raises:
        UsageError: when wishes exclude each other, name what does not exist, or leave nothing.

    >>> choose_slots({"a": 2, "b": 2}, Wish(exclude="a:0"))
    {'a': (1,), 'b': (0, 1)}
    """
    if wish.include and wish.exclude:
        raise UsageError("--include and --exclude exclude each other")
    for flag, number in (("--num_nodes", wish.num_hosts), ("--num_gpus", wish.num_slots)):
        if (wish.include or wish.exclude) and number is not None:
            raise UsageError(f"{flag} cannot be combined with --include or --exclude")
    if wish.include:
        return {host: tuple(sorted(slots)) for host, slots in _read_filter("--include", wish.include, hosts).items()}
    if wish.exclude:
        return _without(hosts, wish.exclude)
    if wish.num_hosts is not None and wish.num_hosts > len(hosts):
        raise UsageError(f"--num_nodes is {wish.num_hosts}, but there are {len(hosts)} hosts: {', '.join(hosts)}")
    return {host: _first(host, hosts[host], wish.num_slots) for host in list(hosts)[: wish.num_hosts]}


def _first(host: str, num_slots: int, num_wanted: int | None) -> tuple[int, ...]:
    if num_wanted is not None and num_wanted > num_slots:
        raise UsageError(f"--num_gpus is {num_wanted}, but host {host} has {num_slots}")
    return tuple(range(num_slots))[:num_wanted]


def _without(hosts: Mapping[str, int], exclude: str) -> dict[str, tuple[int, ...]]:
    out = _read_filter("--exclude", exclude, hosts)
    left = {host: tuple(sorted(set(range(count)) - out.get(host, set()))) for host, count in hosts.items()}
    if not any(left.values()):
        raise UsageError(f"--exclude {exclude} leaves no slot of {', '.join(hosts)}")
    return {host: slots for host, slots in left.items() if slots}


def _read_filter(flag: str, text: str, hosts: Mapping[str, int]) -> dict[str, set[int]]:
    """Slots that a filter names, by host, in the hosts' order."""
    named: dict[str, set[int]] = {}
    for part in text.split("@"):
        host, colon, listed = part.strip().partition(":")
        if host not in hosts:
            raise UsageError(f"{flag} names host {host!r}; the hosts are {', '.join(hosts)}")
        words = listed.split(",") if colon else [str(slot) for slot in range(hosts[host])]
        for word in words:
            if not word.strip().isdecimal() or int(word) >= hosts[host]:
                rule = f"slots are indices 0..{hosts[host] - 1}"
                raise UsageError(f"{flag} names slot {word!r} of {host}; {rule}")
            named.setdefault(host, set()).add(int(word))
    return {host: named[host] for host in hosts if host in named}
