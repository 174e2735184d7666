"""Starts one node's ranks on torchrun's elastic agent, which ends all of them when one fails, or starts them anew."""

from __future__ import annotations

import ipaddress
import logging
import signal
import socket
from collections.abc import Sequence
from types import FrameType
from typing import Any, NamedTuple, NoReturn

import psutil
from torch.distributed import DistError
from torch.distributed.elastic.agent.server.api import RunResult, WorkerSpec
from torch.distributed.elastic.multiprocessing import SignalException
from torch.distributed.elastic.rendezvous import RendezvousError, RendezvousHandler, RendezvousParameters
from torch.distributed.elastic.rendezvous.registry import get_rendezvous_handler

from fullspeed.base import env
from fullspeed.base.errors import CommError
from fullspeed.comm.rank_agent import Ending, RankAgent, RankExit
from fullspeed.comm.rounds import Rounds

_AGENT_LOGGERS = ("torch.distributed.elastic", "torch.distributed.launcher")
_ENDING_SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGQUIT)
_EXIT_BARRIER_S = 1.0  # agents wait for each other in `NodeWatch`, where they hear of failures meanwhile
_ELASTIC_EXIT_BARRIER_S = 300.0  # nodes of an elastic job leave when the ranks of all have ended
_JOIN_S = 300  # how long an elastic job's node tries to reach the first
_MISSED_BEATS = 3
_AGENTS_START_S = 120  # agents have met before they open their store, so all open it within this time


class Elasticity(NamedTuple):
    """How an elastic job deals with nodes that come and go."""

    min_nodes: int
    max_restarts: int  # after failures and lost nodes; one that joins costs none
    last_call_s: int  # once `min_nodes` are there, how long to wait for more
    silence_s: float  # a node that gives no sign of life for so long is lost


class Meeting(NamedTuple):
    """Where the agents of a job meet, one per node."""

    address: str
    port: int
    run_id: str  # the same on all nodes, another for each job
    node: int  # this node's index; node 0 keeps the meeting. An elastic job numbers its ranks without it
    num_nodes: int  # at most, for an elastic job
    name: str  # of this node, for people
    elastic: Elasticity | None = None


class RanksFailedError(Exception):
    """Some ranks ended badly, or another node did; the agent has ended the others of this node."""

    def __init__(self, exits: Sequence[RankExit]) -> None:
        self.exits = tuple(exits)
        super().__init__(f"{len(self.exits)} ranks failed")


class RanksInterruptedError(Exception):
    """This process was told to stop; the agent has passed the signal on to every rank."""

    def __init__(self, signal_number: int) -> None:
        self.signal_number = signal_number
        super().__init__(f"stopped by signal {signal_number}")


def run_ranks(
    command: Sequence[str],
    num_ranks: int,
    meeting: Meeting,
    log_dir: str,
    log_level: int,
    ending: Ending,
) -> None:
    """Run `command` once per rank on this node and wait for all.

    Every rank gets torchrun's environment variables and the rest of this process's environment.

    Args:
        command: program and arguments, passed on exactly as they are, without a shell.
        num_ranks: processes on this node.
        meeting: where this agent finds those of the other nodes.
        log_dir: folder for the agent's own files.
        log_level: least level of the agent's messages that is shown.
        ending: when ranks are ended that have not failed.

    Raises:
        RanksFailedError: a rank ended with another code than 0, or `ending` wanted it.
        RanksInterruptedError: this process received SIGINT, SIGTERM, SIGHUP or SIGQUIT.
        CommError: the agents did not find each other.
    """
    for name in _AGENT_LOGGERS:
        logging.getLogger(name).setLevel(log_level)
    for number in _ENDING_SIGNALS:  # until the agent's own handlers stand, which do the same
        signal.signal(number, _interrupt)
    # The agent substitutes ${local_rank} and $$ in arguments; doubled dollars come out as they went in.
    program, *args = (word.replace("$", "$$") for word in command)
    try:
        handler = _rendezvous(meeting)
        spec = WorkerSpec(
            role="default",
            local_world_size=num_ranks,
            rdzv_handler=handler,
            entrypoint=program,
            args=tuple(args),
            max_restarts=meeting.elastic.max_restarts if meeting.elastic else 0,
            **_master(meeting),
        )
        exit_barrier_s = _ELASTIC_EXIT_BARRIER_S if meeting.elastic else _EXIT_BARRIER_S
        agent = RankAgent(spec, log_dir, exit_barrier_s, _also_when_lost(ending, handler))
        result = _run_agent(agent, handler)
    except SignalException as error:
        raise RanksInterruptedError(int(error.sigval)) from None
    except (DistError, RendezvousError) as error:
        raise CommError(
            f"the nodes of this job lost each other at {meeting.address}:{meeting.port}: {error}"
        ) from error
    if result.is_failed():
        # A rank that failed between two looks of the agent is in its result alone.
        late = [RankExit(rank, failure.exitcode) for rank, failure in result.failures.items()]
        raise RanksFailedError(agent.exits or late)


