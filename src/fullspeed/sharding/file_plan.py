"""Which groups' shards wait in files (`offload_param` to nvme), and through how large buffers they pass."""

from __future__ import annotations

import pathlib
from collections.abc import Collection, Sequence
from typing import NamedTuple

from fullspeed.base.errors import ConfigError, ConfigFault, StorageError
from fullspeed.base.layout import FlatLayout
from fullspeed.comm.rendezvous import together
from fullspeed.config import Config
from fullspeed.config.sharding import OffloadParam
from fullspeed.offload.buffers import ALIGNMENT_BYTES, BufferPool
from fullspeed.offload.disk import Disk
from fullspeed.offload.engine import Settings
from fullspeed.precision.policy import PrecisionPolicy
from fullspeed.sharding.file_resident import ValueFiles
from fullspeed.sharding.links import GroupLinks
from fullspeed.sharding.plan import PlannedGroup

_MAX_DEPTH = 64


class FilePlan(NamedTuple):
    """The choice, the same on every rank."""

    waiting: frozenset[int]  # indices of groups
    buffer_bytes: int  # the largest shard that waits


def plan_files(
    planned: Sequence[PlannedGroup],
    persistent: Collection[int],
    offload: OffloadParam | None,
    precision: PrecisionPolicy,
    world_size: int,
) -> FilePlan:
    """Choose the groups. Persistent ones wait nowhere; `max_in_cpu` elements of a rank's shards stay in memory.

    Groups stay in their order until one is too large for what is left of that number; it and all later ones wait.

    Raises:
        ConfigError: a shard that waits is larger than a buffer may be.
    """
    waiting: dict[int, int] = {}  # group -> elements of its shard
    buffer_bytes = 0
    if offload is None or offload.device != "nvme":
        return FilePlan(frozenset(), 0)
    room = offload.max_in_cpu
    for index, group in enumerate(planned):
        if index in persistent:
            continue
        shard_numel = FlatLayout([(fqn, tuple(param.shape)) for fqn, param in group.params], world_size).shard_numel
        if not waiting and shard_numel <= room:
            room -= shard_numel
            continue
        waiting[index] = shard_numel
        storage = precision.dtypes_of(group.key.dtype, group.key.wire).storage
        buffer_bytes = max(buffer_bytes, shard_numel * storage.itemsize)
    if waiting:
        largest = max(waiting, key=waiting.__getitem__)
        _check(planned[largest], waiting[largest], offload)
    return FilePlan(frozenset(waiting), buffer_bytes)


def _check(group: PlannedGroup, shard_numel: int, offload: OffloadParam) -> None:
    if shard_numel > offload.buffer_size:
        fqn, param = max(group.params, key=lambda named: named[1].numel())
        rule = (
            f"a rank's shard of the group of {fqn}, which has {param.numel()} elements, has {shard_numel} and passes "
            f"through one buffer"
        )
        fix = f"set it to {shard_numel} at least"
        raise ConfigError([ConfigFault("zero_optimization.offload_param.buffer_size", offload.buffer_size, rule, fix)])


def make_files(plan: FilePlan, config: Config, links: GroupLinks) -> ValueFiles | None:
    """This rank's file, and the buffers; None if nothing waits. Collective.

    Raises:
        StorageError: on every rank, when one cannot have its file.
    """
    offload = config.zero_optimization.offload_param
    if not plan.waiting or offload is None or offload.nvme_path is None:
        return None
    folder, settings = pathlib.Path(offload.nvme_path), settings_of(config)
    disks: list[Disk] = []

    def make_disk() -> str:
        disks.append(Disk(folder, settings))
        return str(disks[0].folder)

    folders = together(make_disk, StorageError, links.dp_group)
    pool = BufferPool(min(offload.buffer_count, len(plan.waiting)), plan.buffer_bytes)
    return ValueFiles(disks[0], pool, links, folders)


def settings_of(config: Config) -> Settings:
    """How the `aio` section wants transfers cut."""
    aio = config.aio
    block_bytes = max(ALIGNMENT_BYTES, aio.block_size // ALIGNMENT_BYTES * ALIGNMENT_BYTES)
    return Settings(block_bytes, min(aio.queue_depth * aio.intra_op_parallelism, _MAX_DEPTH))
