"""torchrun's agent with bounds on how long ranks may take to end, and on what may be left of them."""

from __future__ import annotations

import contextlib
import os
import signal
from collections.abc import Callable
from typing import NamedTuple

from torch.distributed.elastic.agent.server.api import RunResult, WorkerGroup, WorkerSpec, WorkerState
from torch.distributed.elastic.agent.server.local_elastic_agent import LocalElasticAgent
from torch.distributed.elastic.multiprocessing import DefaultLogsSpecs
from torch.distributed.elastic.multiprocessing.api import SubprocessContext
from typing_extensions import override

END_S = 5  # between asking the ranks of a failed job to end and killing them


class RankExit(NamedTuple):
    """How one rank ended that did not end well."""

    rank: int
    exit_code: int  # negative: the number of the signal that killed it


class Ending(NamedTuple):
    """When ranks are ended, other than by a failure of their own."""

    is_wanted: Callable[[], bool]  # asked several times a second; True ends the ranks, as failed
    grace_s: Callable[[], int]  # how long ranks may take to leave after a signal that this process received


class RankAgent(LocalElasticAgent):
    """Starts ranks, each the head of a process group, and ends all groups when one rank fails.

    Attributes:
        exits: ranks that ended badly by themselves, before the agent ended the others.
    """

    def __init__(self, spec: WorkerSpec, log_dir: str, exit_barrier_s: float, ending: Ending) -> None:
        super().__init__(spec, DefaultLogsSpecs(log_dir=log_dir), exit_barrier_timeout=exit_barrier_s)
        self._ending = ending
        self._was_told = False
        self.exits: list[RankExit] = []

    @override
    def _monitor_workers(self, worker_group: WorkerGroup) -> RunResult:
        self.exits = self._find_failed(worker_group)
        if self.exits or self._ending.is_wanted():
            return RunResult(state=WorkerState.FAILED)
        result: RunResult = super()._monitor_workers(worker_group)
        return result

    @override
    def _stop_workers(self, worker_group: WorkerGroup) -> None:
        """End the ranks of a start that failed, or that a change of nodes ends."""
        self._end(signal.SIGTERM, END_S)

    @override
    def _shutdown(self, death_sig: signal.Signals = signal.SIGTERM, timeout: int = END_S) -> None:
        """Pass on the signal this process received; at the second one there is no more waiting."""
        if self._was_told:
            self._end(signal.SIGKILL, END_S)
            return
        self._was_told = True
        self._end(death_sig, self._ending.grace_s())

    def _end(self, death_sig: signal.Signals, timeout_s: int) -> None:
        super()._shutdown(death_sig, timeout_s)
        if self._pcontext is None:
            return
        for pid in self._pcontext.pids().values():
            # Processes that a rank has started and not taken along.
            with contextlib.suppress(ProcessLookupError, PermissionError):
                os.killpg(pid, signal.SIGKILL)

    def _find_failed(self, worker_group: WorkerGroup) -> list[RankExit]:
        assert isinstance(self._pcontext, SubprocessContext)
        codes = {local: one.proc.poll() for local, one in self._pcontext.subprocess_handlers.items()}
        workers = worker_group.workers
        return [RankExit(workers[local].global_rank, code) for local, code in codes.items() if code]
