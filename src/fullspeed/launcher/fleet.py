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
from fullspeed.launcher.backends import Command
from fullspeed.launcher.rank import SAVE_S

_POLL_S = 0.1
_AGREE_S = 15.0  # nodes hear of a failed one by themselves and say what came first; only then they are ended
_LEAVE_S = 10.0  # between asking a command to end and killing it
_SIGNALLED_S = SAVE_S + 30.0  # nodes end their ranks in bounded time; longer takes a host that cannot be reached
_ENDING_SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGQUIT)


class FleetEnd(NamedTuple):
    """How the commands ended."""

    exit_code: int
    failed: tuple[str, ...]  # names of the commands that failed, the first one first


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
    with _caught_signals() as caught:
        running = _start(commands, environment)
        ended: list[tuple[str, int]] = []
        end_at, is_told = float("inf"), False
        while running:
            for name in [name for name, process in running.items() if process.poll() is not None]:
                ended.append((name, running.pop(name).returncode))
            failed = [(name, code) for name, code in ended if code != 0]
            if caught and not is_told:
                is_told, end_at = True, time.monotonic() + _tell_to_end(commands, running)
            elif end_at == float("inf") and len(commands) - len(failed) < num_needed:
                end_at = time.monotonic() + _AGREE_S
            if len(caught) > 1 or time.monotonic() > end_at:
                _end(running)
                ended += [(name, process.returncode) for name, process in running.items()]
                break
            time.sleep(_POLL_S)
    failed = [(name, code) for name, code in ended if code != 0]
    if caught:
        return FleetEnd(128 + caught[0], ())
    if len(commands) - len(failed) >= num_needed:
        return FleetEnd(0, tuple(name for name, _ in failed))
    code = failed[0][1]
    return FleetEnd(code if code > 0 else 128 - code, tuple(name for name, _ in failed))


def _start(commands: Sequence[Command], environment: Mapping[str, str]) -> dict[str, subprocess.Popen[bytes]]:
    started: dict[str, subprocess.Popen[bytes]] = {}
    for command in commands:
        try:
            process = subprocess.Popen(
                command.argv,
                stdin=subprocess.PIPE,
                env={**environment, **command.env},
                preexec_fn=_ignore_interrupts if command.ends_with_input else None,
            )
        except FileNotFoundError:
            _end(started)
            program = command.argv[0]
            raise UsageError(f"no program {program!r} here; install it or choose another --launcher") from None
        started[command.name] = process
    return started


def _ignore_interrupts() -> None:
    """Ctrl-C in a terminal reaches every process there; ssh would leave its node with nobody to read what it says."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)


def _tell_to_end(commands: Sequence[Command], running: Mapping[str, subprocess.Popen[bytes]]) -> float:
    """End the input of the commands if that ends their nodes; returns the seconds they may take."""
    if not all(command.ends_with_input for command in commands):
        return 0.0
    for process in running.values():
        assert process.stdin is not None
        process.stdin.close()
    return _SIGNALLED_S


def _end(running: Mapping[str, subprocess.Popen[bytes]]) -> None:
    """Ask the commands to end, and kill those that do not."""
    for process in running.values():
        process.terminate()
    deadline = time.monotonic() + _LEAVE_S
    for process in running.values():
        try:
            process.wait(max(0.0, deadline - time.monotonic()))
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()


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
