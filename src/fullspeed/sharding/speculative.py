"""Steps that begin in backward: a group is stepped in a copy as soon as its gradients are there, and taken over later.

Follows SuperOffload (arXiv:2509.21271, speculation then validation): a thread steps copies of a group's masters and
states while backward goes on, as if gradients were neither clipped nor infinite. At the step, when norm and overflow
are known, results that hold are taken over; the others are dropped and the group is stepped as it would have been
without. So the numbers are those of `MemoryStepper`, to the last bit, whichever it was.

A result holds if everything it was computed of is as it was read: gradients, masters, states, hyper-parameters, loss
scale, and which parameters got a gradient on any rank. Edits between backward and step, a second backward, clipping and
an overflow thereby need no code of their own. Nothing that others may read changes before the step.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future
from typing import Any, NamedTuple

import torch
from torch import nn
from torch.optim import Optimizer

from fullspeed.sharding.apart import (
    Apart,
    Options,
    Readings,
    Shadow,
    are_equal,
    options_of,
    param_group_of,
    step_apart,
)
from fullspeed.sharding.group import FlatGroup
from fullspeed.sharding.pieces import OwnedPiece, sub_groups
from fullspeed.sharding.runtime import ShardingRuntime
from fullspeed.sharding.stepping import Stepper, step_batch
from fullspeed.sharding.worker import BackgroundWorker


class _Row(NamedTuple):
    """One piece of a group that is stepped in its shadow."""

    owned: OwnedPiece
    param_group: int
    shadow: Shadow
    state: Mapping[str, Any]  # the piece's own, as it was when the group's gradients came


class _Guess(NamedTuple):
    """A group's step, under way or done in shadows."""

    rows: list[_Row]  # of pieces that got a gradient
    touched: list[bool]  # by slot
    factor: float  # what gradients are multiplied with
    readings: Readings
    done: Future[None]


