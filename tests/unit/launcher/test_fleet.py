"""Commands that start nodes, run together."""

from __future__ import annotations

import os
import signal
import threading
import time

import pytest

from fullspeed.base.errors import UsageError
from fullspeed.launcher import fleet
from fullspeed.launcher.backends import Command
from fullspeed.launcher.fleet import FleetEnd, run_commands


def run(*lines: str, num_needed: int | None = None, **env: str) -> FleetEnd:
    commands = [Command(f"host{i}", ("sh", "-c", line), env) for i, line in enumerate(lines)]
    return run_commands(commands, dict(os.environ), num_needed or len(commands))


@pytest.fixture(autouse=True)
def short_waits(monkeypatch):
    monkeypatch.setattr(fleet, "_AGREE_S", 0.5)
    monkeypatch.setattr(fleet, "_LEAVE_S", 1.0)
    monkeypatch.setattr(fleet, "_AGAIN_S", 0.2)


def test_all_succeed():
    assert run("exit 0", 'test "$A" = 1', A="1") == FleetEnd(0, ())


def test_the_first_failure_counts_and_the_rest_is_ended():
    started = time.monotonic()
    assert run("exec sleep 60", "exit 7", "sleep 0.2; exit 3") == FleetEnd(7, ("host1", "host2", "host0"))
    assert time.monotonic() - started < 20


def test_a_command_that_does_not_listen_is_killed(tmp_path):
    pid = tmp_path / "pid"
    code, failed = run(
        f"trap '' TERM; echo $$ > {pid}; while :; do sleep 0.1; done", f"while ! test -s {pid}; do :; done; exit 5"
    )
    assert (code, failed) == (5, ("host1", "host0"))
    with pytest.raises(ProcessLookupError):
        os.kill(int(pid.read_text()), 0)


def test_killed_command_gives_the_shells_code():
    assert run("kill -KILL $$").exit_code == 128 + signal.SIGKILL


def test_enough_successes_are_success():
    assert run("exit 3", "sleep 0.8", "exit 0", num_needed=2) == FleetEnd(0, ("host0",))
    assert run("exit 3", "exit 4", "exit 0", num_needed=2).exit_code == 3


def test_input_stays_open_as_long_as_we_live():
    assert run("timeout 0.3 cat; test $? = 124").exit_code == 0


def test_a_signal_ends_all_and_handlers_return():
    before = signal.getsignal(signal.SIGTERM)
    threading.Timer(0.3, os.kill, (os.getpid(), signal.SIGTERM)).start()
    assert run("exec sleep 60", "exec sleep 60") == FleetEnd(128 + signal.SIGTERM, ())
    assert signal.getsignal(signal.SIGTERM) is before


NODE = "cat; sleep 1.5; echo ended >{}"  # saves for longer than a command that is told to end may take


@pytest.mark.parametrize(("second_s", "ends_by_itself"), [(None, True), (0.9, False)])
def test_nodes_that_end_with_their_input_may_save_until_a_second_signal(tmp_path, second_s, ends_by_itself):
    for delay_s in (0.3, second_s):
        if delay_s is not None:
            threading.Timer(delay_s, os.kill, (os.getpid(), signal.SIGINT)).start()
    commands = [Command("host", ("sh", "-c", NODE.format(tmp_path / "told")), {}, True)]
    assert run_commands(commands, dict(os.environ), 1) == FleetEnd(128 + signal.SIGINT, ())
    assert (tmp_path / "told").exists() == ends_by_itself


def run_elastic(stays: str, may_return: str, num_needed: int) -> FleetEnd:
    lost = Command("host1", ("sh", "-c", may_return), {}, code_when_lost=255)
    return run_commands([Command("host0", ("sh", "-c", stays), {}), lost], dict(os.environ), num_needed)


def test_a_lost_command_is_started_again_as_long_as_others_run(tmp_path):
    starts = tmp_path / "starts"
    lost_twice = f"echo >> {starts}; test $(wc -l < {starts}) = 3 || exit 255"
    assert run_elastic(f"until test $(cat {starts} | wc -l) = 3; do sleep 0.05; done", lost_twice, 2) == FleetEnd(0, ())
    assert run_elastic("sleep 0.3", "exit 255", 1) == FleetEnd(0, ("host1",))
    assert run_elastic("sleep 0.3", "exit 255", 2) == FleetEnd(255, ("host1",))
    assert run_elastic("sleep 0.3; exit 4", "exit 255", 1) == FleetEnd(4, ("host0", "host1"))


def test_a_command_that_comes_back_when_the_job_is_over_is_ended(tmp_path):
    came_back = tmp_path / "came back"
    late = f"test -e '{came_back}' && exec sleep 60; touch '{came_back}'; exit 255"
    started = time.monotonic()
    assert run_elastic("sleep 0.8", late, 1) == FleetEnd(0, ("host1",))
    assert time.monotonic() - started < 20


def test_missing_program():
    with pytest.raises(UsageError, match="no program 'no-such-launcher' here; install it or choose another --launcher"):
        run_commands([Command("x", ("no-such-launcher",), {})], {}, 1)
