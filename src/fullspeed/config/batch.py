"""Batch arithmetic: samples per update = micro batch * accumulation steps * ranks. Pure integers."""

from __future__ import annotations

from typing import NamedTuple

from fullspeed.base.errors import ConfigError, ConfigFault, UsageError

BATCH_KEYS = ("train_batch_size", "train_micro_batch_size_per_gpu", "gradient_accumulation_steps")


class Batch(NamedTuple):
    """A consistent set of batch sizes, in samples."""

    train_batch_size: int  # per update, over all ranks
    micro_batch_size: int  # per forward, on one rank
    grad_accum_steps: int  # forwards per update, on one rank
    world: int  # data-parallel ranks


class BatchRequest(NamedTuple):
    """What the configuration says about batch sizes; None is unsaid."""

    train_batch_size: int | None
    micro_batch_size: int | None
    grad_accum_steps: int | None

    def explain(self, world: int, source: str) -> str:
        """All four numbers and where the world size came from, for an error text."""
        said = zip(BATCH_KEYS, self, strict=True)
        return ", ".join(f"{key} {value}" for key, value in said) + f", world size {world} (from {source})"


def solve_batch(request: BatchRequest, world: int, source_of_world: str) -> Batch:
    """Fill in what `request` leaves open.

    Args:
        request: the three batch keys.
        world: data-parallel ranks.
        source_of_world: where that number came from, in words; only for error texts.

    Raises:
        ConfigError: no key fixes the batch, a division leaves a rest, or the three do not fit together.
        UsageError: `world` is not positive.

    >>> solve_batch(BatchRequest(8, None, None), 2, "WORLD_SIZE")
    Batch(train_batch_size=8, micro_batch_size=4, grad_accum_steps=1, world=2)
    """
    if world < 1:
        raise UsageError(f"the data-parallel world size is {world} (from {source_of_world}); it must be positive")
    train, micro, accum = request
    if train is None and micro is None:
        raise _error(request, world, source_of_world, 0, "no key says how many samples a step has",
                     "set train_batch_size or train_micro_batch_size_per_gpu")  # fmt: skip
    if train is None:
        assert micro is not None
        accum = accum or 1
        return Batch(micro * accum * world, micro, accum, world)
    if train % world:
        rule = f"train_batch_size {train} cannot be split over {world} ranks"
        raise _error(request, world, source_of_world, 0, rule, f"use a multiple of {world}")
    per_rank = train // world
    if micro is not None and accum is not None:
        if micro * accum != per_rank:
            rule = f"{micro} * {accum} * {world} = {micro * accum * world}, not {train}"
            raise _error(request, world, source_of_world, 0, rule, "remove one of the three keys or make them agree")
        return Batch(train, micro, accum, world)
    known_key, known = (1, micro) if micro is not None else (2, accum if accum is not None else 1)
    if per_rank % known:
        rule = f"the {per_rank} samples of each rank cannot be split by {BATCH_KEYS[known_key]} {known}"
        raise _error(request, world, source_of_world, known_key, rule, f"use a divisor of {per_rank}")
    other = per_rank // known
    return Batch(train, known, other, world) if known_key == 1 else Batch(train, other, known, world)


def _error(request: BatchRequest, world: int, source: str, key: int, rule: str, fix: str) -> ConfigError:
    text = f"{rule} ({request.explain(world, source)})"
    return ConfigError([ConfigFault(BATCH_KEYS[key], request[key], text, fix)])
