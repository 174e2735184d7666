"""Transports that send 8-bit or 4-bit codes in place of values (ZeRO++, arXiv:2306.10209, sections 3.1 and 3.3).

What a reduction loses can be given back to the next one of the same buffer (LoCo, arXiv:2407.04480).

What is sent is less exact, what is kept is not: shards, masters and sums stay in their dtypes, and sums are made in
fp32. Every value that arrives is within half a quantisation step of the one sent, the step being the largest value of
its block over 127 or 7; an inf or nan arrives as inf or nan. Dtypes that the kernels do not know travel unchanged.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from typing import NamedTuple

import torch
from typing_extensions import override

from fullspeed.comm.hierarchy import MessageGather, TwoPhase
from fullspeed.comm.pending import Pending, Then
from fullspeed.comm.transport import Exchange, Gather, Reduce
from fullspeed.kernels.format import BlockFormat
from fullspeed.kernels.quantize import DTYPES, dequantize, dequantize_sum, quantize


class QuantizedGather(Gather):
    """A gather of quantised shards (qwZ). All ranks receive the same values, this rank's own shard included."""

    def __init__(self, inner: Gather, world_size: int, form: BlockFormat) -> None:
        self._inner, self._world_size, self._form = inner, world_size, form
        self._messages = MessageGather(inner)

    @override
    def empty(self, numel: int, dtype: torch.dtype, device: torch.device) -> torch.Tensor:
        return self._inner.empty(numel, dtype, device)

    @override
    def all_gather(self, full: torch.Tensor, shard: torch.Tensor) -> Pending:
        if shard.dtype not in DTYPES or full.dtype not in DTYPES:
            return self._inner.all_gather(full, shard)
        is_in_place = full.untyped_storage().data_ptr() == shard.untyped_storage().data_ptr()
        assert not is_in_place, "the exact values of the shard would be lost"
        # Not from `inner.empty`: such a buffer would have to be kept until an agreement says that all have read it.
        message = torch.empty(self._form.nbytes(shard.numel()), dtype=torch.uint8, device=shard.device)
        quantize(shard.view(1, 1, -1), message.view(1, 1, -1), self._form)
        messages = message.new_empty((self._world_size, len(message)))
        slices = full.view(self._world_size, -1)
        transfer = self._messages.all_gather(messages.view(-1), message)
        return Then(transfer, lambda: dequantize(messages, slices, self._form))


class CodesGather(Gather):
    """A gather of shards that are kept as codes: the message of each rank is there already."""

    def __init__(self, inner: Gather, world_size: int, form: BlockFormat) -> None:
        self._inner, self._world_size, self._form = inner, world_size, form

    @override
    def empty(self, numel: int, dtype: torch.dtype, device: torch.device) -> torch.Tensor:
        return self._inner.empty(numel, dtype, device)

    @override
    def all_gather(self, full: torch.Tensor, shard: torch.Tensor) -> Pending:
        """As `Gather`; `shard` is this rank's message, (form.nbytes(n),) uint8."""
        messages = shard.new_empty((self._world_size, len(shard)))
        slices = full.view(self._world_size, -1)
        transfer = self._inner.all_gather(messages.view(-1), shard)
        return Then(transfer, lambda: dequantize(messages, slices, self._form))


class Hop(NamedTuple):
    """One of the exchanges that a reduction consists of."""

    exchange: Exchange
    world_size: int
    form: BlockFormat


class Feedback(NamedTuple):
    """How much of what quantisation lost is added to the next gradients (LoCo, arXiv:2407.04480, section 3).

    The error is a moving average of the losses, e <- beta * e + (1 - beta) * (h - Q(h)) with h = gradient + e: over
    many reductions, what arrives is right on average, and the noise of a single loss is not passed on.
    """

    beta: float
    num_reductions: int  # after so many the error is forgotten: gradients of long ago say nothing of today's


