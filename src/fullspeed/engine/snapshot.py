"""What one checkpoint holds: this rank's share and files, and the manifest.

Files in the data folder (see `checkpoint.folder` and `checkpoint.manifest`):

    rank_00000.safetensors   this rank's chunks
    rank_00000.pt            this rank's random generators, and how far it has come in the training data
    client_00000.pt          client state; of another rank only where it differs from rank 0's
    common.pt                param groups, optimizer entries that are no tensors, loss scale, lr schedule, extra state
                             of modules
"""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any, NamedTuple

import torch

from fullspeed.checkpoint.manifest import Chunk, Manifest
from fullspeed.checkpoint.objects import pack
from fullspeed.checkpoint.rng import rng_state
from fullspeed.checkpoint.saved import COMMON, client_file
from fullspeed.comm import get_rank
from fullspeed.data.loader import PositionedLoader
from fullspeed.engine import collect

if TYPE_CHECKING:
    from fullspeed.engine.checkpointing import Checkpointing


def tensor_file(rank: int) -> str:
    """File of a rank's chunks."""
    return f"rank_{rank:05d}.safetensors"


def rank_file(rank: int) -> str:
    """File of what only this rank needs again."""
    return f"rank_{rank:05d}.pt"


class Offer(NamedTuple):
    """What ranks tell one another before a save."""

    folder: str
    tag: str
    buffers: dict[str, bytes]  # digest of each
    client_state: bytes  # digest
    optimizer_values: dict[str, dict[str, Any]]  # by parameter: entries of the optimizer's state that are no tensors


class Snapshot:
    """One rank's view of a checkpoint in the making. The tensors are the engine's own until they are written or staged.

    Args:
        engine: whose state.
        exclude_frozen: leave out parameters that are not trained.
    """

    def __init__(self, engine: Checkpointing, *, exclude_frozen: bool) -> None:
        self._engine, self._exclude_frozen = engine, exclude_frozen
        self.rank = get_rank(engine.data_parallel_group)
        self._state = collect.named_state(engine.module, engine.runtime)
        self._collector = collect.Collector(self.rank, tensor_file(self.rank))
        self._client_state = b""
        self.objects: dict[str, bytes] = {}  # this rank's files of other things than tensors

    @property
    def tensors(self) -> dict[str, torch.Tensor]:
        """What goes into this rank's tensor file."""
        return {chunk.key: tensor for chunk, tensor in self._collector.tensors.items()}

    def offer(self, folder: str, tag: str, client_state: Mapping[str, Any]) -> Offer:
        """Collect what is this rank's whatever the others have; returns what they must know of it."""
        engine, collector = self._engine, self._collector
        collector.add_weights(engine.runtime, exclude_frozen=self._exclude_frozen)
        collector.add_unmanaged(self._state, engine.runtime, exclude_frozen=self._exclude_frozen)
        values = {} if engine.optimizer is None else collector.add_optimizer(engine.optimizer)
        self._client_state = pack({"client_state": dict(client_state)})
        digests = collect.buffer_digests(self._state)
        return Offer(folder, tag, digests, hashlib.sha256(self._client_state).digest(), values)

    def complete(self, offers: list[Offer]) -> list[Chunk]:
        """Collect the rest; returns the description of this rank's tensors."""
        engine, mine, first = self._engine, offers[self.rank], offers[0]
        differing = {fqn for fqn in mine.buffers if mine.buffers[fqn] != first.buffers.get(fqn)}
        self._collector.add_buffers(self._state, differing)
        own: dict[str, Any] = {"rng": rng_state(engine.device)}
        if isinstance(engine.training_dataloader, PositionedLoader):
            own["data"] = engine.training_dataloader.state_dict()
        self.objects = {rank_file(self.rank): pack(own)}
        if self.rank == 0 or mine.client_state != first.client_state:
            self.objects[client_file(self.rank)] = self._client_state
        if self.rank == 0:
            self.objects[COMMON] = self._common(offers)
        return list(self._collector.tensors)

    def _common(self, offers: list[Offer]) -> bytes:
        """What is the same on every rank."""
        engine = self._engine
        state: dict[str, Any] = {"extra_state": collect.extra_states(engine.module)}
        if engine.optimizer is not None:
            state["param_groups"] = collect.optimizer_groups(engine.optimizer)
            # Whoever owned a part of a parameter has its entries, and they are equal.
            state["optimizer_values"] = {fqn: row for offer in offers for fqn, row in offer.optimizer_values.items()}
            state["stepper"] = engine.optimizer.stepper.state_dict()
            state["loss_scale"] = dict(engine.optimizer.loss_scaler.state_dict())
        if hasattr(engine.lr_scheduler, "state_dict"):
            state["lr_scheduler"] = engine.lr_scheduler.state_dict()
        return pack(state)

    def manifest(self, data: str, shares: list[list[Chunk]], *, in_rotation: bool) -> Manifest:
        """The description, without the records of the files."""
        engine, state = self._engine, self._state
        return Manifest(
            world_size=len(shares),
            stage=engine._config.zero_optimization.stage,
            optimizer=None if engine.optimizer is None else type(engine.optimizer.optimizer).__name__,
            data=data,
            params=collect.param_records(state, engine.runtime, exclude_frozen=self._exclude_frozen),
            aliases=state.aliases,
            buffers={fqn: tuple(buffer.shape) for fqn, buffer in state.buffers.items()},
            counters={
                "global_steps": engine.global_steps,
                "global_samples": engine.global_samples,
                # As of the last update: what came after it is not saved.
                "micro_steps": engine.micro_steps - engine._num_micro_steps,
                "skipped_steps": engine.skipped_steps,
            },
            chunks=tuple(chunk for share in shares for chunk in share),
            in_rotation=in_rotation,
        )
