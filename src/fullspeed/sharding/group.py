"""One group of parameters that is gathered, reduced and published together, on one flat buffer.

[Note: tensors of a group]  N = padded numel, n = N / world_size = this rank's shard

| name    | shape    | dtype   | lives                | what it is                                                    |
|---------|----------|---------|----------------------|---------------------------------------------------------------|
| full    | (N,)     | compute | while computing      | what forward and backward read; the parameters are its views  |
| store   | (N,)/(n,)| storage | always               | the resident values: whole, or this rank's shard              |
| master  | (N,)/(n,)| master  | always               | what the optimizer updates; a view of `store` if dtypes agree |
| local   | (N,)     | accum   | whole grads: always; | this rank's own gradients since the last reduction            |
|         |          |         | sharded: per pass    |                                                               |
| reduced | (N,)/(n,)| accum   | grads' share         | gradients averaged over ranks; a view of `local` when it can  |

Where compute dtype = storage dtype and parameters are whole, `full` and `store` are one tensor and no verb copies
anything. Otherwise `full` is freed by resizing its storage to zero and refilled in place, so that autograd's saved
views of it stay valid (arXiv:1910.02054, section 5, for what is sharded when).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import NamedTuple

import torch
from torch import nn

from fullspeed.base.layout import FlatLayout, Piece
from fullspeed.comm import Pending
from fullspeed.sharding import placeholder
from fullspeed.sharding.links import GroupLinks
from fullspeed.sharding.placement import Placement

# A parameter's first values, whole; None leaves it zero.
ValuesOf = Callable[[nn.Parameter], "torch.Tensor | None"]


class GroupDtypes(NamedTuple):
    """Dtypes of a group's tensors (see the note above)."""

    storage: torch.dtype
    compute: torch.dtype
    master: torch.dtype
    accum: torch.dtype
    wire: torch.dtype  # gradients while they travel


class GradScaling(NamedTuple):
    """Factors that turn a sum over ranks into what the user asked for: `pre` before it travels, `post` after."""

    pre: float
    post: float


