"""One group of parameters that is gathered, reduced and published together, on one flat buffer.

[Note: tensors of a group]  N = padded numel, n = N / world_size = this rank's shard

| name    | shape    | dtype   | lives                | what it is                                                    |
|---------|----------|---------|----------------------|---------------------------------------------------------------|
| full    | (N,)     | compute | while computing      | what forward and backward read; the parameters are its views  |
| store   | (N,)/(n,)| storage | always               | the resident values: whole, or this rank's shard; frozen ones |
|         |          |         |                      | may be kept as codes, see `sharding/resident.py`; shards may  |
|         |          |         |                      | wait in a file, and with them masters that are views of them  |
| master  | (N,)/(n,)| master  | always               | what the optimizer updates; a view of `store` if dtypes agree |
| local   | (N,)     | accum   | whole grads: always; | this rank's own gradients since the last reduction            |
|         |          |         | sharded: per pass    |                                                               |
| reduced | (N,)/(n,)| accum   | grads' share         | gradients averaged over ranks; a view of `local` when it can  |

Where compute dtype = storage dtype and parameters are whole, `full` and `store` are one tensor and no verb copies
anything. Otherwise `full` is freed by resizing its storage to zero and refilled in place, so that autograd's saved
views of it stay valid (arXiv:1910.02054, section 5, for what is sharded when).
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from weakref import WeakValueDictionary

import torch
from torch import nn

from fullspeed.base.errors import UsageError
from fullspeed.base.layout import FlatLayout, Piece
from fullspeed.comm import Pending
from fullspeed.kernels.quantize import DTYPES
from fullspeed.offload.file_tensor import FileTensor
from fullspeed.precision.policy import CopyDtypes
from fullspeed.sharding import placeholder
from fullspeed.sharding.file_resident import FileResident, ValueFiles
from fullspeed.sharding.gradients import GradScaling, GroupGradients
from fullspeed.sharding.links import GroupLinks
from fullspeed.sharding.placement import Placement
from fullspeed.sharding.resident import QuantizedResident, Resident

# A parameter's first values, whole; None leaves it zero.
ValuesOf = Callable[[nn.Parameter], "torch.Tensor | None"]


_group_of_storage: WeakValueDictionary[int, FlatGroup] = WeakValueDictionary()  # of every transient `full`


def group_of(tensor: torch.Tensor) -> FlatGroup | None:
    """The group whose `full` a tensor is a view of, if that is one that is freed and refilled."""
    return _group_of_storage.get(tensor.untyped_storage()._cdata)


class FlatGroup:
    """Parameters of one unit with one dtype, flat: their values, and in `grads` their gradients.

    Verbs: unshard, reshard, publish; and of the gradients, reduce.
    """

    def __init__(
        self,
        index: int,
        params: Sequence[tuple[str, nn.Parameter]],
        placement: Placement,
        dtypes: CopyDtypes,
        links: GroupLinks,
        scaling: GradScaling,
        values_of: ValuesOf = torch.Tensor.detach,
    ) -> None:
        """`values_of` gives the values a parameter starts with, where they are not in the parameter itself."""
        self.index = index
        self.fqns = [fqn for fqn, _ in params]
        self.params = [param for _, param in params]
        self.trained = [param.requires_grad for param in self.params]  # all alike, until some are unfrozen
        self.is_trainable = any(self.trained)  # whether there are masters and gradients
        self.placement, self.dtypes, self.links = placement, dtypes, links
        self.device = self.params[0].device
        self.layout = FlatLayout([(fqn, tuple(p.shape)) for fqn, p in params], links.world_size)
        self.numel = self.layout.padded_numel
        self._own = slice(*self.layout.shard_range(links.rank))

        self.users = 0  # scopes that are computing with the group right now
        self.held_by_backward = False
        self._gathering: Pending | None = None
        self._wire: torch.Tensor | None = None  # gathered values on their way to a wider `full`
        self._versions = [0] * len(self.params)  # what torch counted of writes when values were last in agreement

        self._build_values(values_of)
        self.grads = GroupGradients(self.params, self.layout, placement, dtypes, links, scaling)
        if self.is_trainable:
            self.grads.allocate()

    # ------------------------------------------------------------------ building

    def _build_values(self, values_of: ValuesOf) -> None:
        """Move the parameters into the flat buffers, one at a time; afterwards they are views of `full`."""
        dtypes = self.dtypes
        # Not from the transport: weights are multiplied with at every step and sent once, so they want the best pages.
        # Memory that is only reserved costs nothing: where `full` is freed again, nothing is written into it.
        make_full = torch.empty if self.is_transient else torch.zeros
        self.full = make_full(self.numel, dtype=dtypes.compute, device=self.device)
        self._full_nbytes = self.full.untyped_storage().nbytes()
        if self.is_transient:
            _group_of_storage[self.full.untyped_storage()._cdata] = self
        self._is_whole = not self.is_transient
        self.resident = Resident(self._make_store(), self.links)
        self.master: torch.Tensor | None = None
        if self.is_trainable:
            self.master = self._make_master()
        for index, (param, slot) in enumerate(zip(self.params, self.layout.slots, strict=True)):
            # Masters start from the values before they are rounded to storage.
            values = values_of(param)
            if values is not None:
                self.write_slot(index, values)
            param.data = self.full[slot.offset : slot.end].view(slot.shape)
        self.note_versions()
        if self.is_transient:
            self._free_full()
        form = self.links.frozen_form
        if form is not None and self.placement.params and not self.is_trainable and self.dtypes.storage in DTYPES:
            # Not before all slots are written: a block that two of them share would be rounded twice.
            self.resident = QuantizedResident(self.store, form, self.links)

    @property
    def store(self) -> torch.Tensor:
        """The resident values, to read; see `Resident`."""
        return self.resident.values

    @property
    def has_separate_master(self) -> bool:
        """Whether masters are other tensors than the resident values."""
        return self.master is not None and self.dtypes.master != self.dtypes.storage

    def _make_master(self) -> torch.Tensor:
        if self.dtypes.master != self.dtypes.storage:
            return self._own_store().to(self.dtypes.master)
        return self._asleep() if self.resident.waits else self._own_store()

    def _asleep(self) -> torch.Tensor:
        """What masters are while they wait with the resident values: of their shape, NaN to read, nothing to write."""
        nan = torch.full((1,), torch.nan, dtype=self.dtypes.master, device=self.device)
        return nan.expand(self.layout.shard_numel)

    def keep_in_file(self, files: ValueFiles) -> None:
        """From now on this rank's shard waits in a file. For sharded groups, before their first use."""
        self.resident = FileResident(f"group {self.index}", self.store, files, self.links)
        if self.master_waits:
            self.master = self._asleep()

    @property
    def master_waits(self) -> bool:
        """Whether masters are in memory only inside `awake`, being the resident values that wait in a file."""
        return self.resident.waits and self.master is not None and not self.has_separate_master

    def keep_master_in_file(self, tensor: FileTensor) -> None:
        """From now on masters that are tensors of their own wait in a file."""
        assert self.master is not None
        tensor.save(self.master)
        self.master = tensor

    @property
    def master_in_memory(self) -> torch.Tensor:
        """What the optimizer's tensors are views of: `master`, or while that is in a file of its own, NaN."""
        assert self.master is not None
        return self._asleep() if self.master_in_file else self.master

    @property
    def master_in_file(self) -> bool:
        """Whether masters wait in a file of their own; reading and writing them goes there."""
        return isinstance(self.master, FileTensor)

    @contextmanager
    def awake(self, *, write: bool = False) -> Iterator[None]:
        """Inside, `master` is in memory; `write` says that it is changed there. Not to be nested.

        The write may be under way afterwards; see `Resident.sleep`.
        """
        if not self.master_waits:
            yield
            return
        self.master = self.resident.wake()
        try:
            yield
        finally:
            self.master = self._asleep()
            self.resident.begin_sleep(changed=write)

    def _make_store(self) -> torch.Tensor:
        if not self.is_transient:
            return self.full
        numel = self.layout.shard_numel if self.placement.params else self.numel
        if not self.placement.optim:
            return torch.zeros(numel, dtype=self.dtypes.storage, device=self.device)
        return self.links.gather.empty(numel, self.dtypes.storage, self.device).zero_()

    def _own_store(self) -> torch.Tensor:
        """The part of `store` that this rank's optimizer owns: all of it when optimizer states are whole."""
        if self.placement.params or not self.placement.optim:
            return self.store
        return self.store[self._own]

    def train(self, slot: int) -> None:
        """From now on a frozen parameter is trained; the group's masters start from its resident values."""
        self.trained[slot] = True
        self.params[slot].grad = None
        if not self.is_trainable:
            self.is_trainable = True
            self.resident = self.resident.trainable(self._make_store)
            self.master = self._make_master()
            self.grads.allocate()

    # ---------------------------------------------------------- unshard, reshard

    @property
    def is_transient(self) -> bool:
        """Whether `full` exists only around its use."""
        return self.placement.params or self.dtypes.compute != self.dtypes.storage

    @property
    def needs_gather(self) -> bool:
        """Whether making the group whole takes communication."""
        return self.placement.params

    @property
    def live_nbytes(self) -> int:
        """Bytes of `full` while it exists."""
        return self.numel * self.dtypes.compute.itemsize

    @property
    def is_whole(self) -> bool:
        """Whether the parameters can be read now."""
        return self._is_whole

    @property
    def is_gathering(self) -> bool:
        """Whether a gather is under way."""
        return self._gathering is not None

    @torch.no_grad()
    def begin_unshard(self, *, exact: bool = False) -> None:
        """Start making the group whole. Collective when parameters are sharded.

        May be repeated on a whole group, which then only serves its shard to the other ranks: the values it receives
        are those it has. `exact` asks for the resident values themselves, where computing makes do with less.
        """
        if self._gathering is not None:
            self.finish_unshard()
        if not self._is_whole:
            self.full.untyped_storage().resize_(self._full_nbytes)
        if not self.placement.params:
            return
        if self.dtypes.compute != self.dtypes.storage:
            self._wire = torch.empty(self.numel, dtype=self.dtypes.storage, device=self.device)
        target = self.full if self._wire is None else self._wire
        self._gathering = self.resident.all_gather(target, exact=exact)

    @torch.no_grad()
    def finish_unshard(self) -> None:
        """Wait for the gather; afterwards the parameters can be read."""
        if self._gathering is not None:
            self._gathering.wait()
            self._gathering = None
            if self._wire is not None:
                self.full.copy_(self._wire)
                self._wire = None
        elif not self.placement.params and self.is_transient and not self._is_whole:
            self.full.copy_(self.store)
        if not self._is_whole:
            self._is_whole = True
            for param in self.params:
                placeholder.show(param)
            self.note_versions()

    def whole_resident(self) -> torch.Tensor:
        """The resident values of all ranks (N,), to read. Collective where they are sharded."""
        if not self.needs_gather:
            return self.store
        whole = torch.empty(self.numel, dtype=self.dtypes.storage, device=self.device)
        self.resident.all_gather(whole, exact=True).wait()
        return whole

    def serve(self) -> None:
        """Give this rank's shard to the ranks that gather the group now; nothing here changes. Collective."""
        unused = torch.empty(self.numel, dtype=self.dtypes.storage, device=self.device)
        self.resident.all_gather(unused, exact=False).wait()

    def reshard(self) -> None:
        """Free `full`. Does nothing when parameters stay whole in their compute dtype."""
        if not self.is_transient or not self._is_whole:
            return
        if self._gathering is not None:
            self.finish_unshard()
        self._is_whole = False
        self._free_full()

    def _free_full(self) -> None:
        if not self.full.untyped_storage().resizable():
            self._move_full()
        for param in self.params:
            placeholder.hide(param)
        self.full.untyped_storage().resize_(0)

    def _move_full(self) -> None:
        """Somebody was lent the memory of `full` for good, as numpy's arrays are: leave it to them and go elsewhere."""
        del _group_of_storage[self.full.untyped_storage()._cdata]
        self.full = torch.empty_like(self.full)
        _group_of_storage[self.full.untyped_storage()._cdata] = self
        for param, slot in zip(self.params, self.layout.slots, strict=True):
            param.data = self.full[slot.offset : slot.end].view(slot.shape)

    # ----------------------------------------------------------- resident values

    @torch.no_grad()
    def refresh(self) -> None:
        """Bring the resident values that this rank owns up to date with `master`, where that is another tensor."""
        self.forget_copies()
        if not self.has_separate_master:
            return
        assert self.master is not None
        if self.placement.params:
            self.resident.refresh(self.master)
        else:
            self._own_store().copy_(self.master)

    @torch.no_grad()
    def begin_publish(self, *, is_refreshed: bool = False) -> Pending | None:
        """After the optimizer's step: bring the resident values up to date with `master`.

        Returns a pending gather where whole parameters are updated shard by shard, else None (sharded parameters
        are refilled by their next unshard).
        """
        self.forget_copies()  # also on a rank that owns nothing of the group and had nothing to refresh
        if not is_refreshed:
            self.refresh()
        assert not (self.is_transient and self._is_whole), "free stale values before publishing new ones"
        for param in self.params:
            # A graph kept across the step must fail its version check, as it does in plain torch.
            torch.autograd.graph.increment_version(param)
        if not self.is_transient:
            self.note_versions()
        if self.placement.optim and not self.placement.params:
            return self.links.gather.all_gather(self.store, self._own_store())
        return None

    def forget_copies(self) -> None:
        """The resident values change: the next unshard reads them, not a copy made before. On all ranks alike."""
        self.resident.forget_copies()

    @torch.no_grad()
    def write_slot(self, slot: int, value: torch.Tensor) -> None:
        """Set one parameter's values everywhere this rank keeps them. `value` is whole and equal on all ranks."""
        self.forget_copies()
        where, flat = self.layout.slots[slot], value.reshape(-1)
        own_start, _ = self.layout.shard_range(self.links.rank)
        with self.resident.editing() as store:
            for tensor, is_shard in self._copies(store):
                start = own_start if is_shard else 0
                low, high = max(where.offset, start), min(where.end, start + tensor.numel())
                if low < high:
                    tensor[low - start : high - start].copy_(flat[low - where.offset : high - where.offset])

    def edited(self) -> list[int]:
        """Slots whose values somebody wrote into, or replaced as `param.data`, since whole and resident ones agreed.

        Writes are seen by torch's own count of them, which leaves out those through `param.data`.
        """
        if self.is_transient and not self._is_whole:
            return []
        return [
            slot
            for slot, (param, version) in enumerate(zip(self.params, self._versions, strict=True))
            if param._version != version or self._is_elsewhere(slot)
        ]

    def keep_edits(self) -> None:
        """Take over into the resident values what was edited. No rank may be reading them.

        Raises:
            UsageError: a parameter got a tensor of another shape; it has its own again.
        """
        for slot in self.edited():
            self.take_over(slot)

    @torch.no_grad()
    def take_over(self, slot: int) -> None:
        """Make the values a whole parameter has now the resident ones; see `keep_edits`."""
        param, where = self.params[slot], self.layout.slots[slot]
        view, given = self.full[where.offset : where.end].view(where.shape), param.detach()
        if self._is_elsewhere(slot):
            param.data = view
            if given.shape != view.shape:
                raise UsageError(
                    f"parameter {where.fqn} of shape {where.shape} got a tensor of shape {tuple(given.shape)} while an "
                    f"engine runs it; change shapes before initialize"
                )
            view.copy_(given)
        self.write_slot(slot, view)
        self._versions[slot] = param._version

    def _is_elsewhere(self, slot: int) -> bool:
        """Whether a parameter is no view of `full` any more."""
        where = self.layout.slots[slot]
        place = self.full.data_ptr() + where.offset * self.full.itemsize
        return where.numel > 0 and self.params[slot].data_ptr() != place

    def note_versions(self) -> None:
        """Whole and resident values agree: what is written from now on is an edit."""
        self._versions = [param._version for param in self.params]

    def _copies(self, store: torch.Tensor) -> list[tuple[torch.Tensor, bool]]:
        """(tensor, whether it is this rank's shard only) of everything that holds values now, `store` the first."""
        found = [(store, self.placement.params)]
        if self.master is not None and self.has_separate_master:
            found.append((self.master, self.placement.optim))
        if self.is_transient and self._is_whole:
            found.append((self.full, False))
        return found

    # ------------------------------------------------------ the group as a whole

    def optimizer_pieces(self) -> list[Piece]:
        """The pieces of the parameters that this rank's optimizer owns, offsets counted in `master`."""
        if self.placement.optim:
            return self.layout.pieces(self.links.rank)
        return self.layout.pieces_between(0, self.numel)

    def rename(self, slot: int, fqn: str) -> None:
        """Call a parameter by another name."""
        self.fqns[slot] = fqn
        self.layout.slots[slot] = self.layout.slots[slot]._replace(fqn=fqn)

    def nbytes(self) -> dict[str, int]:
        """Bytes this rank holds for the group, by name; see `Engine.memory_bytes`."""
        master = self.master if self.has_separate_master and not self.master_in_file else None
        return {
            "params": self.resident.nbytes(),
            "secondary": self.resident.copies_nbytes(),
            "disk": self.resident.disk_nbytes(),
            "grads": self.grads.nbytes(),
            "master": 0 if master is None else master.nbytes,
            "live": self.full.untyped_storage().nbytes() if self.is_transient else 0,
        }

    def drop(self) -> None:
        """Free all values, whose parameters were taken over by others. No rank may be reading them."""
        self.resident = Resident(self.store[:0].clone(), self.links)
        self.master = None

    def release(self) -> None:
        """Give the parameters back to their owner as ordinary whole tensors of their own. Collective when sharded."""
        if self.is_transient:
            self.begin_unshard(exact=True)
            self.finish_unshard()
        for param in self.params:
            placeholder.disown(param)
            param.data = param.detach().to(self.dtypes.storage, copy=True)
            param.grad = None
