"""Runs a test function in several gloo ranks of this machine: `@ranks(2, 4)` and `run_ranks`.

Ranks are forked from a server that has already imported torch and FullSpeed, one for each pytest process, so
starting two costs about 0.1 s instead of the 10 s of two fresh imports. Every call has its own rendezvous
file, time limit and process groups: a failing or hanging rank ends all ranks of its call, and the first cause
is raised in the parent.
"""

from __future__ import annotations

import contextlib
import datetime
import faulthandler
import functools
import importlib
import importlib.util
import inspect
import multiprocessing
import os
import pathlib
import pickle
import signal
import sys
import tempfile
import time
import traceback
from collections.abc import Callable, Iterable, Mapping, Sequence
from multiprocessing.connection import Connection, wait
from multiprocessing.context import ForkServerProcess
from types import ModuleType
from typing import Any, NamedTuple

import pytest

ROOT = pathlib.Path(__file__).parents[1]
ORPHAN_GRACE_S = 15.0  # a rank whose parent vanished ends itself this long after the time limit


class RankError(AssertionError):
    """The first thing that went wrong in a rank, with that rank's traceback as text."""

    def __init__(self, rank: int, detail: str) -> None:
        self.rank, self.detail = rank, detail
        super().__init__(f"rank {rank} failed:\n{detail}")


class _Body(NamedTuple):
    """Where a rank finds the function to run."""

    module: str
    file: str
    qualname: str


class _Job(NamedTuple):
    """What one rank is told; crosses the process boundary."""

    body: _Body
    rank: int
    world_size: int
    arguments: bytes  # pickled (args, kwargs): plain pickle copies tensors instead of sharing their memory
    env: Mapping[str, str]
    folder: str
    timeout_s: float


class _Report(NamedTuple):
    """What one rank answers: pickled value, or the text of its error."""

    at_s: float  # time.monotonic(), comparable between processes of one machine
    value: bytes | None
    error: str | None


def ranks(*world_sizes: int, timeout_s: float = 60.0) -> Callable[[Callable[..., Any]], Callable[..., None]]:
    """Make a test of `fn(rank, world_size, **params)` that runs it in every rank of each world size.

    `params` are the function's other parameters: fixtures and parametrised values, which must pickle. The
    function must stand at module level. The world's process group is initialised before it is called.
    """

    def decorate(fn: Callable[..., Any]) -> Callable[..., None]:
        own = list(inspect.signature(fn).parameters.values())
        if [parameter.name for parameter in own[:2]] != ["rank", "world_size"]:
            raise TypeError(f"{fn.__qualname__} must take (rank, world_size, ...) to run under @ranks")

        @functools.wraps(fn)
        def test(world_size: int, **params: Any) -> None:
            __tracebackhide__ = True
            run_ranks(fn, world_size, timeout_s=timeout_s, **params)

        test.__signature__ = inspect.Signature(own[1:])  # type: ignore[attr-defined]
        test.ranks_body = fn  # type: ignore[attr-defined]
        names = [f"world{n}" for n in world_sizes]
        return pytest.mark.parametrize("world_size", world_sizes, ids=names)(test)

    return decorate


def run_ranks(fn: Callable[..., Any], world_size: int, *args: Any, timeout_s: float = 60.0, **kwargs: Any) -> list[Any]:
    """Call `fn(rank, world_size, *args, **kwargs)` in `world_size` ranks; returns their values in rank order.

    Raises RankError for the first rank that raises, dies or is not finished after `timeout_s`.
    """
    __tracebackhide__ = True
    body, arguments = _find_body(fn), pickle.dumps((args, kwargs))
    _start_server()
    with tempfile.TemporaryDirectory(prefix="ranks-") as folder:
        env = dict(os.environ)
        crew = _Crew(_Job(body, rank, world_size, arguments, env, folder, timeout_s) for rank in range(world_size))
        try:
            return [pickle.loads(value) for value in crew.gather(timeout_s)]
        finally:
            crew.end()


