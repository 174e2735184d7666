"""Random numbers where some ranks must draw alike and others not: named states of the accelerator's generator.

Dropout inside a tensor-parallel layer must differ between the ranks that share the layer, dropout outside it must not.
The default generator serves the latter; the former runs inside `tracker.fork()`, which puts another state in its place.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager

import torch

from fullspeed.accelerator import get_accelerator
from fullspeed.base.errors import UsageError

TENSOR_PARALLEL = "model-parallel-rng"
_TENSOR_PARALLEL_OFFSET = 2718  # between the seed of all ranks and that of the first tensor-parallel rank


class RngTracker:
    """Named states of the accelerator's default generator (on a CPU-only machine the host's)."""

    def __init__(self) -> None:
        self._states: dict[str, torch.Tensor] = {}
        self._seeds: set[int] = set()

    def reset(self) -> None:
        """Forget all states."""
        self._states = {}
        self._seeds = set()

    def get_states(self) -> dict[str, torch.Tensor]:
        """All states by name; a later draw does not change what is returned."""
        return dict(self._states)

    def set_states(self, states: Mapping[str, torch.Tensor]) -> None:
        """Put back what `get_states` returned."""
        self._states = dict(states)

    def add(self, name: str, seed: int) -> None:
        """Begin a state at `seed`. Raises UsageError when the name or the seed is taken."""
        if seed in self._seeds:
            raise UsageError(f"random state {name!r} has seed {seed}: another state has it; choose another seed")
        if name in self._states:
            raise UsageError(f"random state {name!r} is there already; choose another name, or reset the tracker")
        accelerator = get_accelerator()
        outside = accelerator.get_rng_state()
        accelerator.manual_seed(seed)
        self._states[name] = accelerator.get_rng_state()
        self._seeds.add(seed)
        accelerator.set_rng_state(outside)

    @contextmanager
    def fork(self, name: str = TENSOR_PARALLEL) -> Iterator[None]:
        """Draw from the named state inside the block; outside, draws go on as if the block had not been."""
        if name not in self._states:
            known = ", ".join(map(repr, self._states)) or "none"
            raise UsageError(f"there is no random state {name!r} (there: {known}); add it with a seed first")
        accelerator = get_accelerator()
        outside = accelerator.get_rng_state()
        accelerator.set_rng_state(self._states[name])
        try:
            yield
        finally:
            self._states[name] = accelerator.get_rng_state()
            accelerator.set_rng_state(outside)


_tracker = RngTracker()


def get_rng_tracker() -> RngTracker:
    """The tracker of this process, whose states recomputations restore."""
    return _tracker


def seed_tensor_parallel(seed: int, tp_rank: int) -> None:
    """Seed the default generator alike on all ranks, and the tensor-parallel state apart on each.

    Args:
        seed: of the default generator; the tensor-parallel state begins at seed + 2718 + `tp_rank`.
        tp_rank: this rank's place among those that share its layers.
    """
    _tracker.reset()
    get_accelerator().manual_seed(seed)
    _tracker.add(TENSOR_PARALLEL, seed + _TENSOR_PARALLEL_OFFSET + tp_rank)


def reseed_tensor_parallel(seed: int, tp_rank: int) -> None:
    """Begin the tensor-parallel state anew at seed + 2718 + `tp_rank`; the default generator is left alone."""
    with _tracker.fork(TENSOR_PARALLEL):
        get_accelerator().manual_seed(seed + _TENSOR_PARALLEL_OFFSET + tp_rank)
