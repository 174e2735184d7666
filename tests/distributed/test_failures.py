"""A job that goes wrong ends soon on all ranks, says where and why, and leaves no process."""

from __future__ import annotations

import ctypes
import datetime
import json
import os
import pathlib
import platform
import re
import signal
import sys
import time
from typing import NamedTuple

import pytest
import torch

from fullspeed.base.errors import CommError
from fullspeed.launcher.rank import LEAVE_S
from tests.launches import Ended, launch
from tests.ranks import RankError, run_ranks

END_S = 20  # the bound that docs/failures.md states for a rank that raises or is killed
HERE = platform.node()
CONFIG = {"train_micro_batch_size_per_gpu": 1, "optimizer": {"type": "SGD", "params": {"lr": 0.1}}}

# Ranks that have made three updates, as far as the launcher can know; then rank 1 does what `act.py` says.
WAIT = """
import os, pathlib, signal, subprocess, sys, time
from fullspeed.base.progress import note_saves, note_step

def note(name, text):
    pathlib.Path(name + os.environ["RANK"]).write_text(str(text))

note_step(3)
if "IGNORES" in os.environ:
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
if "SAVES" in os.environ:
    note_saves()
note("pid", os.getpid())
while len(list(pathlib.Path(".").glob("pid[01]"))) < 2:
    time.sleep(0.01)
if os.environ["RANK"] == "1":
    note("act", time.monotonic())
    exec(compile(pathlib.Path("act.py").read_text(), "act.py", "exec"))
time.sleep(100)
"""

# Trains for ever; after the third update rank 1 tells the launcher to stop.
TRAIN = """
import json, os, pathlib, signal, torch, fullspeed
engine, *_ = fullspeed.initialize(model=torch.nn.Linear(3, 2), config=json.loads(os.environ["CONFIG"]))
pathlib.Path("pid" + os.environ["RANK"]).write_text(str(os.getpid()))
while True:
    engine.backward(engine(torch.ones(1, 3)).sum())
    engine.step()
    if engine.global_steps == 3 and engine.global_rank == 1:
        os.kill(os.getppid(), signal.SIGTERM)
"""


class Failed(NamedTuple):
    """How a job ended in which rank 1 did something."""

    ended: Ended
    after_s: float  # between what it did and the launcher's end


@pytest.fixture
def act(tmp_path):
    """Runs WAIT in two ranks with that act and environment; checks that no process is left."""

    def run(source: str, **variables: str) -> Failed:
        (tmp_path / "wait.py").write_text(WAIT)
        (tmp_path / "act.py").write_text(source)
        ended = launch(["--num_gpus", "2", "wait.py"], tmp_path, **variables)
        assert still_alive(tmp_path) == []
        return Failed(ended, ended.at_s - float((tmp_path / "act1").read_text()))

    return run


def still_alive(folder: pathlib.Path) -> list[str]:
    """Which of the processes that left a file there, two at least, run; one that waits to be reaped does not."""
    pids = [path.read_text() for path in folder.glob("pid*")]
    assert len(pids) >= 2
    return [pid for pid in pids if is_alive(pid)]


def is_alive(pid: str) -> bool:
    try:
        state = pathlib.Path("/proc", pid, "stat").read_text().rpartition(")")[2].split()[0]
    except OSError:
        return False
    return state not in "XZ"


# ------------------------------------------------------------------ ranks that fail


def test_an_exception_ends_the_job_with_rank_host_step_and_traceback_whatever_holds_the_rank(act):
    held = "import threading\nthreading.Thread(target=time.sleep, args=(100,)).start()\n"
    failed = act(held + "def broken():\n    raise ValueError('the cause')\nbroken()\n")
    assert failed.ended.code == 1
    assert LEAVE_S <= failed.after_s < END_S
    first = f"rank 1 on {HERE} failed first (exit code 1; after step 3):\nTraceback (most recent call last):\n"
    cause = failed.ended.err[failed.ended.err.index(first) :]
    assert "in broken" in cause
    assert cause.rstrip().endswith("ValueError: the cause")


