"""Activations that wait in host memory: offloaded as the forward saves them, fetched ahead of their use in backward.

What moves is a whole storage, once, however many saved tensors are views of it: autograd saves the input of q, k and v
projections three times.

    newest `keep_last` ── never leave, backward wants them first
    older ── copied on a side stream; `max_leaving` may still occupy the device while their copy is under way
    in backward ── the one that is needed, and the `prefetch` saved just before it, are fetched on the side stream
"""

from __future__ import annotations

import weakref
from collections import deque
from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch.multiprocessing.reductions import StorageWeakRef
from typing_extensions import Self

from fullspeed.accelerator import get_accelerator
from fullspeed.activation.hooks import Hooks, PassedOn, in_backward, is_activation, top_hooks
from fullspeed.activation.host_pool import HostPool

MIN_PART_OF_STORAGE = 0.25  # a smaller view is of something that lives on anyway: moving it would free nothing


class OffloadCounts(NamedTuple):
    """What an `ActivationOffload` did so far, over all passes, and what it holds now."""

    offloaded: int  # storages
    offloaded_bytes: int
    fetched: int  # those among them whose copy was still under way need no copy back
    prefetched: int  # of the fetched, before backward asked for them
    host_bytes: int  # in buffers that hold activations now
    peak_host_bytes: int
    device_bytes: int  # of activations that are seen by it and are on the device now
    host_buffers: int  # allocated so far; fewer than `offloaded`, as buffers are used again


class CopyQueue:
    """The stream on which activations travel, apart from the one that computes; on a CPU both are the same."""

    def __init__(self, *, use_side_stream: bool) -> None:
        self._accelerator = get_accelerator()
        self._side = self._accelerator.Stream() if use_side_stream else None

    def copy(self, target: torch.Tensor, source: torch.Tensor) -> Any:
        """Queue a copy behind what is queued for computing now; returns the event that ends it."""
        computing = self._accelerator.current_stream()
        side = computing if self._side is None else self._side
        side.wait_stream(computing)
        with self._accelerator.stream(side):
            target.copy_(source, non_blocking=True)
            done = self._accelerator.Event()
            done.record(side)
        return done

    def wait(self, done: Any) -> None:
        """Let what is queued for computing from now on see the copy, and use its source's memory again."""
        self._accelerator.current_stream().wait_event(done)


class _Bytes:
    """One storage of activations: on the device, on the host, or between."""

    def __init__(self, number: int, tensor: torch.Tensor, pool: HostPool, queue: CopyQueue) -> None:
        self.number = number
        self.version = tensor._version
        self.nbytes = tensor.untyped_storage().nbytes()
        self.origin = StorageWeakRef(tensor.untyped_storage())  # keeps the address from being given to another storage
        self._pool, self._queue = pool, queue
        self._device = tensor.device
        self._here: torch.Tensor | None = _as_bytes(tensor)
        self._there: torch.Tensor | None = None  # the buffer, from the begin of the offload to that of the fetch
        self._moving: Any = None  # the event that ends the copy under way

    @property
    def is_offloaded(self) -> bool:
        return self._there is not None

    @property
    def device_bytes(self) -> int:
        return 0 if self._here is None else self.nbytes

    def begin_offload(self) -> None:
        """Start the copy to the host; the device's memory is free after `end_offload`."""
        assert self._here is not None
        self._there = self._pool.take(self.nbytes)
        self._moving = self._queue.copy(self._there, self._here)

    def end_offload(self) -> None:
        """Free the device's memory, once the copy is done; no-op when the values were fetched back meanwhile."""
        if self.is_offloaded and self._moving is not None:
            self._land()
            self._here = None

    def begin_fetch(self) -> None:
        """Start the copy back."""
        assert self._there is not None
        if self._moving is not None:  # still leaving, so still here
            self._land()
        else:
            self._here = torch.empty(self.nbytes, dtype=torch.uint8, device=self._device)
            self._moving = self._queue.copy(self._here, self._there)
        # The next writer of this buffer queues behind us.
        self._pool.give_back(self._there)
        self._there = None

    def view(self, shape: _View) -> torch.Tensor:
        """A saved tensor over these bytes, which must be on the device or on their way there."""
        assert self._here is not None
        self._land()
        tensor = torch.empty(0, dtype=shape.dtype, device=self._device)
        return tensor.set_(self._here.untyped_storage(), shape.offset, shape.size, shape.stride)

    def _land(self) -> None:
        if self._moving is not None:
            self._queue.wait(self._moving)
            self._moving = None

    def __del__(self) -> None:
        """Give memory back only behind a copy that may still use it."""
        self._land()
        if self._there is not None:
            self._pool.give_back(self._there)


class _View(NamedTuple):
    """How a saved tensor lies in its storage."""

    dtype: torch.dtype
    offset: int
    size: torch.Size
    stride: tuple[int, ...]


class _Saved(NamedTuple):
    """What autograd holds in place of a tensor."""

    bytes: _Bytes
    view: _View


