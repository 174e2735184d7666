"""`fullspeed run` from end to end: words, identity, first cause, exit codes, signals, logs."""

from __future__ import annotations

import json
import os
import pathlib
import platform
import re
import signal

import pytest

from fullspeed.cli.main import main
from fullspeed.launcher.launch import find_free_port
from tests.launches import Ended, launch

TELL = """
import json, os, pathlib, sys
names = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_SIZE", "CROSS_RANK", "CROSS_SIZE", "MASTER_ADDR")
names += ("OMP_NUM_THREADS", "FROM_FILE", "NCCL_FAMILY")
said = {"argv": sys.argv[1:], **{name: os.environ.get(name) for name in names}}
pathlib.Path(f"said{os.environ['RANK']}.json").write_text(json.dumps(said))
sys.exit(7 if os.environ["RANK"] == sys.argv[-1] else 0)
"""
TRICKY = [
    "--k=a b",
    "it's",
    '5"',
    '{"a": [1, "$HOME"]}',
    "$$",
    "${local_rank}",
    "--a",
    "b",
    "--c",
    "--",
    "",
    "*",
]


# Starts the command as sshd does: one text for the user's shell, which begins at home.
FAKE_SSH = """#!/bin/bash
for word; do remote=$word; done
cd / && exec bash -c "$remote"
"""
# Starts the command on every host, with the host's name for %h and a percent sign for two; returns the largest code.
FAKE_PDSH = """#!/usr/bin/env python3
import subprocess, sys
hosts, remote = sys.argv[-2].split(","), sys.argv[-1]
lines = [remote.replace("%%", "\\0").replace("%h", host.split("@")[-1]).replace("\\0", "%") for host in hosts]
running = [subprocess.Popen(["bash", "-c", line], cwd="/", stdin=subprocess.PIPE) for line in lines]
sys.exit(max(process.wait() for process in running))
"""


@pytest.fixture
def fullspeed(tmp_path):
    """Runs `fullspeed` with those words in `tmp_path`."""

    def run(*words: str) -> Ended:
        return launch(list(words), tmp_path, NCCL_FAMILY="it's passed on")

    return run


def said(folder: pathlib.Path) -> list[dict]:
    return [json.loads(path.read_text()) for path in sorted(folder.glob("said*.json"))]


