"""DeepSpeed's builders of native operations. Ours were built at install, so `load` builds nothing."""

from __future__ import annotations

from types import SimpleNamespace

from fullspeed.offload.aio_handle import AioHandle


class AsyncIOBuilder:
    """Gives access to files by `load().aio_handle(...)`."""

    NAME = "async_io"

    def is_compatible(self, verbose: bool = False) -> bool:
        """Whether it works here: always, by Python's threads if by nothing better."""
        del verbose
        return True

    def load(self, verbose: bool = False) -> SimpleNamespace:
        """The operation: an object with `aio_handle`."""
        del verbose
        return SimpleNamespace(aio_handle=AioHandle)
