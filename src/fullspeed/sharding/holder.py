"""Parameters in shards that no engine runs yet: what `zero.Init` makes and `initialize` takes over.

Outside an engine there is no forward or backward that could say when values are needed. So every operation gathers
them, runs, writes back what it changed and frees them again. Such operations are collective: every rank runs the
same ones in the same order, as ranks that build the same model do. After an operation that writes, rank 0's values win.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from typing import cast

import torch
from torch import nn

from fullspeed.base.errors import UsageError
from fullspeed.comm import Group, broadcast, get_rank, get_world_size, make_transport
from fullspeed.precision.policy import CopyDtypes
from fullspeed.sharding import attributes, placeholder
from fullspeed.sharding.gradients import GradScaling
from fullspeed.sharding.group import FlatGroup, group_of
from fullspeed.sharding.links import GroupLinks
from fullspeed.sharding.outputs import tensors_in
from fullspeed.sharding.placement import Placement

_IN_SHARDS = Placement(params=True, grads=True, optim=True)

# Operations whose results point at memory without being tensors.
_ESCAPING = {"data_ptr", "untyped_storage", "storage", "numpy", "__array__", "__dlpack__", "share_memory_"}


class ShardHolder:
    """Owner of sharded parameters outside an engine. Made collectively.

    Args:
        group: the ranks that share the parameters.
        device: where shards and gathered values live.
    """

    def __init__(self, group: Group, device: torch.device) -> None:
        self.group, self.device = group, device
        rank, world_size = get_rank(group), get_world_size(group)
        # Private memory: values are gathered seldom here, and a peer's shared pages would count as this rank's own.
        transport = make_transport(group, device, may_share=False)
        self._links = GroupLinks(
            dp_group=group, shard_group=group, rank=rank, world_size=world_size, replica=0, num_replicas=1,
            gather=transport, unshard=transport, reduce=transport, node=None,
        )  # fmt: skip
        self._place: dict[torch.Tensor, tuple[FlatGroup, int]] = {}
        self._groups: set[FlatGroup] = set()
        self._borrowers: dict[FlatGroup, int] = {}  # contexts that keep a group whole
        self._taken_from: FlatGroup | None = None
        self._emptied: FlatGroup | None = None  # whose last parameter was taken, and whose shard peers may be reading

    def __contains__(self, param: object) -> bool:
        return param in self._place

    def place_of(self, param: torch.Tensor) -> tuple[FlatGroup, int]:
        """The group and slot of a parameter in this holder's care."""
        return self._place[param]

    def groups(self) -> list[FlatGroup]:
        """Groups in the order they were made, the same on all ranks."""
        return list(dict.fromkeys(group for group, _ in self._place.values()))

    # ------------------------------------------------------------- taking in

    def add(self, params: Iterable[tuple[str, nn.Parameter]]) -> None:
        """Shard parameters, by name: rank 0's values win. They become groups that are gathered together.

        A parameter on the meta device has no values: its shards are zeros until somebody loads them. Collective.
        """
        alike: dict[tuple[torch.dtype, bool], list[tuple[str, nn.Parameter]]] = {}
        for fqn, param in params:
            self._bring(param)
            alike.setdefault((param.dtype, param.requires_grad), []).append((fqn, param))
        for (dtype, _), members in alike.items():
            self._add_group(dtype, members)

    @torch.no_grad()
    def _bring(self, param: nn.Parameter) -> None:
        if param.is_meta:
            # Pages nobody writes to take no memory.
            reserved = torch.empty_like(param, device=self.device, requires_grad=param.requires_grad)
            torch.utils.swap_tensors(param, type(param)(reserved, param.requires_grad))
            param.__dict__["_has_no_values"] = True
            return
        dense = param.detach().to(self.device).contiguous()
        if dense.numel():
            broadcast(dense, 0, self.group)
        if dense.data_ptr() != param.data_ptr():
            param.data = dense

    def _add_group(self, dtype: torch.dtype, members: Sequence[tuple[str, nn.Parameter]]) -> None:
        dtypes = CopyDtypes(dtype, dtype, dtype, dtype, dtype)
        scaling = GradScaling(pre=1.0, post=1.0)
        group = FlatGroup(len(self._place), members, _IN_SHARDS, dtypes, self._links, scaling, _initial_values)
        self._groups.add(group)
        for slot, param in enumerate(group.params):
            self._place[param] = (group, slot)
            placeholder.adopt(param, self)
            attributes.attach(group, slot)
            param.__dict__["_shard_holder"] = self  # owners are referenced weakly: the parameters keep theirs alive

    # ------------------------------------------------------------ giving away

    def take(self, param: nn.Parameter) -> torch.Tensor:
        """Give a parameter away: returns its whole values, valid until the next call of any method. Collective."""
        group, slot = self._place[param]
        if self._taken_from is not group:
            self._free_taken()
            if not group.is_whole:
                _gather(group)
                self._drop_emptied()
            self._taken_from = group
        values = _values(group, slot)
        self._forget(param, group)
        return values

    def end_taking(self) -> None:
        """Free what the last `take` gathered."""
        self._free_taken()

    def _free_taken(self) -> None:
        group, self._taken_from = self._taken_from, None
        if group is not None and not self._borrowers.get(group):
            group.reshard()
            if not group.params:
                self._emptied = group

    def _drop_emptied(self) -> None:
        """Free the shard of the group taken before: peers that took part in a later gather have read it."""
        if self._emptied is not None:
            self._emptied.drop()
            self._emptied = None

    def _forget(self, param: nn.Parameter, group: FlatGroup) -> None:
        del self._place[param]
        group.params[:] = [other for other in group.params if other is not param]  # its gradients have the same list
        placeholder.show(param)
        placeholder.disown(param)
        attributes.detach(param)
        del param.__dict__["_shard_holder"]

    def assemble(self) -> None:
        """Nothing to wait for: nobody gathers on his own here."""

    @torch.no_grad()
    def replace(self, param: nn.Parameter, value: torch.Tensor) -> None:
        """Give a parameter a new tensor, of any shape and dtype, as `param.data = value` does. Collective."""
        group, slot = self._place[param]
        fqn = group.fqns[slot]
        self._forget(param, group)
        param.data = value.detach().to(self.device)
        self.add([(fqn, param)])

    # ------------------------------------------------------------- operations

    @contextmanager
    def whole(self, groups: Iterable[FlatGroup]) -> Iterator[None]:
        """Inside, the groups' values are here. Collective."""
        groups = list(groups)
        for group in groups:
            if not group.is_whole:
                _gather(group)
            self._borrowers[group] = self._borrowers.get(group, 0) + 1
        try:
            yield
        finally:
            for group in groups:
                self._borrowers[group] -= 1
                if not self._borrowers[group]:
                    del self._borrowers[group]
                    group.reshard()

    def run(self, tensors: list[torch.Tensor], operation: placeholder.Operation) -> object:
        """Carry out an operation on sharded parameters; see `placeholder.Owner`."""
        if operation.name == "__set__" and operation.args[0] in self._place:
            param, value = operation.args
            self.replace(param, self.copy_of(value) if placeholder.is_sharded(value) else value)
            return None
        groups = self._groups_of(tensors)
        if operation.name in _ESCAPING:
            raise UsageError(
                f"{operation.name} of {self._names(tensors)} would point at memory that is freed again: its values "
                f"are in shards; use it on a copy (.clone()) made inside zero.GatheredParameters"
            )
        with self.whole(groups):
            result = operation.carry_out()
            self._check_graph(result, tensors)
            for group in groups:
                self._keep_writes(group, everywhere=_writes(operation))
            self._keep_views(result)
        return result

    def _groups_of(self, tensors: Iterable[torch.Tensor]) -> list[FlatGroup]:
        found = {}
        for tensor in tensors:
            group = group_of(tensor)
            if group is None or group not in self._groups or not group.params:
                raise UsageError(
                    f"a view of shape {tuple(tensor.shape)} outlived the sharded parameter it was taken of; take it "
                    f"again from the model's parameter"
                )
            found[group.index] = group
        return [found[index] for index in sorted(found)]

    def _names(self, tensors: Iterable[torch.Tensor]) -> str:
        return ", ".join(dict.fromkeys(fqn for group in self._groups_of(tensors) for fqn in group.fqns))

    def _check_graph(self, result: object, tensors: list[torch.Tensor]) -> None:
        if not torch.is_grad_enabled():
            return
        if any(tensor.requires_grad and tensor not in self._place for tensor in tensors_in(result)):
            raise UsageError(
                f"{self._names(tensors)} was sharded by zero.Init and no engine runs it, so nothing can be "
                f"differentiated: pass the model to fullspeed.initialize, or compute under torch.no_grad()"
            )

    @torch.no_grad()
    def _keep_writes(self, group: FlatGroup, *, everywhere: bool) -> None:
        if everywhere:
            broadcast(group.full, 0, self.group)
        own = group.full[slice(*group.layout.shard_range(self._links.rank))]
        if not torch.equal(own, group.store):
            group.store.copy_(own)

    def _keep_views(self, result: object) -> None:
        """Results that share a parameter's memory stay usable: each use of them gathers as the parameter does."""
        for tensor in tensors_in(result):
            is_view = tensor not in self._place and group_of(tensor) in self._groups
            if is_view:
                placeholder.hide_view(tensor, self)
                tensor.__dict__["_shard_holder"] = self

    def copy_of(self, tensor: torch.Tensor) -> torch.Tensor:
        """A whole, ordinary copy; see `placeholder.Owner`. Collective."""
        with self.whole(self._groups_of([tensor])), torch.no_grad():
            copy = tensor.detach().clone()
        return nn.Parameter(copy, tensor.requires_grad) if tensor in self._place else copy

    def deep_copy_of(self, param: nn.Parameter) -> nn.Parameter:
        """A second sharded parameter with the same values. Collective."""
        group, slot = self._place[param]
        copy = cast(nn.Parameter, self.copy_of(param))
        self.add([(group.fqns[slot], copy)])
        return copy


def _initial_values(param: nn.Parameter) -> torch.Tensor | None:
    return None if param.__dict__.pop("_has_no_values", False) else param.detach()


def _gather(group: FlatGroup) -> None:
    group.begin_unshard()
    group.finish_unshard()


def _values(group: FlatGroup, slot: int) -> torch.Tensor:
    where = group.layout.slots[slot]
    return group.full[where.offset : where.end].view(where.shape)


def _writes(operation: placeholder.Operation) -> bool:
    """Whether an operation says that it changes an argument. All ranks answer alike."""
    name = operation.name
    return name == "__setitem__" or "out" in operation.kwargs or (name.endswith("_") and not name.endswith("__"))
