"""Opening DeepSpeed's pickles without trust: tensors, plain data, and inert stand-ins for the few classes they name."""

from __future__ import annotations

import logging
import pathlib
import pickle
import zipfile
from collections.abc import Callable
from typing import Any

import torch

from fullspeed.base import env
from fullspeed.base.errors import CheckpointError
from fullspeed.base.log import log_dist

TRUST_VARIABLE = "FULLSPEED_TRUST_CHECKPOINTS"


class Record:
    """What an object of one of DeepSpeed's classes held; `vars` gives it. It has no behaviour."""

    @classmethod
    def of(cls, **values: Any) -> Record:
        """One that holds `values`."""
        made = cls()
        vars(made).update(values)
        return made


class Number(int):
    """A member of one of DeepSpeed's enumerations."""


class LossScaler(Record):
    """A loss scale that stays."""


class DynamicLossScaler(Record):
    """One that adapts."""


class FragmentAddress(Record):
    """A stretch of a flat tensor: `numel` and `start`."""


class SubparamShape(Record):
    """How a fused parameter was split."""


NAME_OF: dict[type, str] = {
    LossScaler: "deepspeed.runtime.fp16.loss_scaler.LossScaler",
    DynamicLossScaler: "deepspeed.runtime.fp16.loss_scaler.DynamicLossScaler",
    FragmentAddress: "deepspeed.utils.tensor_fragment.fragment_address",
    SubparamShape: "deepspeed.checkpoint.universal_checkpoint.SubparamShape",
    Number: "deepspeed.runtime.zero.config.ZeroStageEnum",
}
"""Each stand-in, and the class it stands for."""

_STAND_INS: list[Callable[..., Any] | tuple[Callable[..., Any], str]] = list(NAME_OF.items())


def load(path: pathlib.Path) -> Any:
    """What `torch.save` wrote to `path`, on the CPU. Tensors are mapped: what is not used is not read.

    Raises:
        CheckpointError: the file is missing or damaged, or holds a class that is not known to be harmless.
    """
    mmap = path.exists() and zipfile.is_zipfile(path)  # torch's old format cannot be mapped
    try:
        with torch.serialization.safe_globals(_STAND_INS):
            return torch.load(path, map_location="cpu", mmap=mmap, weights_only=True)
    except pickle.UnpicklingError as error:
        if not _is_trusted():
            raise CheckpointError(
                f"{path} is damaged, or holds objects whose loading can run code: {_first_line(error)}; if you trust "
                f"whoever wrote it, set {TRUST_VARIABLE}=1"
            ) from error
    except (OSError, RuntimeError, EOFError) as error:
        raise CheckpointError(f"{path} cannot be read: {_first_line(error)}") from error
    log_dist(f"{TRUST_VARIABLE} is set: {path} is unpickled, and may run any code", level=logging.WARNING)
    try:
        return torch.load(path, map_location="cpu", mmap=mmap, weights_only=False)
    except (pickle.UnpicklingError, ImportError, AttributeError, RuntimeError, EOFError) as error:
        raise CheckpointError(f"{path} cannot be read: {_first_line(error)}") from error


def _is_trusted() -> bool:
    return env.get(TRUST_VARIABLE) == "1"


def _first_line(error: Exception) -> str:
    return str(error).splitlines()[0] if str(error) else repr(error)
