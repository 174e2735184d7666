"""The first code of a rank, run as the launcher runs it."""

from __future__ import annotations

import json
import subprocess
import sys

import pytest

from fullspeed.launcher.rank import MODULE, PROGRAM, SCRIPT, FailureRecord, RankOrder

TELL = """
import json, os, sys
print(json.dumps({"argv": sys.argv, "name": __name__, "file": __file__, "torch": "torch" in sys.modules,
                  "path0": sys.path[0], "size": os.environ["LOCAL_SIZE"], "cross": os.environ["CROSS_RANK"]}))
"""


@pytest.fixture
def start(tmp_path, monkeypatch):
    """Runs a rank with that order, target and words; returns the finished process."""
    monkeypatch.setenv("RANK", "3")
    monkeypatch.setenv("LOCAL_RANK", "1")
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "2")

    def run(kind, *words, passes_local_rank=True, log_prefix=None):
        order = RankOrder(kind, passes_local_rank, str(tmp_path), log_prefix)
        command = [sys.executable, "-m", "fullspeed.launcher.rank", order.to_word(), *words]
        return subprocess.run(command, capture_output=True, text=True, cwd=tmp_path, check=False)

    return run


def test_order_survives_the_command_line():
    order = RankOrder(SCRIPT, True, "/a b/$x", None)
    assert RankOrder.from_word(order.to_word()) == order


def test_script_runs_as_main_with_its_own_words(start, tmp_path):
    (tmp_path / "sub").mkdir()
    (tmp_path / "sub" / "tell.py").write_text(TELL)
    said = json.loads(start(SCRIPT, "sub/tell.py", "--k=a b", "--").stdout)
    assert said["argv"] == ["sub/tell.py", "--local_rank=1", "--k=a b", "--"]
    assert (said["name"], said["file"], said["path0"]) == ("__main__", "sub/tell.py", str(tmp_path / "sub"))
    assert (said["size"], said["cross"]) == ("2", "0")
    assert not said["torch"]


def test_local_rank_can_be_left_out(start, tmp_path):
    (tmp_path / "tell.py").write_text(TELL)
    assert json.loads(start(SCRIPT, "tell.py", "x", passes_local_rank=False).stdout)["argv"] == [
        "tell.py",
        "x",
    ]


def test_module(start, tmp_path):
    (tmp_path / "telling.py").write_text(TELL)
    said = json.loads(start(MODULE, "telling", "x").stdout)
    assert said["name"] == "__main__"
    assert said["argv"] == [str(tmp_path / "telling.py"), "--local_rank=1", "x"]


def test_program(start):
    done = start(PROGRAM, "sh", "-c", 'echo "$RANK $0"; exit 4', "a b", passes_local_rank=False)
    assert (done.stdout, done.returncode) == ("3 a b\n", 4)


def test_exception_leaves_a_record_without_our_frames(start, tmp_path):
    (tmp_path / "bad.py").write_text("def deep():\n    raise ValueError('the cause')\n\ndeep()\n")
    done = start(SCRIPT, "bad.py")
    (record,) = FailureRecord.load_all(str(tmp_path))
    assert done.returncode == 1
    assert record.rank == 3
    assert record.text.rstrip().endswith("ValueError: the cause")
    for text in (record.text, done.stderr):
        assert "in deep" in text
        assert "launcher" not in text
        assert "runpy" not in text


@pytest.mark.parametrize(("source", "code"), [("import sys; sys.exit(5)", 5), ("raise KeyboardInterrupt", None)])
def test_leaving_is_no_failure_to_record(start, tmp_path, source, code):
    (tmp_path / "leave.py").write_text(source)
    done = start(SCRIPT, "leave.py")
    assert code is None or done.returncode == code
    assert FailureRecord.load_all(str(tmp_path)) == []


def test_output_goes_to_the_ranks_log(start, tmp_path):
    (tmp_path / "talk.py").write_text("import os, sys; print('out'); sys.stdout.flush(); os.system('echo err >&2')")
    done = start(SCRIPT, "talk.py", log_prefix=str(tmp_path / "now_rank"))
    assert done.stdout == done.stderr == ""
    assert (tmp_path / "now_rank3.log").read_text() == "out\nerr\n"


def test_classes_of_the_script_pickle(start, tmp_path):
    (tmp_path / "pick.py").write_text(
        "import pickle, atexit\nclass A: pass\n"
        "atexit.register(lambda: print(type(pickle.loads(d)).__name__))\n"
        "d = pickle.dumps(A())\n"
    )
    assert start(SCRIPT, "pick.py").stdout == "A\n"
