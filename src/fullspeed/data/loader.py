"""The loader `initialize(training_data=...)` makes, and one that never ends."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

from torch.utils.data import BatchSampler, DataLoader, Dataset, DistributedSampler, IterableDataset, Sampler


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
) -> DataLoader[Any]:
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
    common: dict[str, Any] = {"collate_fn": collate_fn, "num_workers": num_workers, "pin_memory": pin_memory}
    if isinstance(dataset, IterableDataset):
        return DataLoader(dataset, batch_size=batch_size, drop_last=drop_last, **common)
    if isinstance(sampler, BatchSampler):
        return DataLoader(dataset, batch_sampler=sampler, **common)
    if sampler is None:
        sampler = DistributedSampler(dataset, world_size, rank, shuffle=shuffle, seed=seed, drop_last=drop_last)
    return DataLoader(dataset, batch_size=batch_size, sampler=sampler, drop_last=drop_last, **common)


class RepeatingLoader:
    """Iterates over a loader for ever; every pass over it is a new epoch of its sampler."""

    def __init__(self, loader: Any) -> None:
        self.loader = loader
        self.epoch = 0
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
            if isinstance(sampler, DistributedSampler):
                sampler.set_epoch(self.epoch)
            self._batches = iter(self.loader)
        try:
            return next(self._batches)
        except StopIteration:
            raise ValueError("the loader yields no batches, so it cannot be repeated") from None
