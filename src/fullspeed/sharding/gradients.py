"""The gradients of one group: accumulated into a flat buffer, summed over ranks, shown to the user, forgotten.

Their tensors, `local` and `reduced`, are described with the group's others in `sharding/group.py`. How often and in
which order groups are reduced is decided in `sharding/reductions.py`.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import NamedTuple

import torch
from torch import nn

from fullspeed.base.layout import FlatLayout
from fullspeed.comm import Pending
from fullspeed.precision.policy import CopyDtypes
from fullspeed.sharding import placeholder
from fullspeed.sharding.links import GroupLinks
from fullspeed.sharding.placement import Placement


class GradScaling(NamedTuple):
    """Factors that turn a sum over ranks into what the user asked for: `pre` before it travels, `post` after."""

    pre: float
    post: float


class GroupGradients:
    """Gradients of a group's parameters. The verb is reduce: `begin_reduce`, `finish_reduce`.

    Attributes:
        local: this rank's own gradients since the last reduction; None while there is no buffer for them.
        reduced: gradients averaged over ranks, of this rank's shard or whole; None before any reduction.
        has_local: whether `local` holds gradients that no reduction has taken.
        touched: for each slot, whether it got a gradient on this rank since the last step.
    """

    def __init__(
        self,
        params: Sequence[nn.Parameter],
        layout: FlatLayout,
        placement: Placement,
        dtypes: CopyDtypes,
        links: GroupLinks,
        scaling: GradScaling,
    ) -> None:
        """Allocates nothing; see `allocate`."""
        self.params, self.layout = params, layout
        self.placement, self.dtypes, self.scaling = placement, dtypes, scaling
        self._reduce = links.reduce.of_one_buffer()
        self.device = params[0].device
        self._own = slice(*layout.shard_range(links.rank))
        self.local: torch.Tensor | None = None
        self.reduced: torch.Tensor | None = None
        self.has_local = False
        self.touched = [False] * len(params)
        self._fresh = [True] * len(params)  # slot has nothing in `local` yet
        self._is_exposed = False  # reduced gradients are visible as `param.grad`
        self._reducing: Pending | None = None
        self._incoming: torch.Tensor | None = None  # where the reduction under way puts its result

    def allocate(self) -> None:
        """The group is trained: make the buffer of whole gradients, which stays. Sharded ones have one in a pass."""
        if not self.placement.grads:
            self.local = self._make_local().zero_()

    def _make_local(self) -> torch.Tensor:
        return self._reduce.empty(self.layout.padded_numel, self.dtypes.accum, self.device)

    # -------------------------------------------------------------- accumulate

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
            self.local = self._make_local()
            return
        self.finish_reduce()
        if self.reduced is not None and self._aliases_local(self.reduced):
            self.reduced = self.reduced.clone()

    def _aliases_local(self, tensor: torch.Tensor) -> bool:
        return self.local is not None and tensor.untyped_storage().data_ptr() == self.local.untyped_storage().data_ptr()

    # ------------------------------------------------------------------ reduce

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
            self._reducing = self._reduce.reduce_scatter(wire, self._incoming)
        else:
            self._incoming = wire
            self._reducing = self._reduce.all_reduce(wire)
        self.has_local = False
        self._fresh = [True] * len(self.params)
        if self.placement.grads:
            self.local = None  # the transfer keeps it for as long as it is read

    def _reduction_target(self, local: torch.Tensor) -> torch.Tensor:
        """Where the reduced shard lands: in place when nothing was reduced before, else in a tensor to be added."""
        if self.reduced is None and not self.placement.grads:
            return local[self._own]
        return torch.empty(self.layout.shard_numel, dtype=self.dtypes.accum, device=self.device)

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
            assert self.local is not None, "only whole gradients come back in the dtype they travel in"
            self.reduced = self.local.copy_(incoming)
        else:
            self.reduced = incoming

    def ensure_reduced(self) -> torch.Tensor:
        """The reduced gradients, zeros if there are none yet."""
        self.finish_reduce()
        if self.reduced is None:
            numel = self.layout.shard_numel if self.placement.optim else self.layout.padded_numel
            self.reduced = torch.zeros(numel, dtype=self.dtypes.accum, device=self.device)
        return self.reduced

    def clear(self) -> None:
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

    # ------------------------------------------------------------------ expose

    def expose(self) -> None:
        """Show reduced gradients as `param.grad` until the step, as plain torch does. Only where they are whole."""
        if self.placement.optim or self.reduced is None:
            return
        self._is_exposed = True
        for slot, view in self._presentable(self.reduced):
            self.params[slot].grad = view

    def unexpose(self) -> None:
        """Take exposed gradients back, with what the user made of them. Does nothing when none are exposed."""
        if self._is_exposed:
            self.adopt_exposed()
            self._is_exposed = False
            for param in self.params:
                param.grad = None

    def adopt_exposed(self) -> None:
        """Take over gradients the user put in place of the exposed ones between backward and step."""
        if not self._is_exposed or self.reduced is None:
            return
        for slot, view in self._presentable(self.reduced):
            grad = self.params[slot].grad
            if grad is None:
                self.touched[slot] = False
            elif grad.data_ptr() != view.data_ptr():
                view.copy_(grad)

    def _presentable(self, reduced: torch.Tensor) -> Iterator[tuple[int, torch.Tensor]]:
        """Slots that have a gradient torch accepts as their parameter's, with its view of whole `reduced` gradients."""
        for slot, (param, where) in enumerate(zip(self.params, self.layout.slots, strict=True)):
            if self.touched[slot] and param.dtype == reduced.dtype and not placeholder.is_sharded(param):
                yield slot, reduced[where.offset : where.end].view(where.shape)

    def nbytes(self) -> int:
        """Bytes of `local` and `reduced`, memory they share counted once, and of what reductions keep."""
        held = [tensor.untyped_storage() for tensor in (self.local, self.reduced) if tensor is not None]
        return sum({storage.data_ptr(): storage.nbytes() for storage in held}.values()) + self._reduce.nbytes()


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