class ActivationOffload:
    """A context manager, to be entered as often as one likes: activations saved inside it wait on the host.

    Backward may run inside or outside. Parameters, their views and tensors on other devices stay where they are.
    """

    def __init__(
        self,
        *,
        min_bytes: int,
        keep_last: int,
        prefetch: int,
        max_leaving: int,
        pool: HostPool,
        queue: CopyQueue,
        is_wanted: Callable[[torch.Tensor], bool] = lambda tensor: True,
    ) -> None:
        """See `offload_activations`; `is_wanted` chooses among the activations."""
        self._min_bytes, self._keep_last = min_bytes, keep_last
        self._prefetch, self._max_leaving = prefetch, max_leaving
        self._pool, self._queue, self._is_wanted = pool, queue, is_wanted
        self._device_type = get_accelerator().device_type
        self._by_storage: weakref.WeakValueDictionary[int, _Bytes] = weakref.WeakValueDictionary()
        self._by_number: weakref.WeakValueDictionary[int, _Bytes] = weakref.WeakValueDictionary()
        self._newest: deque[weakref.ref[_Bytes]] = deque()
        self._leaving: deque[weakref.ref[_Bytes]] = deque()
        self._entered: list[tuple[Any, Hooks | None]] = []  # our hooks and those below them
        self._num_seen = self._offloaded = self._offloaded_bytes = self._fetched = self._prefetched = 0

    def __enter__(self) -> Self:
        """Listen to what is saved from now on."""
        hooks = torch.autograd.graph.saved_tensors_hooks(self._pack, self._unpack)
        self._entered.append((hooks, top_hooks()))
        hooks.__enter__()
        return self

    def __exit__(self, *exception: object) -> None:
        """Listen no more; what was offloaded comes back when backward wants it."""
        hooks, _ = self._entered.pop()
        hooks.__exit__(*exception)

    def counts(self) -> OffloadCounts:
        """What was done so far and what is held now."""
        return OffloadCounts(
            self._offloaded,
            self._offloaded_bytes,
            self._fetched,
            self._prefetched,
            self._pool.used_bytes,
            self._pool.peak_used_bytes,
            sum(held.device_bytes for held in self._by_number.values()),
            self._pool.num_allocated,
        )

    def _pack(self, tensor: torch.Tensor) -> _Saved | PassedOn:
        # What a recompute saves is used at once: offloading it would be two copies for nothing.
        if in_backward() or not self._takes(tensor):
            return PassedOn(tensor, self._entered[-1][1])
        held = self._by_storage.get(tensor.untyped_storage()._cdata)
        if held is None or held.version != tensor._version:
            held = self._see(tensor)
        view = _View(tensor.dtype, int(tensor.storage_offset()), tensor.size(), tensor.stride())
        return _Saved(held, view)

    def _takes(self, tensor: torch.Tensor) -> bool:
        if not is_activation(tensor) or tensor.device.type != self._device_type:
            return False
        whole = tensor.untyped_storage().nbytes()
        is_most = tensor.nbytes >= MIN_PART_OF_STORAGE * whole
        return whole >= self._min_bytes and is_most and self._is_wanted(tensor)

    def _see(self, tensor: torch.Tensor) -> _Bytes:
        """A storage is saved for the first time: it becomes the newest, and an older one leaves."""
        held = _Bytes(self._num_seen, tensor, self._pool, self._queue)
        self._num_seen += 1
        self._by_storage[held.origin.cdata] = held
        self._by_number[held.number] = held
        self._newest.append(weakref.ref(held))
        while len(self._newest) > self._keep_last:
            oldest = self._newest.popleft()()
            if oldest is not None:
                self._offload(oldest)
        return held

    def _offload(self, held: _Bytes) -> None:
        with torch.no_grad():
            held.begin_offload()
        self._offloaded += 1
        self._offloaded_bytes += held.nbytes
        self._leaving.append(weakref.ref(held))
        while len(self._leaving) > self._max_leaving:
            oldest = self._leaving.popleft()()
            if oldest is not None:
                oldest.end_offload()

    def _unpack(self, packed: _Saved | PassedOn) -> torch.Tensor:
        if isinstance(packed, PassedOn):
            return packed.unpack()
        held = packed.bytes
        if held.is_offloaded:
            self._fetch(held)
        for number in range(held.number - 1, held.number - 1 - self._prefetch, -1):
            earlier = self._by_number.get(number)
            if earlier is not None and earlier.is_offloaded:
                self._fetch(earlier)
                self._prefetched += 1
        return held.view(packed.view)

    def _fetch(self, held: _Bytes) -> None:
        with torch.no_grad():
            held.begin_fetch()
        self._fetched += 1


def offload_activations(
    *,
    min_bytes: int = 2**20,
    keep_last: int = 1,
    prefetch: int = 2,
    max_leaving: int = 4,
    max_free_buffers: int = 64,
    pin_memory: bool = True,
    use_side_stream: bool = True,
    is_wanted: Callable[[torch.Tensor], bool] = lambda tensor: True,
) -> ActivationOffload:
    """A context in which what the forward saves for backward waits in host memory.

    Args:
        min_bytes: storages smaller than this stay; on a CPU-only machine nothing is gained, but all works the same.
        keep_last: this many storages, those saved last, stay: backward begins with them.
        prefetch: storages fetched ahead of the one backward asks for; each takes its memory a little earlier.
        max_leaving: storages that may still be on the device while they are copied; the forward waits beyond that.
        max_free_buffers: host buffers kept for the next pass.
        pin_memory: page-lock them, without which copies do not overlap with computing.
        use_side_stream: copy on a stream of their own.
        is_wanted: chooses among the activations.

    Returns:
        the context manager; its `counts()` say what it did.
    """
    has_device = get_accelerator().device_type != "cpu"
    return ActivationOffload(
        min_bytes=min_bytes,
        keep_last=keep_last,
        prefetch=prefetch,
        max_leaving=max_leaving,
        pool=HostPool(pin=pin_memory and has_device, max_free=max_free_buffers),
        queue=CopyQueue(use_side_stream=use_side_stream),
        is_wanted=is_wanted,
    )


def _as_bytes(tensor: torch.Tensor) -> torch.Tensor:
    """All bytes of the tensor's storage: (nbytes,), uint8, sharing its memory."""
    return torch.empty(0, dtype=torch.uint8, device=tensor.device).set_(tensor.untyped_storage())
