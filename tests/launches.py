"""Runs the `fullspeed` command as tests need it: from an empty folder, without waiting for torch to load."""

from __future__ import annotations

import os
import pathlib
import sys
import time
from collections.abc import Sequence
from typing import NamedTuple

from tests.ranks import run_ranks

SRC = pathlib.Path(__file__).parents[1] / "src"


class Ended(NamedTuple):
    """A finished launcher."""

    code: int
    out: str
    err: str
    at_s: float  # time.monotonic() when it had finished


def launch(words: Sequence[str], folder: pathlib.Path, **variables: str) -> Ended:
    """Run `fullspeed` with those words in `folder`, whose programs come first in the path."""
    ((code, at_s),) = run_ranks(_run, 1, list(words), folder, variables, timeout_s=120)
    return Ended(code, (folder / "out.txt").read_text(), (folder / "err.txt").read_text(), at_s)


def _run(rank, world_size, words, folder, variables):
    """Run the command in this process, whose torch is loaded already, with its output in files."""
    from fullspeed.cli.main import main

    os.chdir(folder)
    os.environ.update(variables, PATH=f"{folder}:{os.environ['PATH']}", PYTHONPATH=str(SRC))
    del os.environ["OMP_NUM_THREADS"]
    for descriptor, name in ((1, "out.txt"), (2, "err.txt")):
        os.dup2(os.open(name, os.O_WRONLY | os.O_CREAT | os.O_TRUNC), descriptor)
    code = main(words)
    sys.stdout.flush()
    sys.stderr.flush()
    return code, time.monotonic()
