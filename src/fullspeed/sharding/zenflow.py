"""Updates of a few important columns in every step, and of the others later, beside the next forward and backward.

After ZenFlow (arXiv:2505.12242). Each parameter of two or more dimensions is split, piece by piece, into the columns
that `columns.important` chooses and the rest:

- chosen columns are stepped at every update;
- the others' gradients are summed, and their mean is applied at every `update_every`-th update, as one step;
- everything else (vectors, warm-up, the update in which columns are chosen, parameters seen for the first time) is
  stepped whole, at once.

With `overlaps` the deferred step is handed to a thread, which works on copies, and taken over at the start of the next
update. So a gradient is applied at most `update_every` updates after its own. Norm, clipping and overflow are settled
before, as always: a deferred gradient is clipped by the norm of its own update.

Kept in the optimizer's state of a piece, per element, so that checkpoints carry them to any number of ranks:
`important` (bool), which elements are in chosen columns; `deferred_grad`, sums that wait; `pending_grad`, means that
were handed over. State of its own, such as Adam's step, the optimizer has once for all columns of a piece: moments of
deferred columns move less often than it counts.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from concurrent.futures import Future
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import nn
from torch.optim import Optimizer

from fullspeed.comm import Group, all_reduce
from fullspeed.sharding.apart import Apart, Options, Readings, Shadow, options_of, param_group_of, step_apart
from fullspeed.sharding.columns import Rhythm, Weight, important, row_numel
from fullspeed.sharding.pieces import OwnedPiece, sub_groups
from fullspeed.sharding.runtime import ShardingRuntime
from fullspeed.sharding.stepping import Stepper, step_gradient
from fullspeed.sharding.worker import BackgroundWorker

IMPORTANT, DEFERRED, PENDING = "important", "deferred_grad", "pending_grad"
_OURS = (IMPORTANT, DEFERRED, PENDING)


@dataclass(frozen=True)
class SelectivePolicy:
    """How columns are told apart.

    Attributes:
        topk_ratio: share of columns that are stepped at every update.
        overlaps: deferred updates run in a thread beside the next forward and backward.
        sub_group_numel: elements whose gradients are widened at once.
    """

    topk_ratio: float
    overlaps: bool
    sub_group_numel: int


class _Split(NamedTuple):
    """A piece of which only the chosen columns are stepped now: their elements, and the gradients of these."""

    owned: OwnedPiece
    elements: torch.Tensor
    grad: torch.Tensor


class _Row(NamedTuple):
    """A piece's deferred step: with what gradient, from what state."""

    owned: OwnedPiece
    param_group: int
    state: dict[str, Any]
    grad: torch.Tensor


class _Flight(NamedTuple):
    """Deferred steps in the background: what was read for each piece, and the results."""

    readings: dict[nn.Parameter, Readings]
    done: Future[dict[nn.Parameter, Shadow]]


