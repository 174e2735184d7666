"""Transports made of others, mostly of one inside rows of ranks and one across them (see `comm.mesh`).

Rows are nodes, or the shard groups of MiCS (arXiv:2205.00119): what is fast inside a row carries most of the bytes.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence

import torch
from typing_extensions import override

from fullspeed.base.layout import round_up
from fullspeed.comm.pending import Pending, Then
from fullspeed.comm.transport import Gather, Reduce


class TwoPhase(Pending):
    """A transfer whose second phase, on another transport, starts when the first is complete.

    Second phases start in the order of the first ones, whichever is complete first: `queue` holds the transfers whose
    second phase has not started. Ranks that get there in different orders would pair different transfers otherwise.
    """

    def __init__(self, queue: deque[TwoPhase], first: Pending, start_second: Callable[[], Pending]) -> None:
        self._queue = queue
        self._first: Pending | None = first
        self._is_first_complete = False
        self._start_second: Callable[[], Pending] | None = start_second
        self._second: Pending | None = None
        queue.append(self)

    @override
    def advance(self) -> bool:
        if self._second is not None:
            return self._second.advance() and self._is_first_over()
        assert self._first is not None
        self._is_first_complete = self._first.advance()
        self._start_in_turn()
        return False

    @override
    def poll(self) -> bool:
        if self._second is None:
            assert self._first is not None
            self._is_first_complete = self._is_first_complete or self._first.poll()
            self._start_in_turn()
        return self._second is not None and self._is_first_over() and self._second.poll()

    @override
    def wait(self) -> None:
        while self._second is None:
            head = self._queue[0]
            head._finish_first()
            head._is_first_complete = True
            self._start_in_turn()
        self._finish_first()
        self._second.wait()

    def _start_in_turn(self) -> None:
        while self._queue and self._queue[0]._is_first_complete:
            head = self._queue.popleft()
            assert head._start_second is not None
            head._second, head._start_second = head._start_second(), None

    def _is_first_over(self) -> bool:
        """Whether peers have read what the first phase sent; lets go of it then, with the buffers it holds."""
        if self._first is not None and self._first.poll():
            self._first = None
        return self._first is None

    def _finish_first(self) -> None:
        if self._first is not None:
            self._first.wait()
            self._first = None


class _All(Pending):
    """Several transfers as one."""

    def __init__(self, parts: Sequence[Pending]) -> None:
        self._parts = parts

    @override
    def advance(self) -> bool:
        are_complete = [part.advance() for part in self._parts]
        return all(are_complete)

    @override
    def poll(self) -> bool:
        return all(part.poll() for part in self._parts)

    @override
    def wait(self) -> None:
        for part in self._parts:
            part.wait()


class ReplicatedReduce(Reduce):
    """Sums over all ranks what only the ranks of a row share: over the row first, then across the rows.

    A reduce-scatter in the row leaves each rank a part of the sum; an all-reduce of that part in its column completes
    it (arXiv:2205.00119, section 3.4). So a part travels across rows, not the whole, and always in the dtype of `full`.
    """

    def __init__(self, row: Reduce, column: Reduce, num_rows: int, queue: deque[TwoPhase] | None = None) -> None:
        """`queue`: of the reductions whose order this one's join, if not its own."""
        self._row, self._column, self._num_rows = row, column, num_rows
        self._queue: deque[TwoPhase] = deque() if queue is None else queue

    @override
    def of_one_buffer(self) -> Reduce:
        return ReplicatedReduce(self._row.of_one_buffer(), self._column, self._num_rows, self._queue)

    @override
    def nbytes(self) -> int:
        return self._row.nbytes()

    @override
    def empty(self, numel: int, dtype: torch.dtype, device: torch.device) -> torch.Tensor:
        return self._row.empty(numel, dtype, device)

    @override
    def reduce_scatter(self, full: torch.Tensor, out: torch.Tensor) -> Pending:
        padded = self._padded(out.numel(), full)
        part = padded[: out.numel()]
        first = self._row.reduce_scatter(full, part)
        both = TwoPhase(self._queue, first, lambda: self._column.all_reduce(padded))
        return Then(both, lambda: out.copy_(part))

    @override
    def all_reduce(self, full: torch.Tensor) -> Pending:
        padded = self._padded(full.numel(), full)
        whole = padded[: full.numel()]

        def across() -> Pending:
            whole.copy_(full)
            return self._column.all_reduce(padded)

        return Then(TwoPhase(self._queue, self._row.all_reduce(full), across), lambda: full.copy_(whole))

    def _padded(self, numel: int, like: torch.Tensor) -> torch.Tensor:
        """A buffer for `numel` elements that divides over the rows; what is too much is zero."""
        buffer = self._column.empty(round_up(numel, self._num_rows), like.dtype, like.device)
        buffer[numel:].zero_()
        return buffer


class MessageGather(Gather):
    """A gather of buffers made to be sent, kept here until peers have read them: `wait` does not wait for that.

    A peer may have asked for a gather ahead of its use, and read it only after this rank has gone on.
    """

    def __init__(self, inner: Gather) -> None:
        self._inner = inner
        self._unread: list[Pending] = []

    @override
    def empty(self, numel: int, dtype: torch.dtype, device: torch.device) -> torch.Tensor:
        return self._inner.empty(numel, dtype, device)

    @override
    def all_gather(self, full: torch.Tensor, shard: torch.Tensor) -> Pending:
        """As `Gather`; the transfer of `inner` has one phase, and `shard` is nothing it keeps for other uses."""
        read = [transfer for transfer in self._unread if transfer.poll()]
        self._unread = [transfer for transfer in self._unread if transfer not in read]
        for transfer in read:
            transfer.wait()
        transfer = self._inner.all_gather(full, shard)
        self._unread.append(transfer)
        return _Received(transfer)


class _Received(Pending):
    """A gather that is over when its result is complete."""

    def __init__(self, transfer: Pending) -> None:
        self._transfer = transfer
        self._is_complete = False

    @override
    def advance(self) -> bool:
        self._is_complete = self._is_complete or self._transfer.advance()
        return self._is_complete

    @override
    def poll(self) -> bool:
        self._is_complete = self._is_complete or self._transfer.poll()
        return self._is_complete

    @override
    def wait(self) -> None:
        self.advance()


class HierarchicalGather(Gather):
    """Gathers between nodes first, then inside each: a shard enters a node once, not once for each of its ranks.

    Ranks are numbered node by node. First the ranks at this one's place in all nodes exchange their shards; then the
    ranks of the node exchange what each received, node after node (arXiv:2205.00119, section 3.3).

    The first hop is waited for when the gather starts: the second must have started on every rank before any of them
    waits for it, and ranks wait in different orders.
    """

    def __init__(self, inside: Gather, between: Gather, num_nodes: int) -> None:
        self._inside, self._between, self._num_nodes = MessageGather(inside), between, num_nodes

    @override
    def empty(self, numel: int, dtype: torch.dtype, device: torch.device) -> torch.Tensor:
        return self._between.empty(numel, dtype, device)

    @override
    def all_gather(self, full: torch.Tensor, shard: torch.Tensor) -> Pending:
        received = torch.empty((self._num_nodes, shard.numel()), dtype=full.dtype, device=full.device)
        self._between.all_gather(received.view(-1), shard).wait()
        nodes = full.view(self._num_nodes, -1)  # row j: the shards of node j's ranks
        return _All([self._inside.all_gather(*node) for node in zip(nodes, received, strict=True)])