def test_a_killed_rank_ends_the_job_and_its_own_children(act, tmp_path):
    failed = act("note('pid_of_child', subprocess.Popen(['sleep', '100']).pid)\nos.kill(os.getpid(), signal.SIGKILL)\n")
    assert (tmp_path / "pid_of_child1").exists()
    assert failed.ended.code == 128 + signal.SIGKILL
    assert failed.after_s < END_S
    last = failed.ended.err.rstrip()
    assert re.search(rf"rank 1 on {HERE} failed first \(killed by SIGKILL.*; after step 3\)$", last)


def test_ranks_that_do_not_end_when_another_has_failed_are_killed_and_not_blamed(act):
    failed = act("sys.exit(7)", IGNORES="1", SAVES="1")
    assert failed.ended.code == 7
    assert END_S > failed.after_s > 4  # rank 0 was asked first
    assert failed.ended.err.count("failed") == 1
    assert f"rank 1 on {HERE} failed first (exit code 7; after step 3)" in failed.ended.err


def _hang(rank, world_size, folder):
    """Rank 1 never comes to the second collective. What ranks say of it goes to files, as to a launcher."""
    from fullspeed import comm
    from fullspeed.base.progress import note_step

    def write(kind, error, trace):
        pathlib.Path(folder, f"said{rank}").write_text(f"{kind.__name__}: {error}")

    sys.excepthook = write
    note_step(3)
    comm.barrier()
    if rank == 1:
        pathlib.Path(folder, "stood").write_text(str(time.monotonic()))
        _stand_still()
    comm.all_reduce(torch.ones(5))


def _stand_still():
    time.sleep(100)


def test_a_rank_that_hangs_ends_all_with_its_stack_and_who_waits_for_it(monkeypatch, tmp_path):
    monkeypatch.setenv("FULLSPEED_HANG_TIMEOUT", "2")
    with pytest.raises(RankError, match="exit code 1"):
        run_ranks(_hang, 2, tmp_path)
    assert 2 < time.monotonic() - float((tmp_path / "stood").read_text()) < 2 + END_S
    told = [path.read_text() for path in tmp_path.glob("said*")]  # one rank may have ended the other
    assert told
    for said in told:
        assert said.startswith("CommError: no collective began or ended and no update was made for 2 s")
        place = rf"rank 0 on {HERE}, after step 3, waits for rank 1 in collective 2 \(all_reduce of 5 elements"
        assert re.search(rf"{place} torch.float32\) at .*test_failures.py:\d+ in _hang", said)
        stack = said[said.index(f"rank 1 on {HERE}, after step 3, is in no collective (its last was 1, barrier") :]
        assert "in _stand_still" in stack


def _hold_lock(rank, world_size, folder):
    """Rank 1 stands still in code that keeps the interpreter's lock, so that no thread of Python can look."""
    from fullspeed import comm

    os.dup2(os.open(f"{folder}/errors{rank}", os.O_WRONLY | os.O_CREAT), 2)
    comm.barrier()
    if rank == 1:
        ctypes.PyDLL(None).sleep(100)
    comm.barrier()


def test_a_rank_held_in_native_code_shows_its_stack_and_ends(monkeypatch, tmp_path):
    monkeypatch.setenv("FULLSPEED_HANG_TIMEOUT", "2")
    with pytest.raises(RankError, match="exit code 1") as caught:
        run_ranks(_hold_lock, 2, str(tmp_path))
    assert caught.value.rank == 1
    assert "in _hold_lock" in (tmp_path / "errors1").read_text()


# ------------------------------------------------------------------ signals


def test_a_signal_to_the_launcher_saves_and_ends_the_job(tmp_path):
    (tmp_path / "train.py").write_text(TRAIN)
    config = json.dumps(CONFIG | {"checkpoint": {"save_on_signal": "saved"}})
    ended = launch(["--num_gpus", "2", "train.py"], tmp_path, CONFIG=config)
    assert ended.code == 128 + signal.SIGTERM
    assert still_alive(tmp_path) == []
    tag = (tmp_path / "saved" / "latest").read_text().strip()
    assert int(tag.removeprefix("global_step")) >= 3
    assert (tmp_path / "saved" / tag).exists()


