"""Masters and optimizer states that go to a file between steps and come back (`engine.offload_states`)."""

from __future__ import annotations

import enum

import torch

from fullspeed.offload.disk import Disk
from fullspeed.offload.file_tensor import FileTensor
from fullspeed.sharding.optimizer import ShardedOptimizer


class OffloadState(str, enum.Enum):
    """What `engine.offload_states` can be told to offload."""

    optim_states = "optim_states"
    hp_params = "hp_params"  # masters
    lp_params = "lp_params"  # resident values, what forward reads
    lp_grads = "lp_grads"
    contiguous_grad_buffer = "contiguous_grad_buffer"


class OffloadedStates:
    """A file that takes an optimizer's states and masters, which stay readable and writable there."""

    def __init__(self, optimizer: ShardedOptimizer, disk: Disk) -> None:
        """`disk` is closed with this."""
        self._optimizer, self._disk = optimizer, disk
        self._store = disk.store("offloaded")

    def nbytes(self) -> int:
        """Bytes in the file."""
        return self._store.nbytes

    @torch.no_grad()
    def take_states(self) -> int:
        """Have states per element wait, those that do not yet. Returns their bytes."""
        moved = 0
        for state in self._optimizer.state.values():
            for key, value in state.items():
                if isinstance(value, torch.Tensor) and not isinstance(value, FileTensor) and value.dim():
                    state[key] = self._put(value)
                    moved += value.nbytes
        return moved

    @torch.no_grad()
    def take_masters(self) -> int:
        """Have masters wait that are tensors of their own, those that do not yet. Returns their bytes."""
        moved = 0
        for group in self._optimizer.runtime.trainable:
            master = group.master
            if master is not None and group.has_separate_master and not group.master_in_file:
                group.master = self._put(master)
                moved += master.nbytes
        self._follow()
        return moved

    @torch.no_grad()
    def give_back(self) -> None:
        """Have everything in memory again."""
        for state in self._optimizer.state.values():
            state.update({key: value.load() for key, value in state.items() if self._has(value)})
        for group in self._optimizer.runtime.trainable:
            if isinstance(group.master, FileTensor) and self._has(group.master):
                group.master = group.master.load()
        self._follow()

    def close(self) -> None:
        """Remove the file. May be repeated."""
        self._disk.close()

    def _put(self, values: torch.Tensor) -> FileTensor:
        name = str(len(self._store.names()))
        self._store.reserve([(name, values.shape, values.dtype)])
        tensor = FileTensor(self._store, name, 0, values.shape)
        tensor.save(values)
        return tensor

    def _has(self, value: object) -> bool:
        return isinstance(value, FileTensor) and value.store is self._store

    def _follow(self) -> None:
        """The optimizer's tensors are views of masters, which moved."""
        for owned in self._optimizer.owned.values():
            if owned.group.has_separate_master:
                owned.follow()
