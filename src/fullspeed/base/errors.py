"""Every error FullSpeed raises on purpose, so that callers can catch a kind and users can read a remedy."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple


class FullSpeedError(Exception):
    """Root of FullSpeed's own errors."""


class ConfigFault(NamedTuple):
    """One thing wrong with a configuration."""

    path: str  # full dotted path, e.g. "zero_optimization.stage"
    value: Any
    rule: str  # what must hold, e.g. "choose 0, 1, 2 or 3"
    fix: str = ""  # what to do about it, when the rule alone does not say

    def __str__(self) -> str:
        fix = f"; {self.fix}" if self.fix else ""
        return f"{self.path} is {self.value!r}: {self.rule}{fix}"


class ConfigError(FullSpeedError, ValueError):
    """The configuration is wrong. Carries every fault found, not only the first."""

    def __init__(self, faults: Sequence[ConfigFault] | str) -> None:
        self.faults: tuple[ConfigFault, ...] = () if isinstance(faults, str) else tuple(faults)
        if isinstance(faults, str):
            text = faults
        elif len(self.faults) == 1:
            text = str(self.faults[0])
        else:
            lines = "\n".join(f"  - {fault}" for fault in self.faults)
            text = f"{len(self.faults)} faults in the configuration:\n{lines}"
        super().__init__(text)


class UsageError(FullSpeedError, RuntimeError):
    """The API was called in a way that cannot work; the message says what to call instead."""


class CommError(FullSpeedError, RuntimeError):
    """A rank could not be reached, or ranks disagree about what to exchange."""


class CheckpointError(FullSpeedError, RuntimeError):
    """A checkpoint is missing, torn, or does not fit the engine that loads it."""


class LossScaleError(FullSpeedError, RuntimeError):
    """The dynamic loss scale is at its minimum and gradients still overflow."""


class UpdateError(FullSpeedError, RuntimeError):
    """An optimizer step that ran in the background of a training failed."""


class StorageError(FullSpeedError, RuntimeError):
    """A file that tensors are offloaded to cannot be read or written."""
