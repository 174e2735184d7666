"""Checkpointed calls: their inputs are kept, what happens inside is forgotten and computed again in backward.

Training deep nets with sublinear memory cost: arXiv:1604.06174. Recomputation itself is torch.utils.checkpoint's; added
here are the places where inputs wait (`places.py`), the tracker's random states, and times.
"""

from __future__ import annotations

import itertools
import weakref
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any, TypeAlias

import torch
from torch.utils import checkpoint as torch_checkpoint
from torch.utils._pytree import TreeSpec, tree_flatten, tree_leaves, tree_unflatten

from fullspeed.activation.hooks import PassedOn, is_activation, top_hooks
from fullspeed.activation.places import HeldBytes, Place, Ticket
from fullspeed.activation.rng import RngTracker
from fullspeed.activation.times import Stopwatch

ContextFn: TypeAlias = Callable[[], tuple[AbstractContextManager[Any], AbstractContextManager[Any]]]


class Unit:
    """One checkpointed call. Called once in the forward; every later call is a recompute and draws what that drew."""

    def __init__(
        self, function: Callable[..., Any], args_spec: TreeSpec, number: int, tracker: RngTracker, watch: Stopwatch
    ) -> None:
        self._function, self._args_spec, self._number = function, args_spec, number
        self._tracker, self._watch = tracker, watch
        self._states: dict[str, torch.Tensor] | None = None  # the tracker's, as the forward found them
        self.output_spec: TreeSpec | None = None

    def __call__(self, *leaves: Any) -> tuple[Any, ...]:
        """All that the function's outputs contain, flat; `output_spec` is their structure."""
        if self._states is None:
            self._states = self._tracker.get_states()
            with self._watch.around(self._number, "forward"):
                return self._compute(leaves)
        present = self._tracker.get_states()
        self._tracker.set_states(self._states)
        try:
            with self._watch.around(self._number, "recompute"):
                return self._compute(leaves)
        finally:
            self._tracker.set_states(present)

    def _compute(self, leaves: tuple[Any, ...]) -> tuple[Any, ...]:
        args = tree_unflatten(list(leaves), self._args_spec)
        outputs, self.output_spec = tree_flatten(self._function(*args))
        return tuple(outputs)  # of whatever is nested, autograd functions see tensors in tuples only


class Checkpointer:
    """Runs functions as checkpointed calls whose inputs wait in `place`; None leaves them to autograd."""

    def __init__(self, place: Place | None, tracker: RngTracker, watch: Stopwatch) -> None:
        self.place, self.watch = place, watch
        self._tracker = tracker
        self._waiting: weakref.WeakSet[Unit] = weakref.WeakSet()  # units whose graph is alive
        self._numbers = itertools.count()

    def run(
        self,
        function: Callable[..., Any],
        *args: Any,
        reentrant: bool,
        context_fn: ContextFn = torch_checkpoint.noop_context_fn,
    ) -> Any:
        """`function(*args)`, of which only `args` are kept for backward.

        Args:
            function: called once more for each backward.
            args: anything; tensors inside lists, tuples and dicts are found, and need not require gradients.
            reentrant: let backward run a second autograd pass inside itself; else torch's saved-tensor hooks recompute.
                Reentrant autograd sees no gradient that does not pass through `args`, so where none of these requires
                one the call is not reentrant.
            context_fn: contexts around forward and recompute, as torch.utils.checkpoint takes them; not if reentrant.
        """
        if not torch.is_grad_enabled():
            return function(*args)
        leaves, spec = tree_flatten(args, is_leaf=_has_no_tensor)
        unit = self._begin_unit(function, spec)
        is_reentrant = reentrant and any(isinstance(leaf, torch.Tensor) and leaf.requires_grad for leaf in leaves)
        kind = {"use_reentrant": True} if is_reentrant else {"use_reentrant": False, "context_fn": context_fn}
        with self._keeping_inputs():
            outputs = torch_checkpoint.checkpoint(unit, *leaves, **kind)
        assert unit.output_spec is not None
        return tree_unflatten(list(outputs), unit.output_spec)

    def held_bytes(self) -> HeldBytes:
        """Bytes of inputs that wait in this checkpointer's place; those left to autograd are not counted."""
        return HeldBytes(0, 0) if self.place is None else self.place.held_bytes()

    def _begin_unit(self, function: Callable[..., Any], spec: TreeSpec) -> Unit:
        if not self._waiting:
            self._numbers = itertools.count()
            self.watch.begin_pass()
        unit = Unit(function, spec, next(self._numbers), self._tracker, self.watch)
        self._waiting.add(unit)
        return unit

    def _keeping_inputs(self) -> AbstractContextManager[None]:
        return nullcontext() if self.place is None else _keeping_in(self.place)


def _has_no_tensor(value: Any) -> bool:
    """Whether `value` goes to the function as it is, so that a list to append to, say, stays the caller's own."""
    return not any(isinstance(leaf, torch.Tensor) for leaf in tree_leaves(value))


@contextmanager
def _keeping_in(place: Place) -> Iterator[None]:
    """While one call begins: its saved inputs go to `place`. Parameters and integers stay where they are."""
    below, positions = top_hooks(), itertools.count()

    def pack(tensor: torch.Tensor) -> Ticket | PassedOn:
        if not is_activation(tensor):
            return PassedOn(tensor, below)
        with torch.no_grad():
            return place.put(tensor.detach(), next(positions))

    def unpack(packed: Ticket | PassedOn) -> torch.Tensor:
        return packed.fetch() if isinstance(packed, Ticket) else packed.unpack()

    with torch.autograd.graph.saved_tensors_hooks(pack, unpack):
        yield
