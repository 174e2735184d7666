"""`offload_states` and `reload_states`: an engine that makes room between steps, for a generation phase for example."""

from __future__ import annotations

import enum
import pathlib
from collections.abc import Callable, Iterable

import torch

from fullspeed.base.errors import StorageError, UsageError
from fullspeed.base.log import log_dist
from fullspeed.comm import Group, get_rank
from fullspeed.comm.rendezvous import together
from fullspeed.config import Config
from fullspeed.offload.disk import Disk, settings_of
from fullspeed.sharding.offloaded_states import OffloadedStates, OffloadState
from fullspeed.sharding.optimizer import ShardedOptimizer
from fullspeed.sharding.runtime import ShardingRuntime


class Offloading:
    """Mixin: what is offloaded at present, and what that forbids."""

    _config: Config
    device: torch.device
    runtime: ShardingRuntime
    data_parallel_group: Group
    _require_optimizer: Callable[[str], ShardedOptimizer]
    _offloaded: frozenset[OffloadState] = frozenset()
    _away: OffloadedStates | None = None

    def offload_states(
        self,
        include: Iterable[OffloadState | str] | None = None,
        device: str | torch.device | enum.Enum = "cpu",
        pin_memory: bool = True,
        non_blocking: bool = False,
    ) -> dict[str, int]:
        """Make room until `reload_states`: at any stage, between steps. Collective.

        Meanwhile nothing can be trained. Evaluation goes on unless `lp_params` are offloaded; accessors, checkpoints
        and exports always work.

        Args:
            include: names of `OffloadState`; by default all.
            device: "cpu", where all states of a model in host memory are already: nothing moves. Or "nvme":
                `optim_states` and `hp_params` go to a file below the `nvme_path` of the configuration; parameters and
                gradients stay in memory.
            pin_memory: for devices; nothing is copied to host memory here.
            non_blocking: the same.

        Returns:
            Bytes that have left this rank's memory, by name.

        Raises:
            UsageError: no optimizer, an unknown name or device, or no disk is configured.
            StorageError: on every rank, when one could not write; everything is in memory again.
        """
        del pin_memory, non_blocking
        optimizer = self._require_optimizer("offload_states")
        if self.device.type != "cpu":
            raise UsageError(f"offload_states: states on {self.device.type} cannot be offloaded in this version")
        chosen = _chosen(include)
        target = _device_name(device)
        folder = self._disk_folder() if target == "nvme" else None
        self.runtime.sync()
        self._offloaded |= chosen
        moved = {state.value: 0 for state in OffloadState if state in chosen}
        if folder is not None:
            moved |= self._to_disk(folder, optimizer, chosen)
        told = ", ".join(f"{name} {nbytes}" for name, nbytes in moved.items())
        log_dist(f"offload_states to {target}: bytes that left the memory of rank 0: {told}")
        return moved

    def reload_states(self, non_blocking: bool = False) -> None:
        """Have everything that `offload_states` moved where it was. Does nothing after nothing. Collective.

        Raises:
            StorageError: on every rank, when one could not read; build a new engine and load the last checkpoint.
        """
        del non_blocking
        self._require_optimizer("reload_states")
        if self._away is not None:
            together(self._away.give_back, StorageError, self.data_parallel_group)
            self._forget_offloaded()
        self._offloaded = frozenset()

    def _to_disk(
        self, folder: pathlib.Path, optimizer: ShardedOptimizer, chosen: frozenset[OffloadState]
    ) -> dict[str, int]:
        def take() -> dict[str, int]:
            if self._away is None:
                self._away = OffloadedStates(optimizer, Disk(folder, settings_of(self._config.aio)))
            verbs = {
                OffloadState.optim_states: self._away.take_states,
                OffloadState.hp_params: self._away.take_masters,
            }
            return {state.value: verb() for state, verb in verbs.items() if state in chosen}

        try:
            return together(take, StorageError, self.data_parallel_group)[get_rank(self.data_parallel_group)]
        except StorageError:
            self._offloaded = frozenset()
            if self._away is not None:
                self._away.give_back()
                self._forget_offloaded()
            raise

    def _disk_folder(self) -> pathlib.Path:
        zero = self._config.zero_optimization
        if zero.zenflow is not None or (zero.offload_optimizer is not None and zero.offload_optimizer.super_offload):
            raise UsageError(
                "offload_states to nvme does not go with zenflow and super_offload, whose threads keep states in memory"
            )
        for block in (zero.offload_optimizer, zero.offload_param):
            if block is not None and block.nvme_path is not None:
                return pathlib.Path(block.nvme_path)
        raise UsageError(
            "offload_states to nvme needs a directory: set nvme_path in zero_optimization.offload_optimizer, whose "
            "device may be cpu"
        )

    def _forget_offloaded(self) -> None:
        """Remove the file."""
        if self._away is not None:
            self._away.close()
            self._away = None

    def _refuse_while_offloaded(self, what: str, *, but_for: frozenset[OffloadState] = frozenset()) -> None:
        """Raise UsageError if anything is offloaded, `but_for` what does not matter."""
        if self._offloaded - but_for:
            names = ", ".join(sorted(state.value for state in self._offloaded))
            raise UsageError(f"{what}: {names} are offloaded; call engine.reload_states() first")


FOR_TRAINING = frozenset(OffloadState) - {OffloadState.lp_params}
"""What evaluation does without."""


def _chosen(include: Iterable[OffloadState | str] | None) -> frozenset[OffloadState]:
    given = list(OffloadState) if include is None else list(include)
    known = {state.value for state in OffloadState}
    names = [each.value if isinstance(each, OffloadState) else each for each in given]
    unknown = [str(name) for name in names if name not in known]
    if unknown:
        raise UsageError(f"offload_states has no {', '.join(unknown)} to offload; choose of {', '.join(sorted(known))}")
    return frozenset(OffloadState(name) for name in names)


def _device_name(device: str | torch.device | enum.Enum) -> str:
    name = str(device.value) if isinstance(device, enum.Enum) else str(device)
    if name not in ("cpu", "nvme"):
        raise UsageError(f"offload_states to {name!r} is not possible; choose 'cpu' or 'nvme'")
    return name