@pytest.mark.parametrize("flags", [["--num_gpus", "2"], ["run", "--num_gpus", "2", "--no_local_rank"]])
def test_words_and_identity_reach_every_rank_unchanged(fullspeed, tmp_path, flags):
    (tmp_path / "tell.py").write_text(TELL)
    assert fullspeed(*flags, "tell.py", *TRICKY).code == 0
    heard = said(tmp_path)
    assert [one["RANK"] for one in heard] == [one["LOCAL_RANK"] for one in heard] == ["0", "1"]
    for one in heard:
        own = [] if "--no_local_rank" in flags else [f"--local_rank={one['LOCAL_RANK']}"]
        assert one["argv"] == own + TRICKY
        assert (one["WORLD_SIZE"], one["LOCAL_SIZE"], one["CROSS_RANK"], one["CROSS_SIZE"]) == (
            "2",
            "2",
            "0",
            "1",
        )
        assert one["MASTER_ADDR"] == "127.0.0.1"
        assert one["OMP_NUM_THREADS"] == str(max(1, len(os.sched_getaffinity(0)) // 2))


def test_one_rank_gets_the_same_words(fullspeed, tmp_path):
    (tmp_path / "tell.py").write_text(TELL)
    assert fullspeed("tell.py", *TRICKY).code == 0
    (heard,) = said(tmp_path)
    assert heard["argv"] == ["--local_rank=0", *TRICKY]
    assert heard["WORLD_SIZE"] == "1"


def test_module_and_included_slots(fullspeed, tmp_path):
    (tmp_path / "telling.py").write_text(TELL)
    assert fullspeed("--include", "localhost:0", "--module", "telling", "x").code == 0
    assert [one["argv"] for one in said(tmp_path)] == [["--local_rank=0", "x"]]


def test_first_cause_is_last_on_screen(fullspeed, tmp_path):
    (tmp_path / "train.py").write_text(
        "import torch, fullspeed.comm as comm\n"
        "comm.init_distributed()\n"
        "def broken():\n    raise ValueError('the cause')\n"
        "if comm.get_rank() == 1:\n    broken()\n"
        "comm.barrier()\n"
    )
    ended = fullspeed("--num_gpus", "2", "train.py")
    assert ended.code == 1
    last = ended.err[ended.err.index(f"rank 1 on {platform.node()} failed first (exit code 1)") :]
    assert "in broken" in last
    assert last.rstrip().endswith("ValueError: the cause")
    assert ended.err.count("failed first") == 1


def test_exit_code_of_the_dying_rank_is_returned_and_all_end(fullspeed, tmp_path):
    (tmp_path / "leave.py").write_text(
        "import os, pathlib, sys, time\n"
        "pathlib.Path('pid' + os.environ['RANK']).write_text(str(os.getpid()))\n"
        "while not pathlib.Path('pid0').exists(): time.sleep(0.01)\n"
        "if os.environ['RANK'] == '1': sys.exit(7)\n"
        "time.sleep(100)\n"
    )
    ended = fullspeed("--num_gpus", "2", "leave.py")
    assert ended.code == 7
    assert ended.err.rstrip().endswith(f"rank 1 on {platform.node()} failed first (exit code 7)")
    assert not pathlib.Path("/proc", (tmp_path / "pid0").read_text()).exists()


def test_killed_rank_is_reported_by_signal(fullspeed):
    ended = fullspeed("--num_gpus", "2", "--no_local_rank", "--no_python", "sh", "-c", "kill -KILL $$")
    assert ended.code == 128 + signal.SIGKILL
    assert "killed by SIGKILL" in ended.err


def test_a_killed_rank_of_an_elastic_job_starts_anew_with_the_others(fullspeed, tmp_path):
    line = "echo $RANK >> starts; test -e killed && exit 0; touch killed; kill -KILL $$"
    flags = ["--num_gpus", "2", "--elastic_training", "--elastic_wait", "1", "--no_local_rank", "--no_python"]
    assert fullspeed(*flags, "sh", "-c", line).code == 0
    assert (tmp_path / "killed").exists()
    assert (
        3 <= len((tmp_path / "starts").read_text().split()) <= 4
    )  # the other rank may have been ended before its line


def test_signal_to_the_launcher_ends_the_ranks(fullspeed, tmp_path):
    (tmp_path / "wait.py").write_text(
        "import os, pathlib, signal, time\n"
        "pathlib.Path('pid' + os.environ['RANK']).write_text(str(os.getpid()))\n"
        "while len(list(pathlib.Path('.').glob('pid*'))) < 2: time.sleep(0.01)\n"
        "if os.environ['RANK'] == '0': os.kill(os.getppid(), signal.SIGTERM)\n"
        "time.sleep(100)\n"
    )
    assert fullspeed("--num_gpus", "2", "wait.py").code == 128 + signal.SIGTERM
    assert not any(pathlib.Path("/proc", path.read_text()).exists() for path in tmp_path.glob("pid*"))


def test_logs_and_pid_file(fullspeed, tmp_path):
    (tmp_path / "talk.py").write_text(
        "import os, pathlib, tempfile\n"
        "print('hello from', os.environ['RANK'])\n"
        "path = pathlib.Path(tempfile.gettempdir(), f'{os.getppid()}.deepspeed')\n"
        "assert path.read_text() == str(os.getppid())\n"
        "pathlib.Path('pid_file').write_text(str(path))\n"
    )
    flags = ["--num_gpus", "2", "--save_pid", "--enable_each_rank_log", "logs", "--log_level", "warning"]
    ended = fullspeed(*flags, "talk.py")
    assert (ended.code, ended.out) == (0, "")
    names = sorted((tmp_path / "logs").iterdir())
    assert [re.fullmatch(r"\d{14}_rank(\d)\.log", path.name)[1] for path in names] == ["0", "1"]
    assert [path.read_text() for path in names] == ["hello from 0\n", "hello from 1\n"]
    assert not pathlib.Path((tmp_path / "pid_file").read_text()).exists()


@pytest.mark.parametrize(("num_hosts", "launcher"), [(1, "ssh"), (2, "ssh"), (2, "pdsh")])
def test_one_and_several_hosts_pass_on_the_same_words_variables_and_codes(fullspeed, tmp_path, num_hosts, launcher):
    for name, text in (("ssh", FAKE_SSH), ("pdsh", FAKE_PDSH)):
        (tmp_path / name).write_text(text)
        (tmp_path / name).chmod(0o755)
    (tmp_path / "tell.py").write_text(TELL)
    (tmp_path / ".deepspeed_env").write_text('FROM_FILE=it\'s "A" = $HOME 100%\n')
    hosts = ["localhost"] if num_hosts == 1 else ["host1", "me@host2"]
    (tmp_path / "hosts").write_text("".join(f"{host} slots={2 // num_hosts}\n" for host in hosts))
    flags = ["-H", "hosts", "--launcher", launcher, "--master_addr", "127.0.0.1"]
    flags += ["--master_port", str(find_free_port("127.0.0.1"))]
    ended = fullspeed(*flags, "tell.py", *TRICKY, "1")
    assert ended.code == 7, ended.err
    assert ended.err.count("failed first") == 1
    host = platform.node() if num_hosts == 1 else "me@host2"
    assert ended.err.rstrip().endswith(f"rank 1 on {host} failed first (exit code 7)")
    heard = said(tmp_path)
    local_ranks = ["0", "1"] if num_hosts == 1 else ["0", "0"]
    assert [one["LOCAL_RANK"] for one in heard] == local_ranks
    for one in heard:
        assert one["argv"] == [f"--local_rank={one['LOCAL_RANK']}", *TRICKY, "1"]
        assert (one["FROM_FILE"], one["NCCL_FAMILY"]) == ('it\'s "A" = $HOME 100%', "it's passed on")
        assert (one["WORLD_SIZE"], one["CROSS_SIZE"]) == ("2", str(num_hosts))


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        (["-H", "missing"], "no hostfile 'missing'; write one"),
        (["-H", "bad"], "line 1 of hostfile bad is 'host1 slots'"),
        (["--num_nodes", "2"], "no hostfile names the hosts"),
        (["--num_nodes", "2", "--node_rank", "2"], "--num_nodes 2 makes it 0..1"),
        (["--num_nodes", "2", "--node_rank", "1"], "needs --master_addr"),
        (["-H", "loop"], "the first host is localhost"),
        (["-H", "good", "-i", "host1:2"], "slots are indices 0..1"),
    ],
)
def test_faults_of_several_hosts_are_named_with_the_fix(tmp_path, monkeypatch, capsys, flags, message):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "bad").write_text("host1 slots\n")
    (tmp_path / "good").write_text("host1 slots=2\nhost2 slots=2\n")
    (tmp_path / "loop").write_text("localhost slots=2\nhost2 slots=2\n")
    (tmp_path / "t.py").write_text("")
    assert main([*flags, "t.py"]) == 2
    assert message in capsys.readouterr().err


def test_ranks_are_bound_to_cores_of_their_own(fullspeed, tmp_path):
    (tmp_path / "cores.py").write_text(
        "import json, os, pathlib\n"
        "told = [sorted(os.sched_getaffinity(0)), os.environ['OMP_NUM_THREADS']]\n"
        "pathlib.Path('said' + os.environ['RANK'] + '.json').write_text(json.dumps(told))\n"
    )
    core = min(os.sched_getaffinity(0))
    assert fullspeed("--bind_core_list", str(core), "cores.py").code == 0
    assert said(tmp_path) == [[[core], "1"]]
