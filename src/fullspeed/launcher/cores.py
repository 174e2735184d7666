"""Which cores each rank of a node is bound to: `--bind_cores_to_rank` and `--bind_core_list`. No torch."""

from __future__ import annotations

import pathlib
from collections.abc import Collection

from fullspeed.base.errors import UsageError

_SIBLINGS = "/sys/devices/system/cpu/cpu{core}/topology/thread_siblings_list"


def parse_core_list(text: str) -> list[int]:
    """Cores of a list such as "0-3,8", rising. Raises UsageError quoting what is wrong.

    >>> parse_core_list("0-2,8")
    [0, 1, 2, 8]
    """
    cores: set[int] = set()
    for part in text.split(","):
        low, dash, high = part.strip().partition("-")
        high = high if dash else low
        if not (low.isdecimal() and high.isdecimal() and int(low) <= int(high)):
            raise UsageError(f"--bind_core_list is {text!r}: {part!r} is no core and no range such as 0-3")
        cores.update(range(int(low), int(high) + 1))
    return sorted(cores)


def share_cores(wanted: str, allowed: Collection[int], num_ranks: int) -> list[list[int]]:
    """The cores of each local rank: equal runs of neighbours; a rest is left unused.

    Args:
        wanted: the user's list; empty for all.
        allowed: cores this process may run on.
        num_ranks: ranks of this node.

    Raises:
        UsageError: the list names a core that is not allowed, or there are fewer cores than ranks.
    """
    cores = parse_core_list(wanted) if wanted else one_thread_each(sorted(allowed))
    if outside := sorted(set(cores) - set(allowed)):
        raise UsageError(f"--bind_core_list names core {outside[0]}; this process may run on {sorted(allowed)}")
    each = len(cores) // num_ranks
    if each == 0:
        raise UsageError(f"{num_ranks} ranks cannot be bound to {len(cores)} cores; start fewer, or do not bind them")
    return [cores[rank * each : (rank + 1) * each] for rank in range(num_ranks)]


def one_thread_each(cores: list[int]) -> list[int]:
    """Of the hardware threads in `cores` the first of each physical core: threads of one core do not add speed."""
    chosen, seen = [], set()
    for core in cores:
        if core not in seen:
            chosen.append(core)
            seen.update(_siblings(core))
    return chosen


def _siblings(core: int) -> list[int]:
    path = pathlib.Path(_SIBLINGS.format(core=core))
    return parse_core_list(path.read_text()) if path.is_file() else [core]
