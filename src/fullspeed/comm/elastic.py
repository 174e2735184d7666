"""Starts the ranks of one host on torchrun's elastic agent, which ends all of them when one fails."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from typing import NamedTuple
from uuid import uuid4

from torch.distributed.elastic.multiprocessing import DefaultLogsSpecs, SignalException
from torch.distributed.elastic.multiprocessing.errors import ChildFailedError
from torch.distributed.launcher.api import LaunchConfig, elastic_launch

_AGENT_LOGGERS = ("torch.distributed.elastic", "torch.distributed.launcher")


class RankExit(NamedTuple):
    """How one rank ended that did not end well."""

    rank: int
    exit_code: int  # negative: the number of the signal that killed it


class RanksFailedError(Exception):
    """Some ranks ended badly; the agent has ended the others."""

    def __init__(self, exits: Sequence[RankExit]) -> None:
        self.exits = tuple(exits)
        super().__init__(f"{len(self.exits)} ranks failed")


class RanksInterruptedError(Exception):
    """This process was told to stop; the agent has passed the signal on to every rank."""

    def __init__(self, signal_number: int) -> None:
        self.signal_number = signal_number
        super().__init__(f"stopped by signal {signal_number}")


def run_ranks(
    command: Sequence[str], num_ranks: int, master_addr: str, master_port: int, log_dir: str, log_level: int
) -> None:
    """Run `command` once per rank on this host and wait for all.

    Every rank gets torchrun's environment variables and the rest of this process's environment.

    Args:
        command: program and arguments, passed on exactly as they are, without a shell.
        num_ranks: number of processes, and the world size.
        master_addr: address of this host under which ranks find each other.
        master_port: free port the agent listens on.
        log_dir: folder for the agent's own files.
        log_level: least level of the agent's messages that is shown.

    Raises:
        RanksFailedError: a rank ended with another code than 0.
        RanksInterruptedError: this process received SIGINT, SIGTERM, SIGHUP or SIGQUIT.
    """
    for name in _AGENT_LOGGERS:
        logging.getLogger(name).setLevel(log_level)
    config = LaunchConfig(
        min_nodes=1,
        max_nodes=1,
        nproc_per_node=num_ranks,
        run_id=uuid4().hex,
        rdzv_backend="static",
        rdzv_endpoint=f"{master_addr}:{master_port}",
        rdzv_configs={"rank": 0},
        local_addr=master_addr,
        max_restarts=0,
        logs_specs=DefaultLogsSpecs(log_dir=log_dir),
    )
    # The agent substitutes ${local_rank} and $$ in arguments; doubled dollars come out as they went in.
    program, *args = (word.replace("$", "$$") for word in command)
    try:
        elastic_launch(config, program)(*args)
    except ChildFailedError as error:
        raise RanksFailedError([RankExit(rank, fail.exitcode) for rank, fail in error.failures.items()]) from None
    except SignalException as error:
        raise RanksInterruptedError(int(error.sigval)) from None
