"""Versions, names of optimizers and stages, and small functions that programs written for DeepSpeed read from it."""

from __future__ import annotations

import enum
import importlib.util
from collections.abc import Callable, Sequence
from typing import Any, TypeVar

import torch
from packaging.version import Version

from fullspeed import __version__ as _fullspeed_version
from fullspeed.accelerator import get_accelerator
from fullspeed.base.log import logger, set_log_level, warn_once
from fullspeed.comm import get_rank, is_initialized
from fullspeed.compat.names import VERSION
from fullspeed.launcher.envfile import FILE_NAMES
from fullspeed.launcher.options import DEFAULT_HOSTFILE
from fullspeed.monitor.memory import memory_text
from fullspeed.optim.muon import flag_muon_params

__version__ = f"{VERSION}+fullspeed"
__version_major__, __version_minor__, __version_patch__ = Version(VERSION).release
__git_hash__, __git_branch__ = f"fullspeed-{_fullspeed_version}", "fullspeed"
HAS_TRITON = importlib.util.find_spec("triton") is not None

ADAGRAD_OPTIMIZER, ADAM_OPTIMIZER, ADAMW_OPTIMIZER = "adagrad", "adam", "adamw"
LAMB_OPTIMIZER, LION_OPTIMIZER, MUON_OPTIMIZER = "lamb", "lion", "muon"

DEEPSPEED_ENVIRONMENT_NAME = FILE_NAMES[0]
DLTS_HOSTFILE = DEFAULT_HOSTFILE


class ZeroStageEnum(enum.IntEnum):
    """ZeRO's stages by what they shard."""

    disabled = 0
    optimizer_states = 1
    gradients = 2
    weights = 3
    max_stage = 3


CallableT = TypeVar("CallableT", bound=Callable[..., Any])


def is_compile_supported() -> bool:
    """Whether engines can be compiled: always, with the torch this library requires."""
    return True


def required_torch_version(min_version: float | str | None = None, max_version: float | str | None = None) -> bool:
    """Whether torch's version lies within these, both included."""
    have = Version(Version(torch.__version__).base_version)
    is_old = min_version is not None and have < Version(str(min_version))
    is_new = max_version is not None and have > Version(str(max_version))
    return not (is_old or is_new)


def log_dist_once(message: str, ranks: Sequence[int] | None = None, level: int = 0) -> None:
    """Log a message on rank 0, once per process for the same text."""
    del ranks, level
    warn_once(message)


def memory_status(msg: str, print_rank: int = -1, reset_max: bool = False) -> None:
    """Log memory in use and its peak, on one rank, or with -1 on each; `reset_max` starts the peak anew before."""
    accelerator, rank = get_accelerator(), get_rank() if is_initialized() else 0
    if print_rank not in (-1, rank):
        return
    if reset_max:
        accelerator.reset_peak_memory_stats()
    logger.info("%s: rank %d, %s", msg, rank, memory_text(accelerator))


def set_optimizer_flags(config_class: Any, model: torch.nn.Module) -> None:
    """Where a `DeepSpeedConfig` names Muon, mark the parameters it orthogonalises; `initialize` does so by itself."""
    section = config_class.optimizer
    if section is not None and section.type.lower() == MUON_OPTIMIZER:
        flag_muon_params(model.named_parameters())


def set_log_level_from_string(log_level_str: str) -> None:
    """Set the level of messages shown: debug, info, warning, error or critical."""
    set_log_level(log_level_str)


def instrument_w_nvtx(func: CallableT) -> CallableT:
    """Decorator: mark calls of `func` as ranges for the device's profiler."""

    def wrapped(*args: Any, **kwargs: Any) -> Any:
        get_accelerator().range_push(func.__qualname__)
        try:
            return func(*args, **kwargs)
        finally:
            get_accelerator().range_pop()

    return wrapped  # type: ignore[return-value]
