"""The values of one group that stay from step to step, whole or this rank's shard: as they are, or as codes.

Values may also wait in a file (`sharding/file_resident.py`); whoever reads or writes them in place wakes them first.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager

import torch
from typing_extensions import override

from fullspeed.comm import CodesGather, Gather, Pending
from fullspeed.kernels.format import BlockFormat
from fullspeed.kernels.quantize import dequantize, quantize
from fullspeed.sharding.links import GroupLinks


class Resident:
    """Resident values (n,) of a group: one tensor."""

    def __init__(self, values: torch.Tensor, links: GroupLinks) -> None:
        self._values = values
        self._exact: Gather = links.gather
        self._source = links.shard_source(links.unshard)

    @property
    def values(self) -> torch.Tensor:
        """The values, in the dtype of storage; to read only."""
        return self._values

    @contextmanager
    def editing(self) -> Iterator[torch.Tensor]:
        """The values, to be written. No rank may be reading them."""
        yield self._values

    @property
    def waits(self) -> bool:
        """Whether the values are in memory only while somebody needs them."""
        return False

    def begin_wake(self) -> None:
        """Start bringing the values into memory, where they are not and there is room."""

    def finish_read(self) -> None:
        """Bring the values into memory. They may be let go of again where others need their place."""

    def wake(self) -> torch.Tensor:
        """The values, in memory until `begin_sleep`; may be repeated, and each time needs its own `begin_sleep`."""
        return self._values

    def begin_sleep(self, *, changed: bool) -> None:
        """Nobody uses what `wake` returned any more: start to keep it, if it was changed, and let go of it."""

    def sleep(self) -> None:
        """Wait until the values are where they wait."""

    def refresh(self, master: torch.Tensor) -> None:
        """Set all values to `master`'s, rounded to the dtype of storage."""
        self._values.copy_(master)

    def part(self, start: int, numel: int) -> torch.Tensor:
        """A view of the values, or, where there is nothing to view, a tensor of that size on the meta device."""
        return self._values[start : start + numel]

    def trainable(self, make_values: Callable[[], torch.Tensor]) -> Resident:
        """The same values as one tensor that steps can write; `make_values` makes one where there is none."""
        del make_values
        return self

    def all_gather(self, full: torch.Tensor, *, exact: bool) -> Pending:
        """Fill `full` (N,) with all ranks' values. Collective. `exact`: where computing would make do with less."""
        return (self._exact if exact else self._source).all_gather(full, self._stored())

    def forget_copies(self) -> None:
        """The values change: the next gather reads them, not a copy made before. On all ranks alike."""
        self._source.forget()

    def nbytes(self) -> int:
        """Bytes of the values in memory."""
        return self._stored().nbytes

    def copies_nbytes(self) -> int:
        """Bytes of copies beside them."""
        return self._source.nbytes()

    def disk_nbytes(self) -> int:
        """Bytes of values that wait in a file."""
        return 0

    def _stored(self) -> torch.Tensor:
        return self._values


class QuantizedResident(Resident):
    """Values that are kept as codes and travel as codes; those of frozen parameters, which no step changes.

    What was rounded stays so: every rank and every reader, exact or not, sees the same values. A write rounds the block
    it falls into anew; other blocks keep their codes.
    """

    def __init__(self, values: torch.Tensor, form: BlockFormat, links: GroupLinks) -> None:
        self._numel, self._dtype, self._form, self._links = values.numel(), values.dtype, form, links
        self._codes = links.gather.empty(form.nbytes(values.numel()), torch.uint8, values.device)
        self._exact = CodesGather(links.gather, links.world_size, form)
        self._source = links.shard_source(self._exact)
        self._keep(values)

    @property
    @override
    def values(self) -> torch.Tensor:
        return self._read(self._dtype)

    @contextmanager
    @override
    def editing(self) -> Iterator[torch.Tensor]:
        # In fp32: rounded to 16 bits in between, a code could come back as its neighbour.
        values = self._read(torch.float32)
        yield values
        self._keep(values)

    @override
    def part(self, start: int, numel: int) -> torch.Tensor:
        return torch.empty(numel, dtype=self._dtype, device="meta")

    @override
    def trainable(self, make_values: Callable[[], torch.Tensor]) -> Resident:
        return Resident(make_values().copy_(self.values), self._links)

    @override
    def _stored(self) -> torch.Tensor:
        return self._codes

    def _read(self, dtype: torch.dtype) -> torch.Tensor:
        values = torch.empty((1, self._numel), dtype=dtype, device=self._codes.device)
        dequantize(self._codes.view(1, -1), values, self._form)
        return values[0]

    def _keep(self, values: torch.Tensor) -> None:
        quantize(values.view(1, 1, -1), self._codes.view(1, 1, -1), self._form)
