"""Runs a job's ranks on this host and reports how it ended."""

from __future__ import annotations

import contextlib
import datetime
import logging
import os
import pathlib
import socket
import sys
import tempfile
from collections.abc import Iterator, Sequence
from typing import NamedTuple

from fullspeed.accelerator import get_accelerator
from fullspeed.base import env
from fullspeed.base.errors import UsageError
from fullspeed.base.log import LEVELS, logger, set_log_level
from fullspeed.comm.elastic import RanksFailedError, RanksInterruptedError, run_ranks
from fullspeed.launcher.cause import RankEnd, find_first_cause
from fullspeed.launcher.options import LaunchOptions
from fullspeed.launcher.rank import MODULE, PROGRAM, SCRIPT, FailureRecord, RankOrder
from fullspeed.launcher.slots import choose_slots


class Outcome(NamedTuple):
    """How a job ended."""

    exit_code: int
    cause: str  # empty when nothing failed


def launch(options: LaunchOptions) -> Outcome:
    """Run the job and wait for it. Raises UsageError when it cannot be started as asked."""
    if not (options.module or options.no_python) and not pathlib.Path(options.target).is_file():
        raise UsageError(f"no script {options.target!r} in {pathlib.Path.cwd()}")
    set_log_level(options.log_level)
    num_ranks = _place_ranks(options)
    port = options.master_port or find_free_port(options.master_addr)
    env.export_default("OMP_NUM_THREADS", str(max(1, _num_cores() // num_ranks)))
    with _scratch() as folder, _pid_file(options.save_pid):
        command = _rank_command(options, folder)
        logger.info(f"starting {num_ranks} ranks, meeting at {options.master_addr}:{port}: {command}")
        try:
            run_ranks(command, num_ranks, options.master_addr, port, folder, _agent_level(options.log_level))
        except RanksInterruptedError as stop:
            return Outcome(128 + stop.signal_number, str(stop))
        except RanksFailedError as failed:
            ends = [RankEnd(*end) for end in failed.exits]
            cause = find_first_cause(ends, FailureRecord.load_all(folder))
            return Outcome(cause.exit_code, cause.text)
    return Outcome(0, "")


def find_free_port(address: str) -> int:
    """A port of `address` that nobody listens on now. Raises UsageError when `address` is not this host's."""
    with socket.socket() as probe:
        try:
            probe.bind((address, 0))
        except OSError as error:
            raise UsageError(f"--master_addr is {address!r}, not an address of this host: {error}") from None
        return int(probe.getsockname()[1])


def _place_ranks(options: LaunchOptions) -> int:
    """Number of ranks; limits which devices they see when the user chose some."""
    accelerator = get_accelerator()
    hosts = {"localhost", "127.0.0.1", socket.gethostname()}
    if accelerator.device_name() == "cpu":
        # Ranks share a CPU, so their number is not limited by it; filters choose among cores only to count.
        if not (options.include or options.exclude):
            return options.num_accelerators or 1
        return len(choose_slots(_num_cores(), options.num_accelerators, options.include, options.exclude, hosts))
    count = accelerator.device_count()
    slots = choose_slots(count, options.num_accelerators, options.include, options.exclude, hosts)
    for name in accelerator.visible_devices_envs():
        # Slots count the devices the user lets us see, whatever those are called.
        visible = (env.get(name) or ",".join(map(str, range(count)))).split(",")
        if options.include or options.exclude:
            env.export({name: ",".join(visible[slot] for slot in slots)})
    return len(slots)


def _rank_command(options: LaunchOptions, record_dir: str) -> Sequence[str]:
    kind = PROGRAM if options.no_python else MODULE if options.module else SCRIPT
    log_prefix = None
    if options.each_rank_log is not None:
        pathlib.Path(options.each_rank_log).mkdir(parents=True, exist_ok=True)
        stamp = datetime.datetime.now().strftime("%Y%m%d%H%M%S")
        log_prefix = str(pathlib.Path(options.each_rank_log).resolve() / f"{stamp}_rank")
    order = RankOrder(kind, not options.no_local_rank, record_dir, log_prefix)
    rank_program = [sys.executable, "-u", "-m", "fullspeed.launcher.rank"]
    return [*rank_program, order.to_word(), options.target, *options.target_args]


def _num_cores() -> int:
    """Cores this process may run on."""
    return len(os.sched_getaffinity(0)) if sys.platform == "linux" else os.cpu_count() or 1


def _agent_level(log_level: str) -> int:
    """The agent repeats what the first cause says better, so it speaks only when debugging."""
    return LEVELS[log_level] if log_level == "debug" else logging.CRITICAL


@contextlib.contextmanager
def _scratch() -> Iterator[str]:
    """A folder for this job's records."""
    with tempfile.TemporaryDirectory(prefix="fullspeed-") as folder:
        yield folder


@contextlib.contextmanager
def _pid_file(is_wanted: bool) -> Iterator[None]:
    """While the job runs, a file named after this process and holding its id."""
    path = pathlib.Path(tempfile.gettempdir(), f"{os.getpid()}.deepspeed")
    if is_wanted:
        path.write_text(str(os.getpid()))
    try:
        yield
    finally:
        if is_wanted:
            path.unlink(missing_ok=True)
