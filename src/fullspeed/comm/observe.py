"""The one seam through which every collective is seen: counters, loggers and tests listen here."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from typing import NamedTuple


class CommEvent(NamedTuple):
    """One logical collective, as the caller asked for it, however the transport carried it out."""

    op: str  # "all_gather", "reduce_scatter", "all_reduce", "broadcast", "barrier", "agree", ...
    numel: int  # elements of the whole (unsharded) message
    nbytes: int  # bytes of the whole message in its wire dtype
    dtype: str
    world_size: int
    ranks: tuple[int, ...] = ()  # global ranks that take part, where the caller says


Finish = Callable[[], None]
Observer = Callable[[CommEvent], Finish | None]  # may return what to call when the collective is complete
_observers: list[Observer] = []


def emit(op: str, numel: int, itemsize: int, dtype: str, world_size: int, ranks: tuple[int, ...] = ()) -> Finish | None:
    """Tell every observer that a collective starts. Costs one truth test when nobody listens.

    Returns what to call when it is complete, or None when nobody wants to know.
    """
    if not _observers:
        return None
    event = CommEvent(op, numel, numel * itemsize, dtype, world_size, ranks)
    finishes = [finish for observer in _observers if (finish := observer(event)) is not None]
    return partial(_call_all, finishes) if finishes else None


def finished(finish: Finish | None) -> None:
    """Tell whoever wanted to know, given what `emit` returned."""
    if finish is not None:
        finish()


def _call_all(finishes: list[Finish]) -> None:
    for finish in finishes:
        finish()


def add_observer(observer: Observer) -> None:
    """Have `observer` called with every collective this process starts from now on."""
    _observers.append(observer)


def remove_observer(observer: Observer) -> None:
    """Undo `add_observer`; no-op for one that is not there."""
    if observer in _observers:
        _observers.remove(observer)


@contextmanager
def observing(observer: Observer) -> Iterator[None]:
    """Have `observer` called with every collective this process starts inside the block."""
    add_observer(observer)
    try:
        yield
    finally:
        remove_observer(observer)


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
