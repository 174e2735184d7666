"""A checkpoint of other files than ours, seen as one of ours: each tensor is known by where its elements lie."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import torch

from fullspeed.base.errors import CheckpointError
from fullspeed.checkpoint.deepspeed.layout import Span
from fullspeed.checkpoint.manifest import OPTIMIZER, Chunk, Manifest


class Stored(NamedTuple):
    """One tensor, and where its elements lie.

    `fetch(rank)` gives the flat or shaped tensor of one rank's file that the spans count in.
    """

    shape: tuple[int, ...]
    spans: Sequence[Span]
    fetch: Callable[[int], torch.Tensor]
    per_element: bool = True  # one value per element of the parameter; False for a step count, say


def stored_whole(fetch: Callable[[], torch.Tensor], shape: Sequence[int], *, per_element: bool = True) -> Stored:
    """A tensor that lies in one piece."""
    numel = math.prod(shape)
    spans = [Span(0, numel, 0, 0)] if numel else []
    return Stored(tuple(shape), spans, lambda _: fetch(), per_element)


class MappedState:
    """See `checkpoint.saved.SavedState`.

    Args:
        manifest: names, shapes and counters; no chunks, and of files the names only.
        tensors: by kind and name.
        objects: what a checkpoint of ours would have in its files that are no tensors.
        check: called by `verify` with the world size.
    """

    def __init__(
        self,
        manifest: Manifest,
        tensors: Mapping[tuple[str, str], Stored],
        objects: Mapping[str, dict[str, Any]],
        check: Callable[[int], None],
    ) -> None:
        self.manifest = manifest
        self._tensors = dict(tensors)
        self._objects = objects
        self._check = check
        self._optimizer_kinds: dict[str, list[str]] = {}
        for kind, fqn in self._tensors:
            if kind.startswith(OPTIMIZER):
                self._optimizer_kinds.setdefault(fqn, []).append(kind)

    def close(self) -> None:
        """Let the files go."""
        self._tensors.clear()

    def verify(self, world_size: int) -> None:
        """Check that the files are there, and that this rank's share of them can be opened."""
        self._check(world_size)

    def resolve(self, fqn: str) -> str:
        """The name a parameter was saved under: its own, or the first name of the one it was tied to."""
        return self.manifest.aliases.get(fqn, fqn)

    def has(self, kind: str, fqn: str) -> bool:
        """Whether anything of this kind was saved."""
        return (kind, self.resolve(fqn)) in self._tensors

    def optimizer_kinds(self, fqn: str) -> list[str]:
        """Kinds of optimizer state saved for a parameter."""
        return self._optimizer_kinds.get(self.resolve(fqn), [])

    def describe(self, kind: str, fqn: str) -> Chunk:
        """Shape of a saved tensor, and whether it has one value per element of its parameter."""
        stored, fqn = self._tensors[kind, self.resolve(fqn)], self.resolve(fqn)
        numel, on_host = math.prod(stored.shape), not stored.per_element
        return Chunk(fqn, kind, stored.shape, 0, numel, "", stored.per_element, on_host, rank=0, file="")

    def whole(self, kind: str, fqn: str) -> torch.Tensor:
        """A whole tensor, on the CPU, in its logical shape."""
        shape = self._tensors[kind, self.resolve(fqn)].shape
        return self.elements(kind, fqn, 0, math.prod(shape)).view(shape)

    def elements(self, kind: str, fqn: str, start: int, stop: int) -> torch.Tensor:
        """Elements [start, stop) of a flattened tensor, on the CPU; a copy.

        Raises:
            CheckpointError: a file has fewer elements than its checkpoint says.
        """
        stored = self._tensors.get((kind, self.resolve(fqn)))
        parts = []
        for span in stored.spans if stored is not None else ():
            low, high = max(start, span.start), min(stop, span.stop)
            if low < high:
                assert stored is not None
                begin = span.offset + low - span.start
                parts.append(stored.fetch(span.rank).detach().reshape(-1)[begin : begin + high - low])
        found = torch.cat(parts) if parts else torch.empty(0)
        if found.numel() != stop - start:
            raise CheckpointError(
                f"the checkpoint holds {found.numel()} of {stop - start} elements of {kind} of {fqn}: a file of it is "
                f"from another save, or was cut"
            )
        return found

    def objects(self, name: str) -> dict[str, Any]:
        """State that is no tensor."""
        return self._objects[name]
