"""First code of every rank: puts it in its place, runs the user's script, and records why it failed.

Started by the launcher as `python -m fullspeed.launcher.rank ORDER TARGET [words]`. Imports no torch.
"""

from __future__ import annotations

import ctypes
import faulthandler
import json
import os
import pathlib
import runpy
import signal
import sys
import time
import traceback
import types
from collections.abc import Sequence
from typing import NamedTuple

from fullspeed.base import env, progress

SCRIPT, MODULE, PROGRAM = "script", "module", "program"
SAVE_S = 600  # ranks that answer a signal by saving may take so long; a second signal ends them at once
LEAVE_S = 10  # between an exception that reached the top and the end of the process, whatever still holds it
_PR_SET_PDEATHSIG = 1  # from linux/prctl.h


class RankOrder(NamedTuple):
    """What the launcher tells every rank of a job."""

    kind: str  # SCRIPT, MODULE or PROGRAM
    passes_local_rank: bool
    record_dir: str  # where a failing rank leaves its record
    log_prefix: str | None  # output goes to f"{log_prefix}{rank}.log" instead of the launcher's
    cores: list[list[int]] | None = None  # by local rank, the cores it may run on; None: all of the launcher's

    def to_word(self) -> str:
        """One command-line word."""
        return json.dumps(self)

    @classmethod
    def from_word(cls, word: str) -> RankOrder:
        """The order that `to_word` wrote."""
        return cls(*json.loads(word))


class FailureRecord(NamedTuple):
    """Why a rank's script ended with an exception."""

    rank: int
    at_ns: int  # time.time_ns() when it was raised to the top, before any peer could notice
    text: str  # traceback without the launcher's frames

    def save(self, folder: str) -> None:
        """Write the record as one file of `folder`."""
        self._path(folder, self.rank).write_text(json.dumps(self))

    @classmethod
    def remove(cls, folder: str, rank: int) -> None:
        """Forget the record of a rank's earlier process."""
        cls._path(folder, rank).unlink(missing_ok=True)

    @staticmethod
    def _path(folder: str, rank: int) -> pathlib.Path:
        return pathlib.Path(folder, f"rank{rank}.json")

    @classmethod
    def load_all(cls, folder: str) -> list[FailureRecord]:
        """All records in `folder`, by rank."""
        return sorted(cls(*json.loads(path.read_text())) for path in pathlib.Path(folder).glob("rank*.json"))


def main(argv: Sequence[str]) -> None:
    """Run the target named in `argv`, as if Python had been started on it."""
    order, target, words = RankOrder.from_word(argv[1]), argv[2], list(argv[3:])
    rank = env.get_int("RANK", 0) or 0
    _end_with_launcher()
    _export_identity()
    FailureRecord.remove(order.record_dir, rank)
    progress.forget_notes(order.record_dir, rank)
    env.export({progress.FOLDER_VARIABLE: order.record_dir})
    if order.log_prefix is not None:
        _redirect_output(f"{order.log_prefix}{rank}.log")
    if order.cores is not None:
        _bind(order.cores[env.get_int("LOCAL_RANK", 0) or 0])
    if order.passes_local_rank:
        words.insert(0, f"--local_rank={env.get('LOCAL_RANK', '0')}")
    if order.kind == PROGRAM:
        os.execvp(target, [target, *words])
    _record_failures(order.record_dir, rank)
    sys.argv = [target, *words]
    if order.kind == MODULE:
        runpy.run_module(target, run_name="__main__", alter_sys=True)
    else:
        _run_script(target)


def _end_with_launcher() -> None:
    """Have the system kill this process if the launcher dies without having ended it."""
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)


def _export_identity() -> None:
    """Names of the DeepSpeed launcher beside torchrun's."""
    env.export(
        {
            "LOCAL_SIZE": env.get("LOCAL_WORLD_SIZE", "1") or "1",
            "CROSS_RANK": env.get("GROUP_RANK", "0") or "0",
            "CROSS_SIZE": env.get("GROUP_WORLD_SIZE", "1") or "1",
        }
    )


def _bind(cores: Sequence[int]) -> None:
    """Run on these cores only, with one thread on each; memory then comes from the nearest bank by itself."""
    os.sched_setaffinity(0, cores)
    env.export({"OMP_NUM_THREADS": str(len(cores))})


def _redirect_output(path: str) -> None:
    """Send stdout and stderr, of this process and all it starts, to the file."""
    descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o644)
    os.dup2(descriptor, 1)
    os.dup2(descriptor, 2)
    os.close(descriptor)


def _run_script(path: str) -> None:
    """Execute the file as `__main__` in a module that stays, so pickling and exit handlers work as usual."""
    source = pathlib.Path(path).read_bytes()
    module = types.ModuleType("__main__")
    module.__dict__.update(__file__=path, __builtins__=__builtins__, __cached__=None)
    sys.modules["__main__"] = module
    sys.path[0] = str(pathlib.Path(path).resolve().parent)
    exec(compile(source, path, "exec"), module.__dict__)


def _record_failures(folder: str, rank: int) -> None:
    """Leave a record when an exception reaches the top, before this process ends and its peers notice."""

    def hook(kind: type[BaseException], error: BaseException, trace: types.TracebackType | None) -> None:
        at_ns, own = time.time_ns(), (__file__, runpy.__file__, "<frozen runpy>")
        while trace is not None and trace.tb_frame.f_code.co_filename in own:
            trace = trace.tb_next
        if not issubclass(kind, KeyboardInterrupt):
            text = "".join(traceback.format_exception(kind, error, trace))
            FailureRecord(rank, at_ns, text).save(folder)
            # Threads, exit handlers and communicators may hold a process for ever whose peers are gone.
            faulthandler.dump_traceback_later(LEAVE_S, exit=True, file=sys.__stderr__ or 2)
        sys.__excepthook__(kind, error.with_traceback(trace), trace)

    sys.excepthook = hook


if __name__ == "__main__":
    main(sys.argv)
