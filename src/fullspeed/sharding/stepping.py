"""The inner optimizer's step over this rank's pieces, from reduced gradients to published parameters."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from typing import Any, Protocol

import torch
from torch import nn
from torch.optim import Optimizer

from fullspeed.sharding.group import FlatGroup
from fullspeed.sharding.pieces import OwnedPiece, sub_groups
from fullspeed.sharding.runtime import ShardingRuntime


class Stepper(Protocol):
    """How an update is carried out, once it is known that there is one and how far it is clipped."""

    def step(self, touched: Mapping[nn.Parameter, bool], factor: float) -> None:
        """Step every parameter that is `touched`, with its reduced gradient times `factor`, and publish. Collective."""
        ...

    def keep_state(self, owned: OwnedPiece) -> None:
        """The inner optimizer's state of a piece was set from outside: put it where states are between steps."""
        return  # in memory, of which this is true already

    def state_dict(self) -> dict[str, Any]:
        """What a resumed training must know besides the optimizer's state, alike on all ranks."""
        return {}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Go on from what `state_dict` gave, `{}` if another kind of stepper saved; values and states were replaced."""
        return  # a protocol's empty body would have to be filled in by every stepper

    def nbytes(self) -> int:
        """Bytes of second copies this rank holds now."""
        return 0


class MemoryStepper(Stepper):
    """Masters and states are in memory: sub-groups one after the other, so that few gradients are widened at once."""

    def __init__(
        self,
        inner: Optimizer,
        runtime: ShardingRuntime,
        owned: Mapping[nn.Parameter, OwnedPiece],
        sub_group_numel: int,
    ) -> None:
        """`owned` is read at each step: parameters may be added to it."""
        self._inner, self._runtime, self._owned = inner, runtime, owned
        self._sub_group_numel = sub_group_numel

    def step(self, touched: Mapping[nn.Parameter, bool], factor: float) -> None:
        """See `Stepper`."""
        batches = sub_groups(self._owned.values(), self._runtime.trainable, self._sub_group_numel)
        step_in_memory(self._inner, batches, touched, factor)
        self._runtime.publish()


def step_in_memory(
    inner: Optimizer, batches: Sequence[list[OwnedPiece]], touched: Mapping[nn.Parameter, bool], factor: float
) -> None:
    """Step batches whose states are in memory, and their masters, unless those wait with the resident values."""
    for batch, following in zip(batches, [*batches[1:], []], strict=True):
        with masters_awake(batch, touched, following):
            step_batch(inner, batch, touched, factor)


@contextmanager
def masters_awake(
    batch: Sequence[OwnedPiece], touched: Mapping[nn.Parameter, bool], following: Sequence[OwnedPiece] = ()
) -> Iterator[None]:
    """Inside, masters that wait with the resident values are in memory, those of the `following` batch on their way."""
    changed: dict[FlatGroup, bool] = {}
    for owned in batch:
        if owned.group.master_waits:
            changed[owned.group] = changed.get(owned.group, False) or touched[owned.param]
    pieces = [owned for owned in batch if owned.group in changed]
    with ExitStack() as awake:
        awake.callback(_follow, pieces)
        for group, is_changed in changed.items():
            awake.enter_context(group.awake(write=is_changed))
        _follow(pieces)
        for group in {owned.group: None for owned in following if owned.group.master_waits}:
            group.resident.begin_wake()
        yield


def _follow(pieces: Sequence[OwnedPiece]) -> None:
    for owned in pieces:
        owned.follow()


def step_batch(inner: Optimizer, batch: list[OwnedPiece], touched: Mapping[nn.Parameter, bool], factor: float) -> None:
    """Step pieces that make up whole groups. Their gradients are freed before this returns."""
    groups = {owned.group.index: owned.group for owned in batch}
    grads = {index: step_gradient(group, factor) for index, group in groups.items()}
    for owned in batch:
        owned.tensor.grad = owned.part_of(grads[owned.group.index]) if touched[owned.param] else None
    inner.step()
    for owned in batch:
        owned.tensor.grad = None


def step_gradient(group: FlatGroup, factor: float) -> torch.Tensor:
    """The group's reduced gradient, unscaled and clipped, in the dtype of its masters."""
    assert group.master is not None
    grad = group.grads.reduced
    if grad is None:
        return torch.zeros_like(group.master)
    if grad.dtype != group.master.dtype:
        grad = grad.to(group.master.dtype)
    if factor != 1.0:
        grad.mul_(factor)
    return grad
