"""The one seam through which every collective is seen: counters, loggers and tests listen here."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import NamedTuple


class CommEvent(NamedTuple):
    """One logical collective, as the caller asked for it, however the transport carried it out."""

    op: str  # "all_gather", "reduce_scatter", "all_reduce", "broadcast", "barrier", "agree", ...
    numel: int  # elements of the whole (unsharded) message
    nbytes: int  # bytes of the whole message in its wire dtype
    dtype: str
    world_size: int


Observer = Callable[[CommEvent], None]
_observers: list[Observer] = []


def emit(op: str, numel: int, itemsize: int, dtype: str, world_size: int) -> None:
    """Tell every observer of one collective. Costs one truth test when nobody listens."""
    if _observers:
        event = CommEvent(op, numel, numel * itemsize, dtype, world_size)
        for observer in _observers:
            observer(event)


@contextmanager
def observing(observer: Observer) -> Iterator[None]:
    """Have `observer` called with every collective this process starts inside the block."""
    _observers.append(observer)
    try:
        yield
    finally:
        _observers.remove(observer)


class CommRecorder:
    """An observer that keeps what it saw.

    "agree" events are the few bytes by which ranks settle what to do next; `counts` and `nbytes` leave them out
    unless asked.
    """

    def __init__(self) -> None:
        self.events: list[CommEvent] = []

    def __call__(self, event: CommEvent) -> None:
        """Keep the event."""
        self.events.append(event)

    def counts(self, *, with_agreements: bool = False) -> dict[str, int]:
        """How many collectives of each kind."""
        return dict(Counter(e.op for e in self.events if with_agreements or e.op != "agree"))

    def nbytes(self, *, with_agreements: bool = False) -> dict[str, int]:
        """Bytes of whole messages, summed by kind."""
        total: Counter[str] = Counter()
        for event in self.events:
            if with_agreements or event.op != "agree":
                total[event.op] += event.nbytes
        return dict(total)
