"""Runs one node's ranks of a job, in step with the job's other nodes, and reports how the job ended."""

from __future__ import annotations

import contextlib
import datetime
import json
import logging
import os
import pathlib
import platform
import signal
import sys
import tempfile
import threading
from collections.abc import Iterator, Sequence
from typing import NamedTuple

from fullspeed.accelerator import get_accelerator
from fullspeed.base import env, progress
from fullspeed.base.errors import CommError, UsageError
from fullspeed.base.log import LEVELS, logger, set_log_level
from fullspeed.comm.elastic import (
    Elasticity,
    Meeting,
    RanksFailedError,
    RanksInterruptedError,
    interface_towards,
    run_ranks,
)
from fullspeed.comm.node_watch import NodeWatch, Place, meet
from fullspeed.comm.rank_agent import END_S, Ending, RankExit
from fullspeed.launcher.cause import RankEnd, Whereabouts, find_first_cause
from fullspeed.launcher.cores import share_cores
from fullspeed.launcher.order import NodeOrder
from fullspeed.launcher.rank import SAVE_S, SCRIPT, FailureRecord, RankOrder

_MEET_S = 600.0  # file systems of large clusters can be slow to give out torch
_MAX_RESTARTS = 100


class Outcome(NamedTuple):
    """How a job ended."""

    exit_code: int
    cause: str  # empty when nothing failed
    is_known_to_first: bool = False  # whether the first node has the same cause to tell


class NodeReport(NamedTuple):
    """How one node ended, as the others hear it."""

    host: str
    reason: str  # why it ended, when none of its ranks is to blame
    ends: list[RankEnd]
    records: list[FailureRecord]
    steps: list[tuple[int, int]]  # (rank, updates behind it) of ranks that train

    @classmethod
    def from_text(cls, text: str) -> NodeReport:
        """The report that `json.dumps` wrote."""
        host, reason, ends, records, steps = json.loads(text)
        ends, records = [RankEnd(*end) for end in ends], [FailureRecord(*record) for record in records]
        return cls(host, reason, ends, records, [tuple(step) for step in steps])

    @classmethod
    def of_ranks(cls, host: str, reason: str, exits: Sequence[RankExit], folder: str) -> NodeReport:
        """The report of ranks that ended so, with what they left in `folder`."""
        steps = list(progress.noted_steps(folder).items())
        return cls(host, reason, [RankEnd(*end) for end in exits], FailureRecord.load_all(folder), steps)


