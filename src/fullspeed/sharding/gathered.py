"""`zero.GatheredParameters`: parameters whole on every rank for a while, and what becomes of edits made meanwhile.

An edit is kept, in the resident values, the fp32 masters and so in what the optimizer steps, or it is an error on every
rank: never silently dropped. Edits are found by comparing fingerprints of every parameter before and after, so a write
through `.data`, which torch does not count, is seen as well. Cost: two passes over the gathered values.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack
from types import TracebackType
from typing import Any, NamedTuple

import torch
from torch import nn

from fullspeed.base.errors import UsageError
from fullspeed.comm import Group, all_gather_object, broadcast, get_group_rank
from fullspeed.sharding import placeholder
from fullspeed.sharding.external import register_external_parameter
from fullspeed.sharding.group import FlatGroup
from fullspeed.sharding.placeholder import Owner
from fullspeed.sharding.state_files import write_together

_CHUNK_NUMEL = 1 << 20
_INTEGERS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


class GatheredParameters:
    """Context in which parameters have their whole values on every rank. Collective.

    Entries that are sharded by nobody are left alone, whatever they are; parameters of an engine below stage 3 take
    part, so that edits reach their masters. All parameters of a gathered group may be edited. Reentrant: contexts over
    the same parameters may be nested. A new `nn.Parameter` put in a parameter's place stays in the model.

    Args:
        params: a parameter, or nested iterables or mappings of them.
        modifier_rank: global rank whose edits count; its values are broadcast at the end. None: every rank makes the
            same edits, which is checked.
        fwd_module: a module whose forward will use the parameters: they are registered as its external parameters.
        enabled: False makes the context do nothing.

    Raises:
        UsageError: on every rank, at the end, when without `modifier_rank` ranks edited differently; the parameters
            keep the values of a rank that did not edit. Also when a parameter of an engine got another shape.
    """

    def __init__(
        self,
        params: Any,
        modifier_rank: int | None = None,
        fwd_module: nn.Module | None = None,
        enabled: bool = True,
    ) -> None:
        self._params = list(dict.fromkeys(_params_in(params))) if enabled else []
        self._modifier_rank = modifier_rank
        self._loans: list[_Loan] = []
        self._whole = ExitStack()
        if fwd_module is not None:
            for param in self._params:
                register_external_parameter(fwd_module, param)

    def __enter__(self) -> None:
        by_owner: dict[int, tuple[Owner, list[nn.Parameter]]] = {}
        for param in self._params:
            owner = placeholder.owner_of(param)
            if owner is not None:
                by_owner.setdefault(id(owner), (owner, []))[1].append(param)
        self._whole = ExitStack()
        for owner, params in by_owner.values():
            groups = {owner.place_of(param)[0].index: owner.place_of(param)[0] for param in params}
            loan = _Loan(owner, [groups[index] for index in sorted(groups)])
            self._whole.enter_context(owner.whole(loan.groups))
            loan.before = loan.fingerprints()
            self._loans.append(loan)

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        loans, self._loans = self._loans, []
        with self._whole:
            try:
                if error is None:  # otherwise other ranks may not come: no collective, edits are dropped
                    for loan in loans:
                        loan.settle(self._modifier_rank)
            finally:
                for loan in loans:
                    loan.forget_the_rest()


def unwrap_model_for_generation(engine: Any) -> GatheredParameters:
    """Context in which all of an engine's parameters are whole, so that generating gathers nothing. Collective.

    Worth it where the whole model fits: a token's forward otherwise gathers every group again.
    """
    return GatheredParameters(engine.module.parameters())


class _Place(NamedTuple):
    """One parameter of a loan."""

    group: FlatGroup
    slot: int
    param: nn.Parameter

    @property
    def fqn(self) -> str:
        return self.group.fqns[self.slot]

    @property
    def view(self) -> torch.Tensor:
        """Where in `full` the values belong, 1-D."""
        where = self.group.layout.slots[self.slot]
        return self.group.full[where.offset : where.end]


class _Loan:
    """Groups of one owner that a context keeps whole."""

    def __init__(self, owner: Owner, groups: Sequence[FlatGroup]) -> None:
        self.owner, self.groups = owner, groups
        self.before: dict[nn.Parameter, int] = {}

    def places(self) -> list[_Place]:
        """Every parameter of the groups that the owner still has."""
        return [_Place(group, self.owner.place_of(param)[1], param) for group in self.groups for param in group.params]

    def fingerprints(self) -> dict[nn.Parameter, int]:
        """A number for each parameter that changes when its values do."""
        return {place.param: _fingerprint(place.param) for place in self.places()}

    @torch.no_grad()
    def settle(self, modifier_rank: int | None) -> None:
        """Keep the edits that were made, or raise on every rank."""
        group = self.owner.group
        self.owner.assemble()
        if modifier_rank is None:
            self._check_equal(group)
        self._adopt_new_tensors(group, modifier_rank)
        places = self.places()
        if modifier_rank is not None:
            source = get_group_rank(group, modifier_rank)
            for flat in self.groups:
                broadcast(flat.full, source, group)
        edited = [
            place
            for place in places
            if place.param not in self.before or _fingerprint(place.param) != self.before[place.param]
        ]

        def write() -> None:
            for place in edited:
                place.group.write_slot(place.slot, place.view)

        write_together(write, self.groups, group)
        for place in edited:
            torch.autograd.graph.increment_version(place.param)

    def forget_the_rest(self) -> None:
        """Edits that were not kept are not to be taken for new ones."""
        for place in self.places():
            if _has_moved(place):
                place.param.data = place.view.view(place.group.layout.slots[place.slot].shape)
        for group in self.groups:
            group.note_versions()

    def _check_equal(self, group: Group) -> None:
        after = self.fingerprints()
        places = self.places()
        rows = all_gather_object([(self.before[place.param], after[place.param]) for place in places], group)
        faults = []
        for index, place in enumerate(places):
            if len({row[index][1] for row in rows}) == 1:
                continue
            editors = [rank for rank, row in enumerate(rows) if row[index][0] != row[index][1]]
            faults.append(f"{place.fqn} (edited on rank {', '.join(map(str, editors))})")
            if not place.group.is_transient:  # resident values were edited in place: take an untouched rank's
                others = [rank for rank in range(len(rows)) if rank not in editors]
                broadcast(place.view, others[0] if others else 0, group)
        if faults:
            raise UsageError(
                f"inside GatheredParameters ranks gave different values to {'; '.join(faults)}; make the same edit on "
                f"every rank, or pass modifier_rank, the rank whose values count"
            )

    def _adopt_new_tensors(self, group: Group, modifier_rank: int | None) -> None:
        """A parameter whose `.data` was set is no view of the group any more: take the values over."""
        moved = [place for place in self.places() if _has_moved(place)]
        source = 0 if modifier_rank is None else get_group_rank(group, modifier_rank)
        shapes = {place.fqn: tuple(place.param.shape) for place in moved}
        told = all_gather_object(shapes, group)[source] if modifier_rank is not None else shapes
        for place in self.places():
            where = place.group.layout.slots[place.slot]
            shape = told.get(place.fqn, where.shape)
            if shape != where.shape:
                self._reshape(place, shape)
            elif _has_moved(place):
                place.view.copy_(place.param.detach().reshape(-1))
                place.param.data = place.view.view(where.shape)

    def _reshape(self, place: _Place, shape: tuple[int, ...]) -> None:
        own = place.param.detach()
        value = own if tuple(own.shape) == shape else own.new_empty(shape)
        self.owner.replace(place.param, value)


def _has_moved(place: _Place) -> bool:
    return place.view.numel() > 0 and place.param.data_ptr() != place.view.data_ptr()


def _params_in(value: Any) -> Iterator[nn.Parameter]:
    if isinstance(value, nn.Parameter):
        yield value
    elif isinstance(value, torch.Tensor | str | bytes):
        return
    elif isinstance(value, Mapping):
        for item in value.values():
            yield from _params_in(item)
    elif isinstance(value, Iterable):
        for item in value:
            yield from _params_in(item)


def _fingerprint(param: torch.Tensor) -> int:
    """A 64-bit number of a tensor's bits in their order: equal tensors have equal ones, on every rank."""
    flat = param.detach().contiguous().view(-1)
    if flat.is_complex():
        flat = torch.view_as_real(flat).view(-1)
    bits = flat.view(_INTEGERS[flat.itemsize])
    # Odd weights: a single change is always seen; random ones: several practically always. Sums wrap, which is fine.
    generator = torch.Generator().manual_seed(0x5EED)
    numel = min(_CHUNK_NUMEL, bits.numel())
    weights = torch.randint(-(2**62), 2**62, (numel,), generator=generator).mul_(2).add_(1).to(bits.device)
    total = 0
    for begin in range(0, bits.numel(), _CHUNK_NUMEL):
        chunk = bits[begin : begin + _CHUNK_NUMEL].to(torch.int64)
        part = int((chunk * weights[: chunk.numel()]).sum())
        total = (total * 0x100000001B3 + part) % 2**64
    return total
