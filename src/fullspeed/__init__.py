"""FullSpeed: train and serve models larger than the hardware, from a DeepSpeed configuration."""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

__version__ = "0.1.0"

if TYPE_CHECKING:
    from fullspeed.base.errors import (
        CheckpointError,
        CommError,
        ConfigError,
        FullSpeedError,
        LossScaleError,
        UsageError,
    )
    from fullspeed.comm import init_distributed
    from fullspeed.config import load_config
    from fullspeed.engine.arguments import add_config_arguments
    from fullspeed.engine.engine import Engine
    from fullspeed.engine.initialize import initialize

# Public name -> module that defines it. Resolved on first use, so that `import fullspeed` costs next to
# nothing.
_PUBLIC = {
    "CheckpointError": "fullspeed.base.errors",
    "CommError": "fullspeed.base.errors",
    "ConfigError": "fullspeed.base.errors",
    "Engine": "fullspeed.engine.engine",
    "FullSpeedError": "fullspeed.base.errors",
    "LossScaleError": "fullspeed.base.errors",
    "UsageError": "fullspeed.base.errors",
    "add_config_arguments": "fullspeed.engine.arguments",
    "init_distributed": "fullspeed.comm",
    "initialize": "fullspeed.engine.initialize",
    "load_config": "fullspeed.config",
}

__all__ = [
    "CheckpointError",
    "CommError",
    "ConfigError",
    "Engine",
    "FullSpeedError",
    "LossScaleError",
    "UsageError",
    "__version__",
    "add_config_arguments",
    "init_distributed",
    "initialize",
    "load_config",
]


_MODULES = ("checkpointing", "linear", "zero")  # public modules, imported on first use as well


def __getattr__(name: str) -> Any:
    if name in _MODULES:
        return importlib.import_module(f"fullspeed.{name}")
    if name in _PUBLIC:
        return getattr(importlib.import_module(_PUBLIC[name]), name)
    raise AttributeError(f"module 'fullspeed' has no attribute {name!r}")


def __dir__() -> list[str]:
    return sorted(__all__)