def own_address(peer: str, port: int) -> str:
    """The address of this host that `peer` sees. Raises CommError when `peer` is not known here."""
    try:
        family, kind, _, _, address = socket.getaddrinfo(peer, port, type=socket.SOCK_DGRAM)[0]
        with socket.socket(family, kind) as probe:
            probe.connect(address)  # sends nothing
            return str(probe.getsockname()[0])
    except OSError as error:
        raise CommError(f"there is no way from this host to {peer!r}: {error}; check --master_addr") from error


def interface_towards(peer: str, port: int) -> str | None:
    """The network interface through which this host reaches `peer`; None when that is unknown or this host itself."""
    try:
        address = ipaddress.ip_address(own_address(peer, port))
    except CommError:
        return None
    if address.is_loopback:
        return None
    interfaces = psutil.net_if_addrs().items()
    return next((name for name, owned in interfaces if any(one.address == str(address) for one in owned)), None)


def _rendezvous(meeting: Meeting) -> RendezvousHandler:
    """How agents find each other: by their index, or for an elastic job whoever comes."""
    elastic = meeting.elastic
    if elastic is not None:
        # Agents count restarts differently: a failed rank's does, one that only hears of a change of nodes does not.
        # In a store of the agents ranks would meet under that count, and find addresses of ranks that are gone.
        env.export({"TORCH_DISABLE_SHARE_RDZV_TCP_STORE": "1"})
        beat_s = max(1, round(elastic.silence_s / _MISSED_BEATS))
        extra = {
            "is_host": meeting.node == 0,
            "read_timeout": _JOIN_S,
            "last_call_timeout": elastic.last_call_s,
            "keep_alive_interval": beat_s,
            "keep_alive_max_attempt": _MISSED_BEATS,
        }
    else:
        extra = {"rank": meeting.node, "timeout": _AGENTS_START_S}
    parameters = RendezvousParameters(
        backend="c10d" if elastic else "static",
        endpoint=f"{meeting.address}:{meeting.port}",
        run_id=meeting.run_id,
        min_nodes=elastic.min_nodes if elastic else meeting.num_nodes,
        max_nodes=meeting.num_nodes,
        local_addr=own_address(meeting.address, meeting.port),
        **extra,
    )
    handler = get_rendezvous_handler(parameters)
    return Rounds(handler, meeting.name, meeting.address, elastic.silence_s) if elastic else handler


def _also_when_lost(ending: Ending, handler: RendezvousHandler) -> Ending:
    """End ranks of an elastic job, to start them anew, when a node of theirs is lost."""
    if not isinstance(handler, Rounds):
        return ending
    return ending._replace(is_wanted=lambda: handler.is_broken() or ending.is_wanted())


def _master(meeting: Meeting) -> dict[str, Any]:
    """Where ranks meet: at the agents' store, or wherever the agents agree to after each change of nodes."""
    if meeting.elastic:
        return {"local_addr": own_address(meeting.address, meeting.port)}
    return {"master_addr": meeting.address, "master_port": meeting.port}


def _run_agent(agent: RankAgent, handler: RendezvousHandler) -> RunResult:
    """The ranks' outcome. An agent that is told to stop leaves the meeting open, so that the others can go on."""
    env.export_default("TORCHELASTIC_SIGNALS_TO_HANDLE", ",".join(one.name for one in _ENDING_SIGNALS))
    is_interrupted = False
    try:
        result: RunResult = agent.run()
        return result
    except SignalException:
        is_interrupted = True
        raise
    finally:
        if not is_interrupted:
            handler.shutdown()


def _interrupt(number: int, frame: FrameType | None) -> NoReturn:
    raise SignalException(f"stopped by signal {number}", signal.Signals(number))
