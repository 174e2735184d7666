"""Masters and optimizer states that wait in a file between steps (`offload_optimizer` to nvme; arXiv:2104.07857).

Each tensor in the file is flat and laid out as the group's masters: "3 master", "3 exp_avg". Outside of a step, masters
and states are `FileTensor`s, which anybody can read and write; `sharding/file_stepper.py` has the step.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Mapping, Sequence

import torch

from fullspeed.base.errors import StorageError
from fullspeed.base.layout import round_up
from fullspeed.comm import Group
from fullspeed.comm.rendezvous import together
from fullspeed.config import Config
from fullspeed.config.sharding import OffloadOptimizer
from fullspeed.offload.buffers import ALIGNMENT_BYTES, BufferPool
from fullspeed.offload.disk import Disk, open_disk
from fullspeed.offload.file_tensor import FileTensor
from fullspeed.offload.pipeline import Spent, stream
from fullspeed.sharding.group import FlatGroup
from fullspeed.sharding.links import GroupLinks
from fullspeed.sharding.plan import PlannedGroup

_MIN_NUMEL = 1 << 16  # of a rank's part of a group: smaller states cost a disk more time than memory


def name_of(group: FlatGroup, kind: str) -> str:
    """The name in the file of one kind of a group's tensors, "master" or a state."""
    return f"{group.index} {kind}"


def read_together(tensor: torch.Tensor, group: Group) -> torch.Tensor:
    """A tensor in memory, as it is or read. What waits waits on all ranks: to read it is collective.

    Raises:
        StorageError: on every rank, when one could not read: none of them is left in the gather that follows.
    """
    if not isinstance(tensor, FileTensor):
        return tensor
    found: list[torch.Tensor] = []
    together(lambda: found.append(tensor.load()), StorageError, group)
    return found[0]


def write_together(write: Callable[[], None], groups: Iterable[FlatGroup], ranks: Group) -> None:
    """Run `write`, which changes masters of some groups. Collective where those wait in files.

    Raises:
        StorageError: on every rank, when one could not write.
    """
    if not any(group.master_in_file for group in groups):
        write()
        return
    failure: StorageError | None = None
    try:
        write()
    except StorageError as error:
        failure = error

    def tell() -> None:
        if failure is not None:
            raise failure

    together(tell, StorageError, ranks)


class StateFiles:
    """This rank's file of masters and states, and the buffers through which they pass.

    Attributes:
        waiting: indices of the groups whose masters and states wait.
        spent: where the time of the last step went.
    """

    def __init__(self, disk: Disk, waiting: Collection[int], offload: OffloadOptimizer) -> None:
        self._disk, self.waiting, self._offload = disk, frozenset(waiting), offload
        self.store = disk.store("optimizer")
        self._names: dict[int, list[str]] = {}  # by group
        self._pool: BufferPool | None = None
        self.spent = Spent()

    def nbytes(self) -> int:
        """Bytes in the file."""
        return self.store.nbytes

    def buffer_bytes(self) -> int:
        """Host memory of the buffers."""
        return 0 if self._pool is None else self._pool.total_bytes

    def names(self, groups: Iterable[FlatGroup]) -> list[str]:
        """What waits of some groups."""
        return [name for group in groups for name in self._names.get(group.index, [])]

    def tensor(self, group: FlatGroup, kind: str, dtype: torch.dtype) -> FileTensor:
        """All of one kind of a group's tensors, flat; "master" or a state. Space for it is set aside at first."""
        assert group.master is not None
        shape = torch.Size((group.master.numel(),))
        name = name_of(group, kind)
        if name not in self._names.setdefault(group.index, []):
            self.store.reserve([(name, shape, dtype)])
            self._names[group.index].append(name)
        return FileTensor(self.store, name, 0, shape)

    def stream(
        self, batches: Sequence[Sequence[str]], compute: Callable[[int, Mapping[str, torch.Tensor]], None]
    ) -> None:
        """Bring each batch of tensors into memory, compute, and take it back; see `offload.pipeline.stream`."""
        needed = max((self._buffer_bytes(names) for names in batches), default=0)
        if self._pool is None or self._pool.buffer_bytes < needed:
            self._pool = None  # let go of the smaller ones first
            is_piped = self._offload.pipeline_read or self._offload.pipeline_write
            count = min(self._offload.buffer_count, len(batches)) if is_piped else 1
            self._pool = BufferPool(count, needed)
        self.spent = stream(
            self.store,
            self._pool,
            batches,
            compute,
            pipeline_read=self._offload.pipeline_read,
            pipeline_write=self._offload.pipeline_write,
        )
        assert not self._pool.num_in_use

    def _buffer_bytes(self, names: Iterable[str]) -> int:
        return sum(round_up(self.store.slot(name).nbytes, ALIGNMENT_BYTES) for name in names)

    def close(self) -> None:
        """Wait for what is under way and remove the file. May be repeated."""
        self._disk.close()


def plan_states(planned: Sequence[PlannedGroup], offload: OffloadOptimizer | None, world_size: int) -> frozenset[int]:
    """Indices of the groups whose states wait, the same on every rank: trained ones of 65,536 elements a rank at least.

    `ratio` is the share of all elements that waits; the first groups stay in memory.
    """
    if offload is None or offload.device != "nvme":
        return frozenset()
    numels = {
        index: group.shard_numel(world_size)
        for index, group in enumerate(planned)
        if any(param.requires_grad for _, param in group.params)
    }
    room = (1 - offload.ratio) * sum(numels.values())
    waiting: set[int] = set()
    for index, numel in numels.items():
        if not waiting and numel <= room:
            room -= numel
        elif numel >= _MIN_NUMEL:
            waiting.add(index)
    return frozenset(waiting)


def make_state_files(waiting: frozenset[int], config: Config, links: GroupLinks) -> StateFiles | None:
    """This rank's file; None if nothing waits. Collective.

    Raises:
        StorageError: on every rank, when one cannot have its file.
    """
    offload = config.zero_optimization.offload_optimizer
    if not waiting or offload is None or offload.nvme_path is None:
        return None
    disk, _ = open_disk(offload.nvme_path, config.aio, links.dp_group)
    return StateFiles(disk, waiting, offload)
