"""The step of an optimizer whose masters and states wait in a file.

They stream through a few buffers: while one batch of groups is stepped, the next can be read and the one before
written.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import torch
from torch import nn
from torch.optim import Optimizer

from fullspeed.base.errors import StorageError, UsageError
from fullspeed.comm import Group
from fullspeed.comm.rendezvous import together
from fullspeed.offload.file_tensor import FileTensor
from fullspeed.optim.shards import ShardAware
from fullspeed.sharding.group import FlatGroup
from fullspeed.sharding.pieces import OwnedPiece, sub_groups
from fullspeed.sharding.runtime import ShardingRuntime
from fullspeed.sharding.state_files import name_of
from fullspeed.sharding.stepping import Stepper, masters_awake, step_batch, step_in_memory

_MAX_NUMEL = 1 << 22  # of a rank's part of a batch: enough for a disk's full speed, little enough to overlap


class FileStepper(Stepper):
    """Steps groups whose masters and states wait in a file batch by batch, then those that stay in memory."""

    def __init__(
        self,
        inner: Optimizer,
        runtime: ShardingRuntime,
        owned: Mapping[nn.Parameter, OwnedPiece],
        sub_group_numel: int,
        dp_group: Group,
    ) -> None:
        """`owned` is read at each step: parameters may be added to it. `runtime.state_files` is there.

        Raises:
            UsageError: the optimizer works on whole parameters.
        """
        assert runtime.state_files is not None
        if isinstance(inner, ShardAware):
            raise UsageError(
                f"{type(inner).__name__} works on whole parameters, whose states cannot wait in files; set "
                f"zero_optimization.offload_optimizer.device to none, or choose another optimizer"
            )
        self._inner, self._runtime, self._owned = inner, runtime, owned
        self._sub_group_numel, self._dp_group = sub_group_numel, dp_group
        self._files = runtime.state_files
        self._is_torn = False  # whether a step has failed on some rank
        for piece in owned.values():
            self.keep_state(piece)

    def step(self, touched: Mapping[nn.Parameter, bool], factor: float) -> None:
        """See `Stepper`.

        Raises:
            StorageError: on every rank, when a transfer failed on one. A part of the update is done then, so this
                engine steps no more; what was saved is not harmed.
        """
        if self._is_torn:
            raise StorageError("an earlier step ended in the middle; build a new engine and load the last checkpoint")
        self._runtime.gatherer.free_idle()
        waiting = [group for group in self._runtime.trainable if group.index in self._files.waiting]
        others = [group for group in self._runtime.trainable if group.index not in self._files.waiting]
        limit = min(self._sub_group_numel, _MAX_NUMEL * self._runtime.links.world_size)
        batches = self._batches(waiting, limit)

        def step_waiting() -> None:
            names = [self._files.names({owned.group: None for owned in batch}) for batch in batches]
            self._files.stream(names, lambda index, tensors: self._step_batch(batches[index], tensors, touched, factor))

        self._is_torn = True
        together(step_waiting, StorageError, self._dp_group)
        self._is_torn = False
        step_in_memory(self._inner, self._batches(others, self._sub_group_numel), touched, factor)
        self._runtime.publish(refreshed=[group for group in waiting if group.has_separate_master])

    def _batches(self, groups: Sequence[FlatGroup], max_numel: int) -> list[list[OwnedPiece]]:
        members = set(groups)
        owned = [piece for piece in self._owned.values() if piece.group in members]
        return sub_groups(owned, groups, max_numel)

    def _step_batch(
        self,
        batch: list[OwnedPiece],
        tensors: Mapping[str, torch.Tensor],
        touched: Mapping[nn.Parameter, bool],
        factor: float,
    ) -> None:
        groups = list({owned.group: None for owned in batch})
        with masters_awake(batch, touched):
            asleep = self._wake(groups, batch, tensors)
            try:
                step_batch(self._inner, batch, touched, factor)
                for group in asleep:
                    group.refresh()
            finally:
                # Whatever happened: nobody may be left with a view of a buffer.
                self._take_back(batch, tensors)
                for group, master in asleep.items():
                    group.master = master
                for owned in batch:
                    owned.follow()

    def _wake(
        self, groups: Sequence[FlatGroup], batch: Sequence[OwnedPiece], tensors: Mapping[str, torch.Tensor]
    ) -> dict[FlatGroup, torch.Tensor | None]:
        """Let masters and states be what was read. Returns the masters they were, by group."""
        asleep: dict[FlatGroup, torch.Tensor | None] = {}
        for group in groups:
            if (name := name_of(group, "master")) in tensors:
                asleep[group], group.master = group.master, tensors[name]
        for owned in batch:
            owned.follow()
            state = self._inner.state.get(owned.tensor, {})
            for kind, value in state.items():
                if isinstance(value, FileTensor):
                    state[kind] = owned.part_of(tensors[value.key])
        return asleep

    def _take_back(self, batch: Iterable[OwnedPiece], tensors: Mapping[str, torch.Tensor]) -> None:
        """The optimizer's states go with what is written; those it has made now are written here."""
        made: dict[tuple[FlatGroup, str], list[tuple[OwnedPiece, torch.Tensor]]] = {}
        for owned in batch:
            for kind, value in self._per_element(owned):
                read = tensors.get(name_of(owned.group, kind))
                if read is None:
                    made.setdefault((owned.group, kind), []).append((owned, value))
                    continue
                place = owned.part_of(read)
                if value.data_ptr() != place.data_ptr():
                    place.copy_(value)  # the optimizer made a new tensor
                self._inner.state[owned.tensor][kind] = self._part(owned, kind, value.dtype)
        for (group, kind), pieces in made.items():
            self._save(group, kind, pieces)

    def keep_state(self, owned: OwnedPiece) -> None:
        """See `Stepper`."""
        if owned.group.index in self._files.waiting:
            for kind, value in self._per_element(owned):
                part = self._part(owned, kind, value.dtype)
                part.save(value)
                self._inner.state[owned.tensor][kind] = part

    def _save(self, group: FlatGroup, kind: str, pieces: Sequence[tuple[OwnedPiece, torch.Tensor]]) -> None:
        """Write states that the optimizer has made, those of a group at once: single pieces begin between blocks."""
        _, first = pieces[0]
        whole = self._files.tensor(group, kind, first.dtype)
        flat = whole.load()  # of pieces that had theirs before
        for owned, value in pieces:
            owned.part_of(flat).copy_(value)
        whole.save(flat)
        for owned, value in pieces:
            self._inner.state[owned.tensor][kind] = self._part(owned, kind, value.dtype)

    def _per_element(self, owned: OwnedPiece) -> list[tuple[str, torch.Tensor]]:
        """The states of a piece that have its shape and are in memory."""
        state: Mapping[str, Any] = self._inner.state.get(owned.tensor, {})
        return [
            (kind, value)
            for kind, value in state.items()
            if isinstance(value, torch.Tensor)
            and not isinstance(value, FileTensor)
            and value.shape == owned.tensor.shape
        ]

    def _part(self, owned: OwnedPiece, kind: str, dtype: torch.dtype) -> FileTensor:
        whole = self._files.tensor(owned.group, kind, dtype)
        return FileTensor(whole.store, whole.key, owned.piece.shard_offset, owned.tensor.shape)
