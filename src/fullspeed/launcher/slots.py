"""Which slots (devices, or cores of a CPU-only host) ranks run on: `--num_gpus`, `--include`, `--exclude`."""

from __future__ import annotations

from collections.abc import Collection

from fullspeed.base.errors import UsageError


def choose_slots(
    num_slots: int, num_wanted: int | None, include: str, exclude: str, hosts: Collection[str]
) -> list[int]:
    """Slot indices of this host to use, rising.

    Args:
        num_slots: slots this host has.
        num_wanted: take the first so many; None for all.
        include: `HOST[:SLOT,...]`; no slots means all.
        exclude: the same form; what is left over is used.
        hosts: names under which this host may be called.

    Raises:
        UsageError: when filters exclude each other, name what does not exist, or leave nothing.
    """
    if include and exclude:
        raise UsageError("--include and --exclude exclude each other")
    if (include or exclude) and num_wanted is not None:
        raise UsageError("--num_gpus cannot be combined with --include or --exclude")
    everything = list(range(num_slots))
    if include:
        return sorted(_read_filter("--include", include, num_slots, hosts))
    if exclude:
        left = sorted(set(everything) - _read_filter("--exclude", exclude, num_slots, hosts))
        if not left:
            raise UsageError(f"--exclude {exclude} leaves no slot of {num_slots}")
        return left
    if num_wanted is not None and num_wanted > num_slots:
        raise UsageError(f"--num_gpus is {num_wanted}, but this host has {num_slots}")
    return everything[:num_wanted]


def _read_filter(flag: str, text: str, num_slots: int, hosts: Collection[str]) -> set[int]:
    slots: set[int] = set()
    for part in text.split("@"):
        host, colon, listed = part.partition(":")
        if host not in hosts:
            raise UsageError(f"{flag} names host {host!r}; this release starts ranks on localhost only")
        words = listed.split(",") if colon else [str(slot) for slot in range(num_slots)]
        for word in words:
            if not word.strip().isdecimal() or int(word) >= num_slots:
                raise UsageError(f"{flag} names slot {word!r} of {host}; slots are indices 0 to {num_slots - 1}")
            slots.add(int(word))
    return slots