class SpeculativeStepper(Stepper):
    """Steps groups in backward, and once more at the step where that did not hold.

    Costs a second copy of masters and optimizer states, which stays allocated; see `nbytes`. Taking a result over
    exchanges state tensors with their copies: a tensor of `optimizer.state` that somebody keeps is an old one after the
    next step.

    Attributes:
        num_taken: groups whose result was taken over, since the start.
        num_redone: groups that had to be stepped again.
    """

    def __init__(
        self,
        inner: Optimizer,
        runtime: ShardingRuntime,
        owned: Mapping[nn.Parameter, OwnedPiece],
        sub_group_numel: int,
        loss_scale: Callable[[], float],
        worker: BackgroundWorker,
    ) -> None:
        """`owned` is read at each step: parameters may be added to it."""
        self._inner, self._runtime, self._owned = inner, runtime, owned
        self._sub_group_numel, self._loss_scale, self._worker = sub_group_numel, loss_scale, worker
        self._shadows: dict[nn.Parameter, Shadow] = {}  # by what they are shadows of
        self._guesses: dict[int, _Guess] = {}  # by index of the group
        self._options: Options = []  # what all of them are stepped with
        self._param_groups: dict[nn.Parameter, int] = {}
        self.num_taken = self.num_redone = 0
        runtime.watch_reductions(self._speculate)

    # ---------------------------------------------------------------- backward

    def _speculate(self, group: FlatGroup) -> None:
        """The group's gradients are reduced: step it in shadows, beside what remains of backward."""
        if not self._guesses:
            self._options = options_of(self._inner)
        earlier = self._guesses.pop(group.index, None)
        if earlier is not None:  # a second backward before the step
            earlier.done.cancel()
        reduced, master, touched = group.grads.reduced, group.master, list(group.grads.touched)
        if reduced is None or master is None or not any(touched):
            return
        rows = [self._row(owned) for owned in self._pieces_of(group) if touched[owned.piece.slot]]
        options, factor = self._options, 1.0 / self._loss_scale()
        readings = Readings(self._read_of(group, reduced))

        def step() -> None:
            _step_shadows(self._inner, rows, reduced.to(master.dtype, copy=True), factor, options)

        self._guesses[group.index] = _Guess(rows, touched, factor, readings, self._worker.submit(step))

    def _pieces_of(self, group: FlatGroup) -> list[OwnedPiece]:
        found = (self._owned.get(param) for param in group.params)
        return [owned for owned in found if owned is not None]

    def _row(self, owned: OwnedPiece) -> _Row:
        shadow = self._shadows.get(owned.tensor)
        if shadow is None:
            shadow = self._shadows[owned.tensor] = Shadow(owned.tensor)
        if owned.tensor not in self._param_groups:
            self._param_groups = param_group_of(self._inner)
        return _Row(owned, self._param_groups[owned.tensor], shadow, dict(self._inner.state.get(owned.tensor, {})))

    def _read_of(self, group: FlatGroup, reduced: torch.Tensor) -> list[torch.Tensor]:
        """Every tensor a step of the group reads."""
        states = [self._inner.state.get(owned.tensor, {}).values() for owned in self._pieces_of(group)]
        entries = [value for state in states for value in state if isinstance(value, torch.Tensor)]
        assert group.master is not None
        return [reduced, group.master, *entries]

    # -------------------------------------------------------------------- step

    def step(self, touched: Mapping[nn.Parameter, bool], factor: float) -> None:
        """See `Stepper`.

        Raises:
            UpdateError: on every rank, if a step in the background failed on any.
        """
        guesses, self._guesses = self._guesses, {}
        has_options = are_equal(self._options, options_of(self._inner))
        holding: dict[int, _Guess] = {}
        for group in self._runtime.trainable:
            guess = guesses.get(group.index)
            if guess is None:
                continue
            if has_options and self._holds(group, guess, touched, factor):
                holding[group.index] = guess
            else:
                guess.done.cancel()
        self._worker.wait([guess.done for guess in holding.values()])
        for guess in holding.values():
            self._take_over(guess)
        for batch in sub_groups(self._owned.values(), self._runtime.trainable, self._sub_group_numel):
            rest = [owned for owned in batch if owned.group.index not in holding]
            if rest:
                step_batch(self._inner, rest, touched, factor)
        self.num_taken += len(holding)
        self.num_redone += len(guesses) - len(holding)
        self._runtime.publish()

    def _holds(self, group: FlatGroup, guess: _Guess, touched: Mapping[nn.Parameter, bool], factor: float) -> bool:
        reduced = group.grads.reduced
        return (
            reduced is not None
            and guess.factor == factor
            and guess.touched == [touched[param] for param in group.params]
            and guess.readings.are_current(self._read_of(group, reduced))
        )

    @torch.no_grad()
    def _take_over(self, guess: _Guess) -> None:
        for owned, _, shadow, _ in guess.rows:
            owned.tensor.copy_(shadow.tensor)
            state = self._inner.state[owned.tensor]
            before = dict(state)
            state.clear()
            state.update(shadow.state)
            shadow.state = before  # the next shadow's buffers

    def nbytes(self) -> int:
        """Bytes of the copies: masters and states of everything that was stepped so far."""
        return sum(shadow.nbytes() for shadow in self._shadows.values())


def _step_shadows(
    inner: Optimizer,
    rows: Sequence[_Row],
    grad: torch.Tensor,
    factor: float,
    options: Options,
) -> None:
    """Fill the shadows and step them with the group's gradient `grad`, which is changed."""
    if factor != 1.0:
        grad.mul_(factor)
    for owned, _, shadow, state in rows:
        shadow.fill(owned.tensor, state)
        shadow.tensor.grad = owned.part_of(grad)
    step_apart(inner, options, [Apart(row.param_group, row.shadow.tensor, row.shadow.state) for row in rows])
    for row in rows:
        row.shadow.tensor.grad = None