def _find_body(fn: Callable[..., Any]) -> _Body:
    fn = getattr(fn, "ranks_body", fn)
    if "<" in fn.__qualname__:
        raise TypeError(f"{fn.__qualname__} must stand at module level: ranks import it by name")
    return _Body(fn.__module__, inspect.getfile(fn), fn.__qualname__)


@functools.cache
def _context() -> multiprocessing.context.ForkServerContext:
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(["tests.preload"])
    return context


@functools.cache
def _start_server() -> None:
    """Start the server that ranks are forked from; imports only, so no accelerator is initialised in it."""
    from multiprocessing import forkserver

    before = {name: os.environ.get(name) for name in ("PYTHONPATH", "OMP_NUM_THREADS")}
    paths = [str(ROOT), str(ROOT / "src"), *filter(None, [before["PYTHONPATH"]])]
    os.environ.update(PYTHONPATH=os.pathsep.join(paths), OMP_NUM_THREADS="1")
    try:
        _context()
        forkserver.ensure_running()
    finally:
        for name, value in before.items():
            if value is None:
                del os.environ[name]
            else:
                os.environ[name] = value


class _Crew:
    """The ranks of one call, as seen from the parent."""

    def __init__(self, jobs: Iterable[_Job]) -> None:
        self.jobs: list[_Job] = []
        self.processes: list[ForkServerProcess] = []
        self.lines: list[Connection] = []
        for job in jobs:
            ours, theirs = _context().Pipe()
            process = _context().Process(target=_rank_main, args=(job, theirs), daemon=True, name=f"rank{job.rank}")
            process.start()
            theirs.close()
            self.jobs.append(job)
            self.processes.append(process)
            self.lines.append(ours)

    def gather(self, timeout_s: float) -> list[bytes]:
        """Wait for every rank's value. Ranks stay until all have answered, so none sees a peer vanish."""
        deadline, values = time.monotonic() + timeout_s, {}
        while len(values) < len(self.jobs):
            waiting = [line for rank, line in enumerate(self.lines) if rank not in values]
            ready = wait(waiting, max(0.0, deadline - time.monotonic()))
            if not ready:
                raise self._timed_out(timeout_s, sorted(set(range(len(self.jobs))) - set(values)))
            answers = {rank: self._hear(rank) for rank, line in enumerate(self.lines) if line in ready}
            failed = [(report.at_s, rank, report.error) for rank, report in answers.items() if report.error]
            if failed:
                _, rank, error = min(failed)
                raise RankError(rank, str(error))
            values.update({rank: report.value or b"" for rank, report in answers.items()})
        for line in self.lines:
            line.send("leave")
        for process in self.processes:
            process.join(10)
        return [values[rank] for rank in range(len(self.jobs))]

    def end(self) -> None:
        """Kill what still runs, each rank with the processes it started, by process id."""
        for process in self.processes:
            if process.is_alive() and process.pid is not None:
                _kill_group(process.pid)
            process.join(10)
            process.close()
        for line in self.lines:
            line.close()

    def _hear(self, rank: int) -> _Report:
        try:
            report: _Report = self.lines[rank].recv()
        except (EOFError, ConnectionResetError):
            process = self.processes[rank]
            process.join(10)
            error = f"the process ended without an answer, {_describe_exit(process.exitcode)}"
            # Time 0 puts it first: peers of a dead rank only complain that its connection closed.
            return _Report(0.0, None, error)
        return report

    def _timed_out(self, timeout_s: float, missing: Sequence[int]) -> RankError:
        """The failure that shows where each missing rank stands."""
        for rank in missing:
            pid = self.processes[rank].pid
            if pid is not None and self.processes[rank].is_alive() and _stack_file(self.jobs[rank]).exists():
                os.kill(pid, signal.SIGUSR1)
        time.sleep(0.5)
        stacks = [f"rank {rank} stands here:\n{_read(_stack_file(self.jobs[rank]))}" for rank in missing]
        names = ", ".join(map(str, missing))
        return RankError(missing[0], "\n".join([f"not finished after {timeout_s} s: ranks {names}", *stacks]))


