"""Settings of checkpointing are the process's: every test leaves the defaults behind."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from fullspeed import checkpointing


@pytest.fixture(autouse=True)
def _defaults() -> Iterator[None]:
    yield
    checkpointing.unconfigure()
    checkpointing.get_cuda_rng_tracker().reset()
