"""What a process notes for its launcher, who reads it when the process can no longer speak.

The launcher names a folder in an environment variable; without one, noting does nothing. Files, R being the rank:
`step<R>` holds how many updates were made, `saves<R>` says that the rank answers a signal by saving first.
"""

from __future__ import annotations

import functools
import os
import pathlib

from fullspeed.base import env

FOLDER_VARIABLE = "FULLSPEED_RECORD_DIR"
_WIDTH = 20  # digits of any 64-bit number: a later note covers the earlier one
_steps: list[int] = [0]


def note_step(num_updates: int) -> None:
    """Note that so many updates are behind this process. One system call under a launcher."""
    _steps[0] = num_updates
    descriptor = _step_file()
    if descriptor is not None:
        os.pwrite(descriptor, f"{num_updates:<{_WIDTH}}".encode(), 0)


def last_step() -> int:
    """The updates this process noted last; 0 before the first."""
    return _steps[0]


def note_saves() -> None:
    """Note that this process answers a signal by saving, so it needs time to leave."""
    folder = env.get(FOLDER_VARIABLE)
    if folder is not None and pathlib.Path(folder).is_dir():
        pathlib.Path(folder, f"saves{_rank()}").touch()


def forget_notes(folder: str, rank: int) -> None:
    """Remove what an earlier process of this rank noted."""
    for name in ("step", "saves"):
        pathlib.Path(folder, f"{name}{rank}").unlink(missing_ok=True)


def noted_steps(folder: str) -> dict[int, int]:
    """By rank, how many updates it noted; ranks without a step are absent."""
    found = {int(path.name.removeprefix("step")): path.read_text() for path in pathlib.Path(folder).glob("step*")}
    return {rank: int(text) for rank, text in sorted(found.items()) if text.strip()}


def is_any_saving(folder: str) -> bool:
    """Whether a rank answers a signal by saving."""
    return any(pathlib.Path(folder).glob("saves*"))


@functools.cache
def _step_file() -> int | None:
    """Descriptor of this process's step file; None without a launcher, or after it has gone."""
    folder = env.get(FOLDER_VARIABLE)
    if folder is None or not pathlib.Path(folder).is_dir():
        return None
    return os.open(pathlib.Path(folder, f"step{_rank()}"), os.O_WRONLY | os.O_CREAT, 0o644)


def _rank() -> int:
    return env.get_int("RANK", 0) or 0