def _train_until_told(engine):
    for step in range(10):
        loss = engine(torch.ones(1, 3)).sum()
        if (engine.global_rank, step) == (1, 2):
            os.kill(os.getpid(), signal.SIGTERM)
        engine.backward(loss)
        engine.step()


def _be_signalled(rank, world_size, folder):
    """Train; rank 1 alone gets a signal in mid-step. Returns the exit code and what the launcher could read."""
    import fullspeed
    from fullspeed.base.progress import is_any_saving, noted_steps

    os.environ["FULLSPEED_RECORD_DIR"] = folder
    before = signal.getsignal(signal.SIGTERM)
    saved = f"{folder}/saved"
    model = torch.nn.Linear(3, 2)
    engine, *_ = fullspeed.initialize(model=model, config=CONFIG | {"checkpoint": {"save_on_signal": saved}})
    with pytest.raises(SystemExit) as leaving:
        _train_until_told(engine)
    weights = model.weight.detach().clone()
    engine.destroy()
    assert signal.getsignal(signal.SIGTERM) == before
    model = torch.nn.Linear(3, 2)
    engine, *_ = fullspeed.initialize(model=model, config=CONFIG)
    engine.load_checkpoint(saved)
    assert torch.equal(model.weight, weights)
    return leaving.value.code, engine.global_steps, noted_steps(folder).get(rank), is_any_saving(folder)


def test_a_signal_to_one_rank_makes_all_save_at_the_boundary_and_leave(tmp_path):
    assert run_ranks(_be_signalled, 2, str(tmp_path)) == [(143, 3, 3, True)] * 2


def test_a_second_signal_ends_ranks_that_were_given_time_to_save(act):
    told = "os.kill(os.getppid(), signal.SIGTERM)"
    failed = act(f"{told}\ntime.sleep(7)\n{told}\ntime.sleep(100)", IGNORES="1", SAVES="1")
    assert failed.ended.code == 128 + signal.SIGTERM
    assert 7 < failed.after_s < 7 + END_S  # other ranks would have been killed after 5 s


def _kill_launcher(rank, world_size, folder):
    """Kill a launcher once its two ranks run; returns which of them are left a little later."""
    from fullspeed.cli.main import main

    os.chdir(folder)
    pid = os.fork()
    if pid == 0:
        os._exit(main(["--num_gpus", "2", "--no_python", "--no_local_rank", "sh", "-c", "echo $$ >pid$RANK; sleep 60"]))
    files = [pathlib.Path(f"pid{number}") for number in range(2)]
    while not all(file.exists() and file.read_text().strip() for file in files):
        time.sleep(0.05)
    pids = [file.read_text().strip() for file in files]
    started = [each for each in pids if is_alive(each)]
    os.kill(pid, signal.SIGKILL)
    os.waitpid(pid, 0)
    deadline = time.monotonic() + END_S
    while any(map(is_alive, pids)) and time.monotonic() < deadline:
        time.sleep(0.05)
    return len(started), [each for each in pids if is_alive(each)]


def test_ranks_do_not_outlive_a_killed_launcher(tmp_path):
    assert run_ranks(_kill_launcher, 1, tmp_path) == [(2, [])]


# ------------------------------------------------------------------ ranks that enter different collectives

MISMATCHES = {
    "op": ("comm.all_reduce(x)", "comm.broadcast(x)", r"all_reduce \(4,\) torch.float32", "broadcast"),
    "reduction": ("comm.all_reduce(x)", "comm.all_reduce(x, comm.ReduceOp.MAX)", "SUM", "MAX"),
    "shape": ("comm.all_reduce(x)", "comm.all_reduce(x[:3])", r"\(4,\)", r"\(3,\)"),
    "dtype": ("comm.all_gather(y, x)", "comm.all_gather(y.double(), x.double())", "float32", "float64"),
    "transport": ("shared.all_reduce(x).wait()", "shared.all_reduce(x[:2]).wait()", r"\(4,\)", r"\(2,\)"),
    "messages": ("pairs.all_gather(y, x).wait()", "pairs.all_gather(y[:4], x[:2]).wait()", r"\(8,\)", r"\(4,\)"),
}