class ZenFlowStepper(Stepper):
    """Steps chosen columns now and the others later; see the module.

    Attributes:
        num_taken: pieces whose step in the background was taken over, since the start.
        num_redone: pieces that had to be stepped once more, as they were edited or loaded meanwhile.
    """

    def __init__(
        self,
        inner: Optimizer,
        runtime: ShardingRuntime,
        owned: Mapping[nn.Parameter, OwnedPiece],
        policy: SelectivePolicy,
        rhythm: Rhythm,
        worker: BackgroundWorker,
        dp_group: Group,
    ) -> None:
        """`owned` is read at each step: parameters may be added to it."""
        self._inner, self._runtime, self._owned = inner, runtime, owned
        self._policy, self._rhythm, self._worker, self._dp_group = policy, rhythm, worker, dp_group
        self._pending_options: Options | None = None  # of the update that was handed over, until it is taken over
        self._flight: _Flight | None = None
        self.num_taken = self.num_redone = 0
        self._elements: dict[nn.Parameter, tuple[torch.Tensor, torch.Tensor]] = {}  # (mask, its elements)

    # -------------------------------------------------------------------- step

    @torch.no_grad()
    def step(self, touched: Mapping[nn.Parameter, bool], factor: float) -> None:
        """See `Stepper`.

        Raises:
            UpdateError: on every rank, if the update in the background failed on any.
        """
        self._land()
        rhythm, chooses = self._rhythm, self._rhythm.chooses
        splits: list[_Split] = []
        choices: dict[nn.Parameter, torch.Tensor] = {}
        for batch in sub_groups(self._owned.values(), self._runtime.trainable, self._policy.sub_group_numel):
            splits += self._take_in(batch, touched, factor, choices if chooses else None)
        applies = chooses or rhythm.is_due(*self._weights(splits))
        hands_over = applies and self._policy.overlaps and not chooses
        if applies and not hands_over:
            self._step_everything(splits)
        else:
            self._step_chosen(splits)
        for tensor, mask in choices.items():
            self._inner.state[tensor][IMPORTANT] = mask
        self._runtime.publish()
        if hands_over:  # not before: publishing counts as a write where masters are views of what is published
            self._hand_over()
        rhythm.advance(is_applied=applies)

    def _take_in(
        self,
        batch: Sequence[OwnedPiece],
        touched: Mapping[nn.Parameter, bool],
        factor: float,
        choices: dict[nn.Parameter, torch.Tensor] | None,
    ) -> list[_Split]:
        """Step pieces without a choice of columns; add the others' gradients to what is deferred.

        The choice for the coming updates is put into `choices`, if given.
        """
        groups = {owned.group.index: owned.group for owned in batch}
        grads = {index: step_gradient(group, factor) for index, group in groups.items()}
        splits, whole = [], []
        for owned in batch:
            if not touched[owned.param]:
                continue
            grad = owned.part_of(grads[owned.group.index])
            if choices is not None and (choice := self._choose(owned, grad)) is not None:
                choices[owned.tensor] = choice
            elements = self._chosen_elements(owned)
            if elements is None:
                owned.tensor.grad = grad
                whole.append(owned)
            else:
                splits.append(_Split(owned, elements, grad.index_select(0, elements)))
                self._defer(owned, grad, elements)
        self._step_inner(whole)
        return splits

    def _defer(self, owned: OwnedPiece, grad: torch.Tensor, chosen: torch.Tensor) -> None:
        """Add the gradient to what waits, but for the chosen elements."""
        state = self._inner.state[owned.tensor]
        if DEFERRED in state:
            state[DEFERRED] += grad
        else:
            state[DEFERRED] = grad.clone()
        state[DEFERRED].index_fill_(0, chosen, 0.0)

    def _choose(self, owned: OwnedPiece, grad: torch.Tensor) -> torch.Tensor | None:
        row = row_numel(owned.group.layout.slots[owned.piece.slot].shape)
        return important(grad, owned.piece.start, row, self._policy.topk_ratio) if row else None

    def _step_inner(self, pieces: Sequence[OwnedPiece]) -> None:
        """Step the pieces that have a gradient, which are these."""
        if pieces:
            self._inner.step()
        for owned in pieces:
            owned.tensor.grad = None

    def _chosen_elements(self, owned: OwnedPiece) -> torch.Tensor | None:
        """The elements of a piece's chosen columns; None before a choice."""
        mask = self._inner.state[owned.tensor].get(IMPORTANT) if owned.tensor in self._inner.state else None
        if mask is None:
            return None
        known = self._elements.get(owned.tensor)
        if known is None or known[0] is not mask:
            known = self._elements[owned.tensor] = (mask, mask.nonzero().view(-1))
        return known[1]

    def _weights(self, splits: Sequence[_Split]) -> tuple[Weight, Weight]:
        """Of what is deferred and of the chosen columns' gradients, on all ranks. Collective."""
        sums = torch.zeros(4, dtype=torch.float64)
        if self._rhythm.update_every is None:
            for owned, chosen, grad in splits:
                deferred = self._inner.state[owned.tensor][DEFERRED]
                squares = (deferred.square().sum().item(), grad.square().sum().item())
                sums += torch.tensor([squares[0], deferred.numel() - chosen.numel(), squares[1], chosen.numel()])
            sums = all_reduce(sums.to(self._runtime.device), group=self._dp_group).cpu()
        return Weight(*sums[:2].tolist()), Weight(*sums[2:].tolist())

    def _step_everything(self, splits: Sequence[_Split]) -> None:
        """Step all columns: the chosen ones with their gradients, the others with the mean of what was deferred."""
        for owned, chosen, grad in splits:
            owned.tensor.grad = self._take_deferred(owned)
            owned.tensor.grad.index_copy_(0, chosen, grad)
        self._step_inner([owned for owned, _, _ in splits])
        # What has only older gradients: its chosen columns stay.
        options = options_of(self._inner)
        for owned in self._with_state(DEFERRED):
            self._inner.state[owned.tensor][PENDING] = self._take_deferred(owned)
            self._take_over(owned, self._step_now(owned, options))

    def _take_deferred(self, owned: OwnedPiece) -> torch.Tensor:
        """The mean of the gradients that waited, which do no longer."""
        total: torch.Tensor = self._inner.state[owned.tensor].pop(DEFERRED)
        return total.div_(self._rhythm.num_deferred + 1)

    def _step_chosen(self, splits: Sequence[_Split]) -> None:
        """Step the chosen columns, taken out of their pieces and put back."""
        param_groups, work = param_group_of(self._inner), []
        for owned, chosen, grad in splits:
            part = nn.Parameter(owned.tensor.index_select(0, chosen))
            part.grad = grad
            state = {name: _part(owned, value, chosen) for name, value in self._state_of(owned).items()}
            work.append(Apart(param_groups[owned.tensor], part, state))
        step_apart(self._inner, options_of(self._inner), work)
        for (owned, chosen, _), each in zip(splits, work, strict=True):
            owned.tensor.index_copy_(0, chosen, each.tensor)
            state = self._inner.state[owned.tensor]
            for name, value in each.state.items():
                if name in state and _is_per_element(state[name], owned):
                    state[name].index_copy_(0, chosen, value)
                else:
                    state[name] = value

    def _state_of(self, owned: OwnedPiece) -> dict[str, Any]:
        """What the optimizer itself keeps of a piece."""
        return {name: value for name, value in self._inner.state[owned.tensor].items() if name not in _OURS}

    # ---------------------------------------------------------- in the background

    def _hand_over(self) -> None:
        """Begin the deferred columns' update, which the next update takes over."""
        pieces = self._with_state(DEFERRED)
        for owned in pieces:
            self._inner.state[owned.tensor][PENDING] = self._take_deferred(owned)
        inner, rows = self._inner, self._rows(pieces)
        options = self._pending_options = options_of(inner)
        readings = {owned.tensor: Readings(self._read_of(owned)) for owned in pieces}
        self._flight = _Flight(readings, self._worker.submit(lambda: _step_copies(inner, rows, options)))

    def _rows(self, pieces: Sequence[OwnedPiece]) -> list[_Row]:
        """The steps with the gradients that are pending."""
        param_groups = param_group_of(self._inner)
        return [
            _Row(owned, param_groups[owned.tensor], self._state_of(owned), self._inner.state[owned.tensor][PENDING])
            for owned in pieces
        ]

    def _step_now(self, owned: OwnedPiece, options: Options) -> Shadow:
        return _step_copies(self._inner, self._rows([owned]), options)[owned.tensor]

    def _with_state(self, name: str) -> list[OwnedPiece]:
        return [owned for owned in self._owned.values() if name in self._inner.state.get(owned.tensor, {})]

    def _read_of(self, owned: OwnedPiece) -> list[torch.Tensor]:
        values = self._inner.state[owned.tensor].values()
        return [owned.tensor, *(value for value in values if isinstance(value, torch.Tensor))]

    def _land(self) -> None:
        """Take over what was handed over. What was edited or loaded meanwhile is computed again, of the new values."""
        options, self._pending_options = self._pending_options, None
        flight, self._flight = self._flight, None
        if options is None:
            return
        self._worker.wait([] if flight is None else [flight.done])
        results = {} if flight is None else flight.done.result()
        pieces = self._with_state(PENDING)
        # All before the first is written: pieces of a group are views of one tensor, whose writes are counted together.
        holding = {owned.tensor for owned in pieces if flight is not None and self._holds(owned, flight)}
        for owned in pieces:
            shadow = results[owned.tensor] if owned.tensor in holding else self._step_now(owned, options)
            self._take_over(owned, shadow)
        self.num_taken += len(holding)
        self.num_redone += len(pieces) - len(holding)

    def _holds(self, owned: OwnedPiece, flight: _Flight) -> bool:
        """Whether the piece and its state are still what the step in the background read."""
        readings = flight.readings.get(owned.tensor)
        return readings is not None and readings.are_current(self._read_of(owned))

    def _take_over(self, owned: OwnedPiece, shadow: Shadow) -> None:
        """Give a piece its shadow's values and state, all but those of chosen columns."""
        chosen, state = self._chosen_elements(owned), self._inner.state[owned.tensor]
        assert chosen is not None
        shadow.tensor.index_copy_(0, chosen, owned.tensor.index_select(0, chosen))
        owned.tensor.copy_(shadow.tensor)
        for name, value in shadow.state.items():
            if _is_per_element(value, owned):
                value.index_copy_(0, chosen, state[name].index_select(0, chosen))
                state[name] = value
        del state[PENDING]

    # -------------------------------------------------------------- checkpoints

    def state_dict(self) -> dict[str, Any]:
        """Counts, and the hyper-parameters of an update that was handed over."""
        return {**self._rhythm.state_dict(), "pending_options": self._pending_options}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """See `Stepper`. Where the counts are not known, what was chosen and waits is forgotten."""
        if not state:
            for entries in self._inner.state.values():
                for name in _OURS:
                    entries.pop(name, None)
        self._rhythm.load_state_dict(state)
        self._pending_options, self._flight = state.get("pending_options"), None

    def nbytes(self) -> int:
        """Bytes of the copies that the update in the background works on."""
        if self._flight is None:
            return 0
        per_piece = [(owned.tensor, *self._state_of(owned).values()) for owned in self._with_state(PENDING)]
        return sum(each.nbytes for piece in per_piece for each in piece if isinstance(each, torch.Tensor))


@torch.no_grad()
def _step_copies(inner: Optimizer, rows: Sequence[_Row], options: Options) -> dict[nn.Parameter, Shadow]:
    """Copies of the pieces and their states, stepped."""
    shadows, work = {}, []
    for owned, param_group, state, grad in rows:
        shadow = shadows[owned.tensor] = Shadow(owned.tensor)
        shadow.fill(owned.tensor, state)
        shadow.tensor.grad = grad
        work.append(Apart(param_group, shadow.tensor, shadow.state))
    step_apart(inner, options, work)
    return shadows


def _part(owned: OwnedPiece, value: Any, elements: torch.Tensor) -> Any:
    """Some elements of an entry of the piece's state; of an entry that is none per element, a copy."""
    if _is_per_element(value, owned):
        return value.index_select(0, elements)
    return value.clone() if isinstance(value, torch.Tensor) else value


def _is_per_element(value: Any, owned: OwnedPiece) -> bool:
    return isinstance(value, torch.Tensor) and value.shape == owned.tensor.shape
