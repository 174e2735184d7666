"""Which environment variables go to every node: some families of names, and those of the user's files. No torch."""

from __future__ import annotations

import pathlib
from collections.abc import Mapping, Sequence

from fullspeed.base.errors import UsageError

FILE_NAMES = (".deepspeed_env", ".fullspeed_env")
FILE_VARIABLE = "DS_ENV_FILE"
PREFIXES = (
    "DEEPSPEED", "DS_", "FULLSPEED", "GLOO", "HCCL", "MLFLOW", "MV2", "NCCL", "PYTHON", "RCCL", "TORCH", "UCX", "ZE_",
)  # fmt: skip


def exports(environment: Mapping[str, str], folders: Sequence[pathlib.Path]) -> dict[str, str]:
    """Variables that nodes get on top of their own.

    Args:
        environment: of the launching process.
        folders: where environment files may lie; a later one's values win.

    Raises:
        UsageError: a line of a file is not KEY=VALUE.
    """
    passed = {name: value for name, value in environment.items() if name.startswith(PREFIXES)}
    return passed | read_files(environment, folders)


def read_files(environment: Mapping[str, str], folders: Sequence[pathlib.Path]) -> dict[str, str]:
    """Variables of the environment files in `folders`. `DS_ENV_FILE` names another file, or its path."""
    named = environment.get(FILE_VARIABLE)
    values: dict[str, str] = {}
    for folder in folders:
        for path in (folder / name for name in ([named] if named else FILE_NAMES)):
            if path.is_file():
                values |= parse_file(path.read_text(), str(path))
    return values


def parse_file(text: str, path: str) -> dict[str, str]:
    """Variables from lines KEY=VALUE; the value is taken as it stands, blank lines and `#` lines say nothing."""
    values = {}
    for number, line in enumerate(text.splitlines(), 1):
        if not line.strip() or line.lstrip().startswith("#"):
            continue
        name, equals, value = line.partition("=")
        if not equals or not name.strip().isidentifier():
            raise UsageError(f"line {number} of environment file {path} is {line!r}; write KEY=VALUE")
        values[name.strip()] = value
    return values
