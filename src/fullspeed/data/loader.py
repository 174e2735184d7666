"""The loader `initialize(training_data=...)` makes, which knows its position, and one that never ends."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch.utils.data import BatchSampler, DataLoader, Dataset, DistributedSampler, IterableDataset, Sampler


class ShareSampler(DistributedSampler[Any]):
    """This rank's share of the indices; one pass may begin in the middle, the next one has the order of a new epoch."""

    first = 0  # index into this rank's share at which the next pass begins

    def __iter__(self) -> Iterator[Any]:
        first, self.first = self.first, 0
        return itertools.islice(super().__iter__(), first, None)


class PositionedLoader(DataLoader[Any]):
    """A loader that can go on in the middle of a pass.

    The position is counted in samples over all ranks, so that it holds for another number of ranks or another batch
    size. Where it falls between two samples of a rank's share it is rounded down: some samples are seen twice, none is
    left out. The engine's own sampler skips indices; with a sampler of the caller's, or an iterable dataset, batches
    are drawn and dropped, from the random state in which the pass began.
    """

    def __init__(self, dataset: Dataset[Any], *, rank: int, world_size: int, **arguments: Any) -> None:
        super().__init__(dataset, **arguments)
        self._rank, self._world_size = rank, world_size
        self._num_samples = 0  # of this rank, in the present pass
        self._rng = torch.get_rng_state()  # when that began
        self._resumed: Iterator[Any] | None = None

    def __iter__(self) -> Any:
        return self._pass()

    def _pass(self) -> Iterator[Any]:
        batches, self._resumed = self._resumed, None
        if batches is None:
            self._num_samples, self._rng = 0, torch.get_rng_state()
            batches = super().__iter__()
        for batch in batches:
            self._num_samples += self.batch_size or 1
            yield batch
        self._num_samples = 0
        if isinstance(self.sampler, ShareSampler):
            self.sampler.set_epoch(self.sampler.epoch + 1)

    def state_dict(self) -> dict[str, Any]:
        """The position: tensors and numbers."""
        return {
            "epoch": self.sampler.epoch if isinstance(self.sampler, DistributedSampler) else 0,
            "num_samples": self._num_samples * self._world_size,
            "rng": {self._rank: self._rng},
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Have the next pass begin where the saved one was."""
        if isinstance(self.sampler, DistributedSampler):
            self.sampler.set_epoch(state["epoch"])
        self._resumed, self._num_samples = None, state["num_samples"] // self._world_size
        if not self._num_samples:
            return
        now = torch.get_rng_state()
        self._rng = state["rng"].get(self._rank, now)
        torch.set_rng_state(self._rng)
        if isinstance(self.sampler, ShareSampler):
            self.sampler.first = self._num_samples
            self._resumed = super().__iter__()
        else:
            self._resumed = super().__iter__()
            for _ in range(self._num_samples // (self.batch_size or 1)):
                next(self._resumed, None)
        torch.set_rng_state(now)


def make_loader(
    dataset: Dataset[Any],
    batch_size: int,
    rank: int,
    world_size: int,
    *,
    shuffle: bool = True,
    drop_last: bool = False,
    collate_fn: Callable[[list[Any]], Any] | None = None,
    sampler: Sampler[Any] | None = None,
    num_workers: int = 0,
    pin_memory: bool = False,
    seed: int = 0,
) -> PositionedLoader:
    """Batches of `batch_size` samples; the ranks take disjoint shares of equal size.

    Args:
        dataset: map-style, or iterable (which then shards itself).
        batch_size: samples per batch on one rank.
        rank: this rank among those with different data.
        world_size: number of those ranks.
        shuffle: draw samples in an order that all ranks derive from `seed` and the epoch.
        drop_last: leave out the last, smaller batch.
        collate_fn: makes a batch of samples.
        sampler: replaces the distributed sampler; a BatchSampler decides batches itself.
        num_workers: loader processes.
        pin_memory: copy batches to page-locked memory.
        seed: of the shuffle.
    """
    common: dict[str, Any] = {
        "collate_fn": collate_fn,
        "num_workers": num_workers,
        "pin_memory": pin_memory,
        "rank": rank,
        "world_size": world_size,
    }
    if isinstance(dataset, IterableDataset):
        return PositionedLoader(dataset, batch_size=batch_size, drop_last=drop_last, **common)
    if isinstance(sampler, BatchSampler):
        return PositionedLoader(dataset, batch_sampler=sampler, **common)
    if sampler is None:
        sampler = ShareSampler(dataset, world_size, rank, shuffle=shuffle, seed=seed, drop_last=drop_last)
    return PositionedLoader(dataset, batch_size=batch_size, sampler=sampler, drop_last=drop_last, **common)


class RepeatingLoader:
    """Iterates over a loader for ever; every pass over it is a new epoch of its sampler."""

    def __init__(self, loader: Any) -> None:
        self.loader = loader
        self.epoch = 0  # passes over it, of this object
        self._batches: Iterator[Any] = iter(loader)

    def __iter__(self) -> RepeatingLoader:
        return self

    def __len__(self) -> int:
        return len(self.loader)

    def __next__(self) -> Any:
        try:
            return next(self._batches)
        except StopIteration:
            self.epoch += 1
            sampler = getattr(self.loader, "sampler", None)
            if isinstance(sampler, DistributedSampler) and not isinstance(sampler, ShareSampler):
                sampler.set_epoch(self.epoch)
            self._batches = iter(self.loader)
        try:
            return next(self._batches)
        except StopIteration:
            raise ValueError("the loader yields no batches, so it cannot be repeated") from None