def _rank_main(job: _Job, line: Connection) -> None:
    """The life of one rank: own process group, environment, process group, the test's body, answer, leave."""
    import torch

    from fullspeed.comm import destroy_process_group

    os.setsid()
    with open(_stack_file(job), "w") as stacks:
        faulthandler.register(signal.SIGUSR1, file=stacks, all_threads=False)
        faulthandler.dump_traceback_later(job.timeout_s + ORPHAN_GRACE_S, exit=True, file=stacks)
        _set_env(job)
        torch.set_num_threads(1)
        torch.manual_seed(0)
        try:
            fn = _load(job.body)
            args, kwargs = pickle.loads(job.arguments)
            _init_group(job)
            value = pickle.dumps(fn(job.rank, job.world_size, *args, **kwargs))
            line.send(_Report(time.monotonic(), value, None))
            _await_leave(line)
        except BaseException as error:
            line.send(_Report(time.monotonic(), None, _describe(error)))
            raise SystemExit(1) from None
        finally:
            destroy_process_group()


def _await_leave(line: Connection) -> None:
    """Stay until every rank has answered, or the parent is gone."""
    with contextlib.suppress(EOFError):
        line.recv()


def _set_env(job: _Job) -> None:
    os.environ.clear()
    os.environ.update(job.env)
    os.environ.update(
        RANK=str(job.rank),
        LOCAL_RANK=str(job.rank),
        WORLD_SIZE=str(job.world_size),
        LOCAL_WORLD_SIZE=str(job.world_size),
        LOCAL_SIZE=str(job.world_size),
        MASTER_ADDR="127.0.0.1",
        MASTER_PORT="29500",
        OMP_NUM_THREADS="1",
    )


def _init_group(job: _Job) -> None:
    from fullspeed.comm import init_distributed

    method = pathlib.Path(job.folder, "rendezvous").as_uri()
    timeout = datetime.timedelta(seconds=job.timeout_s)
    init_distributed(dist_backend="gloo", init_method=method, rank=job.rank, world_size=job.world_size, timeout=timeout)


def _load(body: _Body) -> Callable[..., Any]:
    """The function itself, without its decorator; a file outside sys.path is loaded by its path."""
    try:
        module = importlib.import_module(body.module)
    except ModuleNotFoundError:
        module = _load_file(body)
    if getattr(module, "__file__", None) != body.file:
        module = _load_file(body)
    found: Any = functools.reduce(getattr, body.qualname.split("."), module)
    return getattr(found, "ranks_body", found)


def _load_file(body: _Body) -> ModuleType:
    spec = importlib.util.spec_from_file_location(body.module, body.file)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[body.module] = module
    spec.loader.exec_module(module)
    return module


def _describe(error: BaseException) -> str:
    """Traceback text; a bare `assert` also shows the variables beside it, which pytest would have shown."""
    text = "".join(traceback.format_exception(error))
    if isinstance(error, AssertionError):
        frames = traceback.TracebackException.from_exception(error, capture_locals=True).stack
        shown = (f"  {name} = {value[:200]}" for name, value in ((frames and frames[-1].locals) or {}).items())
        text += "where\n" + "\n".join(shown)
    return text


def _describe_exit(code: int | None) -> str:
    if code is not None and code < 0:
        return f"killed by {signal.Signals(-code).name}"
    return f"exit code {code}"


def _stack_file(job: _Job) -> pathlib.Path:
    return pathlib.Path(job.folder, f"stack{job.rank}.txt")


def _read(path: pathlib.Path) -> str:
    return path.read_text() if path.exists() else "(not started)"


def _kill_group(pid: int) -> None:
    """Kill a rank and its children; a rank that has not made its own process group yet is killed alone."""
    try:
        if os.getpgid(pid) == pid:
            os.killpg(pid, signal.SIGKILL)
        else:
            os.kill(pid, signal.SIGKILL)
    except ProcessLookupError:
        return
