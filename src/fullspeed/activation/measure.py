"""Counting what autograd keeps between a forward and its backward."""

from __future__ import annotations

from typing import Any

import torch
from torch.multiprocessing.reductions import StorageWeakRef
from typing_extensions import Self

from fullspeed.activation.hooks import Hooks, PassedOn, is_parameter, top_hooks


class SavedBytes:
    """A context manager around a forward that counts the memory saved for backward, parameters left out.

    Each storage counts once, however many saved tensors lie in it. Not seen is what other hooks on saved tensors keep
    elsewhere: the places of `checkpointing.configure` and `offload_activations` count for themselves.
    """

    def __init__(self) -> None:
        self._storages: dict[StorageWeakRef, int] = {}
        self._entered: tuple[Any, Hooks | None] | None = None

    def __enter__(self) -> Self:
        """Listen to what is saved from now on."""
        hooks = torch.autograd.graph.saved_tensors_hooks(self._pack, PassedOn.unpack)
        self._entered = hooks, top_hooks()
        hooks.__enter__()
        return self

    def __exit__(self, *exception: object) -> None:
        """Listen no more."""
        assert self._entered is not None
        self._entered[0].__exit__(*exception)
        self._entered = None

    def nbytes(self) -> int:
        """Bytes of the storages that are still alive."""
        return sum(nbytes for storage, nbytes in self._storages.items() if not storage.expired())

    def _pack(self, tensor: torch.Tensor) -> PassedOn:
        assert self._entered is not None
        if not is_parameter(tensor):
            storage = tensor.untyped_storage()
            self._storages[StorageWeakRef(storage)] = storage.nbytes()
        return PassedOn(tensor, self._entered[1])
