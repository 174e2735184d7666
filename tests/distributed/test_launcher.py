"""`fullspeed run` from end to end: words, identity, first cause, exit codes, signals, logs."""

from __future__ import annotations

import json
import os
import pathlib
import re
import signal
import sys
from typing import NamedTuple

import pytest

from tests.ranks import run_ranks

TELL = """
import json, os, pathlib, sys
names = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_SIZE", "CROSS_RANK", "CROSS_SIZE", "MASTER_ADDR")
names += ("OMP_NUM_THREADS",)
said = {"argv": sys.argv[1:], **{name: os.environ.get(name) for name in names}}
pathlib.Path(f"said{os.environ['RANK']}.json").write_text(json.dumps(said))
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


class Ended(NamedTuple):
    """A finished launcher."""

    code: int
    out: str
    err: str


def _launch(rank, world_size, words, folder):
    """Run the command in this process, whose torch is loaded already, with its output in files."""
    from fullspeed.cli.main import main

    os.chdir(folder)
    del os.environ["OMP_NUM_THREADS"]
    for descriptor, name in ((1, "out.txt"), (2, "err.txt")):
        os.dup2(os.open(name, os.O_WRONLY | os.O_CREAT | os.O_TRUNC), descriptor)
    code = main(words)
    sys.stdout.flush()
    sys.stderr.flush()
    return code


@pytest.fixture
def fullspeed(tmp_path):
    """Runs `fullspeed` with those words in `tmp_path`."""

    def run(*words: str) -> Ended:
        (code,) = run_ranks(_launch, 1, list(words), tmp_path, timeout_s=120)
        return Ended(code, (tmp_path / "out.txt").read_text(), (tmp_path / "err.txt").read_text())

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
    last = ended.err[ended.err.index("rank 1 failed first (exit code 1)") :]
    assert "in broken" in last
    assert last.rstrip().endswith("ValueError: the cause")
    assert "rank 0 failed first" not in ended.err


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
    assert ended.err.rstrip().endswith("rank 1 failed first (exit code 7)")
    assert not pathlib.Path("/proc", (tmp_path / "pid0").read_text()).exists()


def test_killed_rank_is_reported_by_signal(fullspeed):
    ended = fullspeed("--num_gpus", "2", "--no_local_rank", "--no_python", "sh", "-c", "kill -KILL $$")
    assert ended.code == 128 + signal.SIGKILL
    assert "killed by SIGKILL" in ended.err


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
