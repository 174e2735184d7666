"""A transport that compares what ranks are about to transfer before anything travels (see `comm.mismatch`)."""

from __future__ import annotations

import itertools
import queue
import threading
from collections import defaultdict
from collections.abc import Callable
from concurrent.futures import Future

import torch
from typing_extensions import override

from fullspeed.comm.collectives import Group, global_ranks
from fullspeed.comm.mismatch import Channel, Intent
from fullspeed.comm.pending import Pending
from fullspeed.comm.transport import Transport

_Start = Callable[[], Pending]
_numbers: defaultdict[tuple[int, ...], itertools.count[int]] = defaultdict(itertools.count)


class CheckedTransport(Transport):
    """Starts each transfer of `inner` when all ranks are known to start the same.

    A thread compares and starts them, in the order they were begun: ranks may begin transfers of two transports in
    different orders, so the rank itself must not wait for its peers before it waits for a result.
    """

    def __init__(self, inner: Transport, group: Group) -> None:
        self._inner = inner
        ranks = global_ranks(group)
        # Every rank makes its transports in the same order, so the numbers agree without a message.
        self._channel = Channel(f"transport{next(_numbers[ranks])}", ranks)
        self._begun: queue.SimpleQueue[tuple[Intent, _Start, Future[Pending]]] = queue.SimpleQueue()
        threading.Thread(target=self._start_in_turn, daemon=True, name="checked transport").start()

    @override
    def empty(self, numel: int, dtype: torch.dtype, device: torch.device) -> torch.Tensor:
        return self._inner.empty(numel, dtype, device)

    @override
    def all_gather(self, full: torch.Tensor, shard: torch.Tensor) -> Pending:
        return self._begin(Intent.of("all_gather", (full, shard)), lambda: self._inner.all_gather(full, shard))

    @override
    def reduce_scatter(self, full: torch.Tensor, out: torch.Tensor) -> Pending:
        return self._begin(Intent.of("reduce_scatter", (full, out)), lambda: self._inner.reduce_scatter(full, out))

    @override
    def all_reduce(self, full: torch.Tensor) -> Pending:
        return self._begin(Intent.of("all_reduce", (full,)), lambda: self._inner.all_reduce(full))

    @override
    def all_to_all(self, send: torch.Tensor, receive: torch.Tensor) -> Pending:
        return self._begin(Intent.of("all_to_all", (send, receive)), lambda: self._inner.all_to_all(send, receive))

    def _begin(self, intent: Intent, start: _Start) -> Pending:
        started: Future[Pending] = Future()
        is_inference = torch.is_inference_mode_enabled()  # modes belong to a thread

        def start_in_mode() -> Pending:
            with torch.inference_mode(is_inference), torch.no_grad():
                return start()

        self._begun.put((intent, start_in_mode, started))
        return _Begun(started)

    def _start_in_turn(self) -> None:
        while True:
            intent, start, started = self._begun.get()
            try:
                self._channel.compare(intent)
                started.set_result(start())
            except Exception as error:  # raised where the rank waits for the transfer
                started.set_exception(error)


class _Begun(Pending):
    """A transfer that may not have started yet."""

    def __init__(self, started: Future[Pending]) -> None:
        self._started = started

    @override
    def advance(self) -> bool:
        return self._started.result().advance()

    @override
    def poll(self) -> bool:
        return self._started.done() and self._started.result().poll()

    @override
    def wait(self) -> None:
        self._started.result().wait()
