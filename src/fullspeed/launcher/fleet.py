"""Runs the commands that start a job's nodes, and ends all of them when one fails. No torch."""

from __future__ import annotations

import signal
import subprocess
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from types import FrameType
from typing import NamedTuple

from fullspeed.base.errors import UsageError
from fullspeed.base.log import logger
from fullspeed.launcher.backends import Command
from fullspeed.launcher.rank import SAVE_S

_POLL_S = 0.1
_AGREE_S = 15.0  # nodes hear of a failed one by themselves and say what came first; only then they are ended
_AGAIN_S = 10.0  # between losing a host and trying to reach it again
_LEAVE_S = 10.0  # between asking a command to end and killing it
_SIGNALLED_S = SAVE_S + 30.0  # nodes end their ranks in bounded time; longer takes a host that cannot be reached
_ENDING_SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGQUIT)


class FleetEnd(NamedTuple):
    """How the commands ended."""

    exit_code: int
    failed: tuple[str, ...]  # names of the commands that failed, the first one first


class _Fleet:
    """The commands of a job: those that run, those that ended, and those to start again."""

    def __init__(self, commands: Sequence[Command], environment: Mapping[str, str]) -> None:
        self._commands = {command.name: command for command in commands}
        self._environment = environment
        self._again_at: dict[str, float] = {}  # time.monotonic() at which a lost command is started again
        self._returned: set[str] = set()
        self.running: dict[str, subprocess.Popen[bytes]] = {}
        self.failed: list[tuple[str, int]] = []  # name and code, in the order of their ends
        self.num_succeeded = 0

    def start(self) -> None:
        """Start all commands. Raises UsageError, with none left running, when a program is not there."""
        for name in self._commands:
            self._start(name)

    def collect(self) -> None:
        """Note which commands have ended, and start lost ones again whose time has come."""
        for name in [name for name, process in self.running.items() if process.poll() is not None]:
            code = self.running.pop(name).returncode
            if code == 0:
                self.num_succeeded += 1
            elif code == self._commands[name].code_when_lost:
                logger.warning(f"host {name} is lost (exit code {code}); it is tried again every {_AGAIN_S:g} s")
                self._again_at[name] = time.monotonic() + _AGAIN_S
            else:
                self.failed.append((name, code))
        if not self.running:
            self._give_up_lost()
        for name in [name for name, at in self._again_at.items() if self.running and time.monotonic() > at]:
            del self._again_at[name]
            self._returned.add(name)
            self._start(name)

    def num_possible(self) -> int:
        """How many commands have succeeded or still can."""
        return len(self._commands) - len(self.failed)

    def is_waiting_for_lost(self) -> bool:
        """Whether only commands run that were lost before: the job may be over, which they find out late."""
        return self._returned.issuperset(self.running)

    def tell_to_end(self) -> float:
        """End the input of the commands if that ends their nodes; returns the seconds they may take."""
        self._give_up_lost()
        if not all(command.ends_with_input for command in self._commands.values()):
            return 0.0
        for process in self.running.values():
            assert process.stdin is not None
            process.stdin.close()
        return _SIGNALLED_S

    def end(self) -> None:
        """Ask the commands to end, and kill those that do not."""
        for process in self.running.values():
            process.terminate()
        deadline = time.monotonic() + _LEAVE_S
        for name, process in self.running.items():
            try:
                process.wait(max(0.0, deadline - time.monotonic()))
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait()
            if process.returncode != 0:
                self.failed.append((name, process.returncode))
        self.running.clear()
        self._give_up_lost()

    def _give_up_lost(self) -> None:
        """Count lost commands as failed: there is nothing left that they could join."""
        self.failed += [(name, self._commands[name].code_when_lost or 1) for name in self._again_at]
        self._again_at.clear()

    def _start(self, name: str) -> None:
        command = self._commands[name]
        try:
            self.running[name] = subprocess.Popen(
                command.argv,
                stdin=subprocess.PIPE,
                env={**self._environment, **command.env},
                preexec_fn=_ignore_interrupts if command.ends_with_input else None,
            )
        except FileNotFoundError:
            self.end()
            program = command.argv[0]
            raise UsageError(f"no program {program!r} here; install it or choose another --launcher") from None


def run_commands(commands: Sequence[Command], environment: Mapping[str, str], num_needed: int) -> FleetEnd:
    """Run all commands and wait for them.

    A signal ends the nodes first, whose ranks may save, and with them the commands; a second one ends these at once.

    Args:
        commands: started together; each keeps an open, empty input as long as this process lives.
        environment: of this process.
        num_needed: as soon as fewer than so many can still succeed, the rest is ended.

    Returns:
        Code 0 when enough commands succeeded, else that of the first that failed, or 128 + signal when this
        process was told to stop.

    Raises:
        UsageError: a command's program is not there.
    """
    fleet = _Fleet(commands, environment)
    with _caught_signals() as caught:
        fleet.start()
        end_at, is_told = float("inf"), False
        while fleet.running:
            fleet.collect()
            if caught and not is_told:
                is_told, end_at = True, time.monotonic() + fleet.tell_to_end()
            elif end_at == float("inf") and (fleet.num_possible() < num_needed or fleet.is_waiting_for_lost()):
                end_at = time.monotonic() + _AGREE_S
            if len(caught) > 1 or time.monotonic() > end_at:
                fleet.end()
                break
            time.sleep(_POLL_S)
    names = tuple(name for name, _ in fleet.failed)
    if caught:
        return FleetEnd(128 + caught[0], ())
    if fleet.num_succeeded >= num_needed:
        return FleetEnd(0, names)
    code = fleet.failed[0][1]
    return FleetEnd(code if code > 0 else 128 - code, names)


def _ignore_interrupts() -> None:
    """Ctrl-C in a terminal reaches every process there; ssh would leave its node with nobody to read what it says."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)


@contextmanager
def _caught_signals() -> Iterator[list[int]]:
    """While it is open, signals that would end this process are noted in the list instead."""
    caught: list[int] = []

    def note(number: int, frame: FrameType | None) -> None:
        caught.append(number)

    before = {number: signal.signal(number, note) for number in _ENDING_SIGNALS}
    try:
        yield caught
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
