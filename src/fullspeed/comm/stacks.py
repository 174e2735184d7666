"""Where a stack of calls stands: in the user's code, and whether inside communication."""

from __future__ import annotations

import pathlib
from collections.abc import Iterator
from types import FrameType

import torch

_PACKAGE = pathlib.Path(__file__).parents[1]
_TORCH = pathlib.Path(torch.__file__).parent
_LIBRARIES = (f"{_PACKAGE}/", f"{_TORCH}/")
_COMMUNICATION = (f"{_PACKAGE}/comm/", f"{_TORCH}/distributed/")


def user_line(frame: FrameType | None) -> str:
    """The innermost line that is neither FullSpeed's nor torch's, as `train.py:12 in main`."""
    found = next((one for one in _outwards(frame) if not one.f_code.co_filename.startswith(_LIBRARIES)), frame)
    if found is None:
        return "an unknown line"
    return f"{found.f_code.co_filename}:{found.f_lineno} in {found.f_code.co_name}"


def is_communicating(frame: FrameType | None) -> bool:
    """Whether the user's innermost line has called something that communicates."""
    for one in _outwards(frame):
        if one.f_code.co_filename.startswith(_COMMUNICATION):
            return True
        if not one.f_code.co_filename.startswith(_LIBRARIES):
            return False
    return False


def _outwards(frame: FrameType | None) -> Iterator[FrameType]:
    while frame is not None:
        yield frame
        frame = frame.f_back
