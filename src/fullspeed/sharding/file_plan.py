"""Which groups' shards wait in files (`offload_param` to nvme), and through how large buffers they pass."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from typing import NamedTuple

from fullspeed.base.errors import ConfigError, ConfigFault
from fullspeed.config import Config
from fullspeed.config.sharding import OffloadParam
from fullspeed.offload.buffers import BufferPool
from fullspeed.offload.disk import open_disk
from fullspeed.precision.policy import PrecisionPolicy
from fullspeed.sharding.file_resident import ValueFiles
from fullspeed.sharding.links import GroupLinks
from fullspeed.sharding.plan import PlannedGroup


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
        shard_numel = group.shard_numel(world_size)
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
    disk, folders = open_disk(offload.nvme_path, config.aio, links.dp_group)
    pool = BufferPool(min(offload.buffer_count, len(plan.waiting)), plan.buffer_bytes)
    return ValueFiles(disk, pool, links, folders)