def _mismatch(rank, world_size, calls):
    """Make different calls on the ranks; returns what the error of this one says, and what all agree on later."""
    from fullspeed import comm

    device = torch.device("cpu")
    shared = comm.make_transport(comm.get_world_group(), device)
    pairs = comm.make_transport(comm.get_world_group(), device, may_share=False)
    names = {"comm": comm, "shared": shared, "pairs": pairs, "x": torch.ones(4), "y": torch.zeros(8)}
    with pytest.raises(CommError, match="ranks enter different collectives") as caught:
        eval(calls[rank], names)
    total = comm.all_reduce(torch.ones(1)).item()  # nothing of the calls above was sent
    return str(caught.value), total


@pytest.mark.parametrize("what", MISMATCHES)
def test_different_collectives_are_an_error_on_every_rank(monkeypatch, what):
    monkeypatch.setenv("FULLSPEED_DEBUG_COLLECTIVES", "1")
    *calls, first, second = MISMATCHES[what]
    told = run_ranks(_mismatch, 2, calls)
    assert told[0] == told[1]
    text, total = told[0]
    assert total == 2.0
    assert re.search(rf"rank 0: .*{first}.* called at .*\n  rank 1: .*{second}.* called at ", text)


def _come_alone(rank, world_size, folder):
    from fullspeed import comm

    comm.barrier()
    torch.distributed.distributed_c10d._get_default_store().set_timeout(datetime.timedelta(seconds=1))
    if rank == 0:
        with pytest.raises(CommError) as caught:
            comm.all_reduce(torch.ones(2))
        pathlib.Path(folder, "seen").touch()
        return str(caught.value)
    while not pathlib.Path(folder, "seen").exists():
        time.sleep(0.05)
    return None


def test_a_rank_that_does_not_come_is_named_with_what_it_did_last(monkeypatch, tmp_path):
    monkeypatch.setenv("FULLSPEED_DEBUG_COLLECTIVES", "1")
    text, _ = run_ranks(_come_alone, 2, tmp_path)
    assert re.search(r"rank 0 waited 1 s in all_reduce \(2,\) torch.float32 .* called at .*test_failures.py", text)
    assert re.search(r"rank 1 did not come; the last it entered: barrier at .*test_failures.py", text)


def _train(rank, world_size):
    """Two updates at the stage with the most collectives; returns the weights."""
    import fullspeed
    from fullspeed import comm

    torch.manual_seed(0)
    model = torch.nn.Sequential(torch.nn.Linear(6, 8), torch.nn.Tanh(), torch.nn.Linear(8, 2))
    zero = {"stage": 3, "stage3_param_persistence_threshold": 0}
    engine, *_ = fullspeed.initialize(model=model, config=CONFIG | {"zero_optimization": zero})
    for step in range(2):
        inputs = torch.randn(2, 6, generator=torch.Generator().manual_seed(step))[rank : rank + 1]
        engine.backward(engine(inputs).square().sum())
        engine.step()
    engine.destroy()
    transport = type(comm.make_transport(comm.get_world_group(), torch.device("cpu"))).__name__
    return transport, [param.detach().clone() for param in model.parameters()]


def test_comparing_changes_no_numbers_and_costs_nothing_when_off(monkeypatch):
    (plain, expected), _ = run_ranks(_train, 2)
    monkeypatch.setenv("FULLSPEED_DEBUG_COLLECTIVES", "1")
    (checked, weights), _ = run_ranks(_train, 2)
    assert (plain, checked) == ("SharedMemoryTransport", "CheckedTransport")
    assert all(map(torch.equal, weights, expected))
