"""What every kind of checkpoint offers to whoever loads or converts it."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple, Protocol

import torch

from fullspeed.checkpoint.manifest import Chunk, Manifest

COMMON = "common.pt"
"""Param groups, optimizer entries that are no tensors, loss scale, lr schedule, extra state of modules."""


def client_file(rank: int) -> str:
    """File of a rank's client state; ranks whose state equals rank 0's have none."""
    return f"client_{rank:05d}.pt"


class GroupNames(NamedTuple):
    """The parameters of one of the optimizer's param groups, as the engine that loads knows them."""

    all: Sequence[str]
    trainable: Sequence[str]


class SavedState(Protocol):
    """One checkpoint, open for reading. Kinds of tensors are those of `checkpoint.manifest`."""

    manifest: Manifest

    def close(self) -> None:
        """Close the files."""

    def verify(self, world_size: int) -> None:
        """Check files, of their contents this rank's share. Raises CheckpointError naming a faulty one."""

    def resolve(self, fqn: str) -> str:
        """The name a parameter was saved under."""

    def has(self, kind: str, fqn: str) -> bool:
        """Whether anything of this kind was saved."""

    def optimizer_kinds(self, fqn: str) -> list[str]:
        """Kinds of optimizer state saved for a parameter."""

    def describe(self, kind: str, fqn: str) -> Chunk:
        """Shape of a saved tensor, and what it was."""

    def whole(self, kind: str, fqn: str) -> torch.Tensor:
        """A whole tensor, on the CPU, in its logical shape."""

    def elements(self, kind: str, fqn: str, start: int, stop: int) -> torch.Tensor:
        """Elements [start, stop) of a flattened tensor, on the CPU. Raises CheckpointError where some are missing."""

    def objects(self, name: str) -> dict[str, Any]:
        """State that is no tensor: `COMMON`, or a rank's `client_file`."""