def run_node(order: NodeOrder, node: int) -> Outcome:
    """Run the ranks of node `node` and wait for the job. Raises UsageError when it cannot be started as asked."""
    if order.kind == SCRIPT and not pathlib.Path(order.target).is_file():
        raise UsageError(f"no script {order.target!r} in {pathlib.Path.cwd()}")
    set_log_level(order.log_level)
    num_ranks = _place_ranks(order.slots[node])
    env.export_default("OMP_NUM_THREADS", str(max(1, len(allowed_cores()) // num_ranks)))
    _choose_interface(order, node)
    with _scratch() as folder, _pid_file(order.save_pid):
        command = _rank_command(order, num_ranks, folder)
        logger.info(f"starting {num_ranks} ranks, meeting at {order.master_addr}:{order.master_port}: {command}")
        return (_run_elastic if order.elastic else _run_together)(order, node, command, num_ranks, folder)


def end_with_input() -> None:
    """End this process when its standard input does: it came from the launching host, which is gone then.

    Ranks get an empty input instead.
    """
    source = os.dup(0)
    with open(os.devnull) as nothing:
        os.dup2(nothing.fileno(), 0)

    def wait() -> None:
        while os.read(source, 4096):
            pass
        os.kill(os.getpid(), signal.SIGTERM)

    threading.Thread(target=wait, daemon=True, name="wait for the end of input").start()


def allowed_cores() -> list[int]:
    """Cores this process may run on."""
    return sorted(os.sched_getaffinity(0)) if sys.platform == "linux" else list(range(os.cpu_count() or 1))


def _run_together(order: NodeOrder, node: int, command: Sequence[str], num_ranks: int, folder: str) -> Outcome:
    """All nodes begin and end together: one that fails or falls silent ends the others."""
    place = (order.master_addr, order.master_port, order.run_id)
    store = meet(*place, node, order.hosts, _MEET_S)
    meeting = Meeting(*place, node, len(order.hosts), order.hosts[node])
    own_place = Place(node, len(order.hosts), order.hosts[node], order.hosts[0])
    with NodeWatch(store, own_place, order.node_timeout_s) as watch:
        exits: Sequence[RankExit] = ()
        reason = ""
        try:
            ending = Ending(watch.is_stopped, lambda: _grace_s(folder))
            run_ranks(command, num_ranks, meeting, folder, _agent_level(order.log_level), ending)
            watch.finish()
            if not watch.is_stopped():
                return Outcome(0, "")
        except RanksInterruptedError as stop:
            watch.tell(json.dumps(NodeReport(order.hosts[node], str(stop), [], [], [])))
            return Outcome(128 + stop.signal_number, str(stop))
        except RanksFailedError as failed:
            exits = failed.exits
        except CommError as error:
            reason = str(error)
        own = NodeReport.of_ranks(_host_name(order, node), reason or watch.reason or "", exits, folder)
        watch.tell(json.dumps(own))
        return _conclude(own, [NodeReport.from_text(text) for text in watch.hear()])


def _conclude(own: NodeReport, heard: Sequence[NodeReport]) -> Outcome:
    """The job's outcome, the same on all nodes that heard the same."""
    reports = heard or [own]
    ends = [end for report in reports for end in report.ends]
    records = [record for report in reports for record in report.records]
    if not ends and not records:
        first = next((one for one in reports if one.host != own.host and not own.reason), own)
        return Outcome(1, first.reason, bool(heard))
    cause = find_first_cause(ends, records, _whereabouts(reports))
    return Outcome(cause.exit_code, cause.text, bool(heard))


def _whereabouts(reports: Sequence[NodeReport]) -> Whereabouts:
    hosts = {end.rank: report.host for report in reports for end in report.ends}
    hosts |= {record.rank: report.host for report in reports for record in report.records}
    return Whereabouts(hosts, {rank: step for report in reports for rank, step in report.steps})


def _host_name(order: NodeOrder, node: int) -> str:
    """What people call this node; a job of one node knows its host only as this one."""
    return order.hosts[node] if len(order.hosts) > 1 else platform.node()


def _grace_s(folder: str) -> int:
    """How long ranks may take to leave after a signal."""
    return SAVE_S if progress.is_any_saving(folder) else END_S


def _run_elastic(order: NodeOrder, node: int, command: Sequence[str], num_ranks: int, folder: str) -> Outcome:
    """Nodes may come and go: the ranks start anew, with another world size, whenever they do."""
    assert order.elastic is not None
    elastic = Elasticity(order.elastic.min_nodes, _MAX_RESTARTS, order.elastic.wait_s, order.node_timeout_s)
    place = (order.master_addr, order.master_port, order.run_id)
    meeting = Meeting(*place, node, order.elastic.max_nodes, _host_name(order, node), elastic)
    try:
        ending = Ending(lambda: False, lambda: _grace_s(folder))
        run_ranks(command, num_ranks, meeting, folder, _agent_level(order.log_level), ending)
    except RanksInterruptedError as stop:
        return Outcome(128 + stop.signal_number, str(stop))
    except RanksFailedError as failed:
        return _conclude(NodeReport.of_ranks(_host_name(order, node), "", failed.exits, folder), [])
    except CommError as error:
        return Outcome(1, str(error))
    return Outcome(0, "")


def _place_ranks(slots: Sequence[int] | int) -> int:
    """Number of ranks on this node; limits which devices they see when these are chosen ones."""
    accelerator = get_accelerator()
    if isinstance(slots, int) or accelerator.device_name() == "cpu":
        # Ranks share a CPU, so its slots only say how many there are.
        return slots if isinstance(slots, int) else len(slots)
    count = accelerator.device_count()
    if slots[-1] >= count:
        raise UsageError(f"slot {slots[-1]} has no device here: this host shows {count}, slots 0..{count - 1}")
    for name in accelerator.visible_devices_envs():
        # Slots count the devices the user lets us see, whatever those are called.
        visible = (env.get(name) or ",".join(map(str, range(count)))).split(",")
        if list(slots) != list(range(count)):
            env.export({name: ",".join(visible[slot] for slot in slots)})
    return len(slots)


def _choose_interface(order: NodeOrder, node: int) -> None:
    """Let gloo meet the other nodes on the network that leads to them.

    By itself it takes the address of this host's name, which on many systems is a loopback address.
    """
    if len(order.hosts) > 1:
        peer = order.hosts[1].rpartition("@")[2] if node == 0 else order.master_addr
        interface = interface_towards(peer, order.master_port)
        if interface is not None:
            env.export_default("GLOO_SOCKET_IFNAME", interface)


def _rank_command(order: NodeOrder, num_ranks: int, record_dir: str) -> Sequence[str]:
    log_prefix = None
    if order.each_rank_log is not None:
        pathlib.Path(order.each_rank_log).mkdir(parents=True, exist_ok=True)
        stamp = datetime.datetime.now().strftime("%Y%m%d%H%M%S")
        log_prefix = str(pathlib.Path(order.each_rank_log).resolve() / f"{stamp}_rank")
    cores = None if order.cores is None else share_cores(order.cores, allowed_cores(), num_ranks)
    rank_order = RankOrder(order.kind, order.passes_local_rank, record_dir, log_prefix, cores)
    return [sys.executable, "-u", "-m", "fullspeed.launcher.rank", rank_order.to_word(), order.target, *order.words]


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