class FlatGroup:
    """Parameters of one unit with one dtype, flat. Verbs: unshard, reshard, reduce_grads, publish."""

    def __init__(
        self,
        index: int,
        params: Sequence[tuple[str, nn.Parameter]],
        placement: Placement,
        dtypes: GroupDtypes,
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
        self.placement, self.dtypes, self.links, self.scaling = placement, dtypes, links, scaling
        self.device = self.params[0].device
        self.layout = FlatLayout([(fqn, tuple(p.shape)) for fqn, p in params], links.world_size)
        self.numel = self.layout.padded_numel
        self._own = slice(*self.layout.shard_range(links.rank))
        self._source = links.shard_source()

        self.users = 0  # scopes that are computing with the group right now
        self.held_by_backward = False
        self._gathering: Pending | None = None
        self._wire: torch.Tensor | None = None  # gathered values on their way to a wider `full`

        self._build_values(values_of)
        self.local: torch.Tensor | None = None
        self.reduced: torch.Tensor | None = None
        self._fresh = [True] * len(self.params)  # slot has nothing in `local` yet
        self.has_local = False
        self.touched = [False] * len(self.params)  # slot got a gradient since the last step, on this rank
        self._is_exposed = False  # reduced gradients are visible as `param.grad`
        self._reducing: Pending | None = None
        self._incoming: torch.Tensor | None = None
        if self.is_trainable:
            self._make_local()

    # ------------------------------------------------------------------ values

    def _build_values(self, values_of: ValuesOf) -> None:
        """Move the parameters into the flat buffers, one at a time; afterwards they are views of `full`."""
        dtypes = self.dtypes
        # Not from the transport: weights are multiplied with at every step and sent once, so they want the best pages.
        # Memory that is only reserved costs nothing: where `full` is freed again, nothing is written into it.
        make_full = torch.empty if self.is_transient else torch.zeros
        self.full = make_full(self.numel, dtype=dtypes.compute, device=self.device)
        self._full_nbytes = self.full.untyped_storage().nbytes()
        self._is_whole = not self.is_transient
        self.store = self._make_store()
        self.master: torch.Tensor | None = None
        if self.is_trainable:
            self.master = self._make_master()
        for index, (param, slot) in enumerate(zip(self.params, self.layout.slots, strict=True)):
            # Masters start from the values before they are rounded to storage.
            values = values_of(param)
            if values is not None:
                self.write_slot(index, values)
            param.data = self.full[slot.offset : slot.end].view(slot.shape)
        if self.is_transient:
            self._free_full()

    def _make_master(self) -> torch.Tensor:
        own = self._own_store()
        return own if self.dtypes.master == self.dtypes.storage else own.to(self.dtypes.master)

    def _make_local(self) -> None:
        if not self.placement.grads:
            self.local = self.links.reduce.empty(self.numel, self.dtypes.accum, self.device).zero_()

    def train(self, slot: int) -> None:
        """From now on a frozen parameter is trained; the group's masters start from its resident values."""
        self.trained[slot] = True
        self.params[slot].grad = None
        if not self.is_trainable:
            self.is_trainable = True
            self.master = self._make_master()
            self._make_local()

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
        self._gathering = (self.links.gather if exact else self._source).all_gather(target, self.store)

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

    def serve(self) -> None:
        """Give this rank's shard to the ranks that gather the group now; nothing here changes. Collective."""
        unused = torch.empty(self.numel, dtype=self.dtypes.storage, device=self.device)
        self._source.all_gather(unused, self.store).wait()

    def reshard(self) -> None:
        """Free `full`. Does nothing when parameters stay whole in their compute dtype."""
        if not self.is_transient or not self._is_whole:
            return
        if self._gathering is not None:
            self.finish_unshard()
        self._is_whole = False
        self._free_full()

    def _free_full(self) -> None:
        for param in self.params:
            placeholder.hide(param)
        self.full.untyped_storage().resize_(0)

    @torch.no_grad()
    def begin_publish(self) -> Pending | None:
        """After the optimizer's step: bring the resident values up to date with `master`.

        Returns a pending gather where whole parameters are updated shard by shard, else None (sharded parameters
        are refilled by their next unshard).
        """
        assert self.master is not None
        self.forget_copies()
        own = self._own_store()
        if own.data_ptr() != self.master.data_ptr():
            own.copy_(self.master)
        assert not (self.is_transient and self._is_whole), "free stale values before publishing new ones"
        for param in self.params:
            # A graph kept across the step must fail its version check, as it does in plain torch.
            torch.autograd.graph.increment_version(param)
        if self.placement.optim and not self.placement.params:
            return self.links.gather.all_gather(self.store, own)
        return None

    def forget_copies(self) -> None:
        """The resident values change: the next unshard reads them, not a copy made before. On all ranks alike."""
        self._source.forget()

    # --------------------------------------------------------------- gradients

    @torch.no_grad()
    def accumulate(self, slot: int, factor: float) -> None:
        """Move `param.grad` of one slot into `local`, times `factor` and the scaling that precedes reduction."""
        param = self.params[slot]
        grad = param.grad
        if grad is None:
            return
        self.begin_local()
        assert self.local is not None
        where = self.layout.slots[slot]
        view = self.local[where.offset : where.end].view(where.shape)
        _accumulate(view, grad, factor * self.scaling.pre, self._fresh[slot])
        self._fresh[slot] = False
        param.grad = None
        self.has_local = True
        self.touched[slot] = True

    def begin_local(self) -> None:
        """Make room for this rank's own gradients; what was reduced before is kept apart."""
        if self.has_local:
            return
        if self.placement.grads:
            # Not waiting for a reduction under way: it keeps its own buffer, and a peer may need us first.
            self.local = self.links.reduce.empty(self.numel, self.dtypes.accum, self.device)
            return
        self.finish_reduce()
        if self.reduced is not None and self._aliases_local(self.reduced):
            self.reduced = self.reduced.clone()

    def _aliases_local(self, tensor: torch.Tensor) -> bool:
        return self.local is not None and tensor.untyped_storage().data_ptr() == self.local.untyped_storage().data_ptr()

    @torch.no_grad()
    def begin_reduce(self) -> None:
        """Start summing `local` over ranks. Collective: every rank must call it, with gradients or without."""
        self.finish_reduce()
        self.begin_local()
        local = self.local
        assert local is not None
        for slot, is_fresh in zip(self.layout.slots, self._fresh, strict=True):
            if is_fresh:
                local[slot.offset : slot.end].zero_()
        for start, stop in self.layout.gaps():
            local[start:stop].zero_()
        wire = local if self.dtypes.wire == local.dtype else local.to(self.dtypes.wire)
        if self.placement.optim:
            self._incoming = self._reduction_target(local)
            self._reducing = self.links.reduce.reduce_scatter(wire, self._incoming)
        else:
            self._incoming = wire
            self._reducing = self.links.reduce.all_reduce(wire)
        self.has_local = False
        self._fresh = [True] * len(self.params)
        if self.placement.grads:
            self.local = None  # the transfer keeps it for as long as it is read

    def _reduction_target(self, local: torch.Tensor) -> torch.Tensor:
        """Where the reduced shard lands: in place when nothing was reduced before, else in a tensor to be added."""
        if self.reduced is None and not self.placement.grads:
            return local[self._own]
        return torch.empty(self.layout.shard_numel, dtype=self.dtypes.accum, device=self.device)

    @property
    def is_reducing(self) -> bool:
        """Whether a reduction is under way."""
        return self._reducing is not None

    def advance_reduce(self) -> None:
        """Wait for the phase of the reduction under way and start its next, if it has one."""
        if self._reducing is not None:
            self._reducing.advance()

    def try_finish_reduce(self) -> bool:
        """Finish the reduction under way if that takes no waiting; returns whether none is under way now."""
        if self._reducing is not None and self._reducing.poll():
            self.finish_reduce()
        return self._reducing is None

    @torch.no_grad()
    def finish_reduce(self) -> None:
        """Wait for the reduction under way and add its result to `reduced`. Does nothing when there is none."""
        if self._reducing is None:
            return
        self._reducing.wait()
        self._reducing = None
        incoming, self._incoming = self._incoming, None
        assert incoming is not None
        if self.scaling.post != 1.0:
            incoming.mul_(self.scaling.post)
        if self.reduced is not None:
            if incoming.data_ptr() != self.reduced.data_ptr():
                self.reduced.add_(incoming)
        elif incoming.dtype != self.dtypes.accum:
            if self.local is not None and not self.placement.grads:
                self.reduced = self.local.copy_(incoming)
            else:
                self.reduced = incoming.to(self.dtypes.accum)
        else:
            self.reduced = incoming

    def clear_grads(self) -> None:
        """Forget all gradients; the buffers of whole gradients stay allocated."""
        self.finish_reduce()
        self.reduced = None
        self.has_local = self._is_exposed = False
        self._fresh = [True] * len(self.params)
        self.touched = [False] * len(self.params)
        if self.placement.grads:
            self.local = None
        for param in self.params:
            param.grad = None

    def expose_grads(self) -> None:
        """Show reduced gradients as `param.grad` until the step, as plain torch does. Only where they are whole."""
        if self.placement.optim or self.reduced is None:
            return
        self._is_exposed = True
        for param, slot, touched in zip(self.params, self.layout.slots, self.touched, strict=True):
            if touched and param.dtype == self.reduced.dtype and not placeholder.is_sharded(param):
                param.grad = self.reduced[slot.offset : slot.end].view(slot.shape)

    def unexpose_grads(self) -> None:
        """Take exposed gradients back, with what the user made of them. Does nothing when none are exposed."""
        if self._is_exposed:
            self.adopt_exposed_grads()
            self._is_exposed = False
            for param in self.params:
                param.grad = None

    def adopt_exposed_grads(self) -> None:
        """Take over gradients the user put in place of the exposed ones between backward and step."""
        if not self._is_exposed or self.reduced is None:
            return
        for index, (param, slot) in enumerate(zip(self.params, self.layout.slots, strict=True)):
            if not self.touched[index] or param.dtype != self.reduced.dtype or placeholder.is_sharded(param):
                continue
            view = self.reduced[slot.offset : slot.end].view(slot.shape)
            if param.grad is None:
                self.touched[index] = False
            elif param.grad.data_ptr() != view.data_ptr():
                view.copy_(param.grad)

    # ------------------------------------------------------------------ lookup

    def optimizer_pieces(self) -> list[Piece]:
        """The pieces of the parameters that this rank's optimizer owns, offsets counted in `master`."""
        if self.placement.optim:
            return self.layout.pieces(self.links.rank)
        return self.layout.pieces_between(0, self.numel)

    def rename(self, slot: int, fqn: str) -> None:
        """Call a parameter by another name."""
        self.fqns[slot] = fqn
        self.layout.slots[slot] = self.layout.slots[slot]._replace(fqn=fqn)

    @torch.no_grad()
    def write_slot(self, slot: int, value: torch.Tensor) -> None:
        """Set one parameter's values everywhere this rank keeps them. `value` is whole and equal on all ranks."""
        self.forget_copies()
        where, flat = self.layout.slots[slot], value.reshape(-1)
        own_start, _ = self.layout.shard_range(self.links.rank)
        for tensor, is_shard in self._resident_tensors():
            start = own_start if is_shard else 0
            low, high = max(where.offset, start), min(where.end, start + tensor.numel())
            if low < high:
                tensor[low - start : high - start].copy_(flat[low - where.offset : high - where.offset])

    def _resident_tensors(self) -> list[tuple[torch.Tensor, bool]]:
        """(tensor, whether it is this rank's shard only) of everything that holds values now."""
        found = [(self.store, self.placement.params)]
        if self.master is not None:
            found.append((self.master, self.placement.optim))
        if self.is_transient and self._is_whole:
            found.append((self.full, False))
        return found

    def ensure_reduced(self) -> torch.Tensor:
        """The reduced gradients, zeros if there are none yet."""
        self.finish_reduce()
        if self.reduced is None:
            assert self.master is not None
            self.reduced = torch.zeros(self.master.numel(), dtype=self.dtypes.accum, device=self.device)
        return self.reduced

    def nbytes(self) -> dict[str, int]:
        """Bytes this rank holds for the group, by name; see `Engine.memory_bytes`."""
        sizes = {"params": _nbytes(self.store), "secondary": self._source.nbytes(), "grads": 0, "master": 0, "live": 0}
        if self.master is not None and self.master.dtype != self.dtypes.storage:
            sizes["master"] = _nbytes(self.master)
        grads = [t for t in (self.local, self.reduced) if t is not None]
        seen = {t.untyped_storage().data_ptr(): t.untyped_storage().nbytes() for t in grads}
        sizes["grads"] = sum(seen.values())
        if self.is_transient:
            sizes["live"] = self.full.untyped_storage().nbytes()
        return sizes

    def release(self, restore: Callable[[FlatGroup], None]) -> None:
        """Give the parameters back to their owner as ordinary whole tensors of their own."""
        restore(self)
        for param in self.params:
            placeholder.disown(param)
            param.data = param.detach().to(self.dtypes.storage, copy=True)
            param.grad = None


def _accumulate(view: torch.Tensor, grad: torch.Tensor, factor: float, is_fresh: bool) -> None:
    """View (+)= factor * grad, in one pass over memory where dtypes agree."""
    if grad.is_sparse:
        grad = grad.to_dense()
    if not is_fresh:
        view.add_(grad, alpha=factor)
    elif factor == 1.0:
        view.copy_(grad)
    elif grad.dtype == view.dtype:
        torch.mul(grad, factor, out=view)
    else:
        view.copy_(grad)
        view.mul_(factor)


def _nbytes(tensor: torch.Tensor) -> int:
    return tensor.numel() * tensor.element_size()