class QuantizedReduce(Reduce):
    """A reduce-scatter in one or two hops of quantised slices (qgZ).

    Ranks are numbered node by node, and the hops go inside the nodes first, then between them. In a hop every rank
    sends each of its peers the slices that this peer will sum or pass on, and sums what it receives. So a value is
    quantised once per hop, not once per rank of a ring, and only sums leave a node.
    """

    def __init__(self, inner: Reduce, hops: Sequence[Hop], feedback: Feedback | None = None) -> None:
        """`inner` carries what is not quantised: all-reduces, and other dtypes."""
        assert 1 <= len(hops) <= 2
        self._inner, self._hops, self._feedback = inner, hops, feedback
        self._queue: deque[TwoPhase] = deque()
        self._errors: list[_Errors] | None = None  # of each hop; None until there is one buffer they belong to

    @override
    def of_one_buffer(self) -> Reduce:
        if self._feedback is None:
            return self
        same = QuantizedReduce(self._inner, self._hops, self._feedback)
        same._queue = self._queue
        same._errors = [_Errors(self._feedback) for _ in self._hops]
        return same

    @override
    def nbytes(self) -> int:
        return sum(errors.nbytes() for errors in self._errors or ())

    @override
    def reduce_scatter(self, full: torch.Tensor, out: torch.Tensor) -> Pending:
        if full.dtype not in DTYPES or out.dtype not in DTYPES:
            return self._inner.reduce_scatter(full, out)
        return self._hop(0, full, out)

    @override
    def all_reduce(self, full: torch.Tensor) -> Pending:
        return self._inner.all_reduce(full)

    def _hop(self, number: int, values: torch.Tensor, out: torch.Tensor) -> Pending:
        """Start a hop. `values` are slices of `out`'s size, of the ranks this hop and the later ones lead to."""
        exchange, world_size, form = self._hops[number]
        slices = values.view(-1, world_size, out.numel()).transpose(0, 1)  # (peer, slices it is sent, n)
        shape = (*slices.shape[:2], form.nbytes(out.numel()))
        messages = exchange.empty(shape[0] * shape[1] * shape[2], torch.uint8, values.device).view(shape)
        if self._errors is None:
            quantize(slices, messages, form)
        else:
            self._errors[number].quantize(slices, messages, form)
        received = torch.empty(shape, dtype=torch.uint8, device=values.device)
        pending = exchange.all_to_all(messages.view(-1), received.view(-1))
        if number + 1 == len(self._hops):
            return Then(pending, lambda: dequantize_sum(received, out.view(1, -1), form))

        def next_hop() -> Pending:
            sums = torch.empty((shape[1], out.numel()), dtype=torch.float32, device=values.device)
            dequantize_sum(received, sums, form)
            return self._hop(number + 1, sums.view(-1), out)

        return TwoPhase(self._queue, pending, next_hop)


class _Errors:
    """What one hop lost of one buffer, to be added to the buffer's next values."""

    def __init__(self, feedback: Feedback) -> None:
        self._feedback = feedback
        self._average: torch.Tensor | None = None  # like the values: (P, Q, n)
        self._num_reductions = 0

    def quantize(self, values: torch.Tensor, messages: torch.Tensor, form: BlockFormat) -> None:
        """As `kernels.quantize`, of values corrected by what was lost before."""
        if self._num_reductions == self._feedback.num_reductions:
            self._average, self._num_reductions = None, 0
        self._num_reductions += 1
        # Contiguous, as the values need not be.
        corrected, sent = (torch.empty(values.shape, dtype=values.dtype, device=values.device) for _ in range(2))
        corrected.copy_(values)
        if self._average is not None:
            corrected += self._average
        quantize(corrected, messages, form)
        dequantize(messages.flatten(0, 1), sent.flatten(0, 1), form)
        # A gradient that overflowed is no loss to be made good: its step is skipped.
        lost = torch.sub(corrected, sent, out=sent).nan_to_num_(0.0, 0.0, 0.0)
        if self._average is None:
            self._average = torch.zeros_like(lost)
        self._average.lerp_(lost, 1 - self._feedback.beta)

    def nbytes(self) -> int:
        return 0 if self._average is None else self._average.nbytes
