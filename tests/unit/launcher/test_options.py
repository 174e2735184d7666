"""The launcher's command line: its own flags are read, the script's words are not touched."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from fullspeed.base.errors import UsageError
from fullspeed.launcher.options import parse

SCRIPT_WORDS = st.lists(st.text(max_size=8), max_size=6)


def test_defaults():
    options = parse(["train.py"])
    assert (options.target, options.target_args) == ("train.py", ())
    assert options.num_accelerators is None
    assert options.master_port is None
    assert options.master_addr == "127.0.0.1"
    assert not any((options.module, options.no_python, options.no_local_rank, options.save_pid))


def test_own_flags_before_the_script():
    words = "--num_gpus=2 -i localhost:0 --master_port 7 --no_local_rank --enable_each_rank_log logs -q train.py"
    options = parse(words.split())
    assert options.num_accelerators == 2
    assert options.include == "localhost:0"
    assert options.master_port == 7
    assert options.no_local_rank
    assert options.each_rank_log == "logs"
    assert options.log_level == "error"
    assert options.target == "train.py"


@pytest.mark.parametrize("flag", ["--num_gpus", "--num_accelerators"])
def test_both_names_of_the_number_of_ranks(flag):
    assert parse([flag, "3", "train.py"]).num_accelerators == 3
    assert parse([flag, "-1", "train.py"]).num_accelerators is None


@given(SCRIPT_WORDS)
def test_words_after_the_script_are_untouched(words):
    options = parse(["--num_gpus", "2", "train.py", *words])
    assert options.target_args == tuple(words)
    assert options.num_accelerators == 2


def test_script_words_that_look_like_ours_stay_the_scripts():
    words = ["--num_gpus", "9", "--help", "--hostfile", "h", "--", "-q", "--k=a b", "it's", '5"', '{"a": 1}']
    options = parse(["train.py", *words])
    assert options.target_args == tuple(words)
    assert options.num_accelerators is None


def test_double_dash_ends_our_flags():
    assert parse(["-q", "--", "-odd.py", "x"])[:2] == ("-odd.py", ("x",))


@pytest.mark.parametrize(
    ("words", "message"),
    [
        ([], "no script"),
        (["--num_gpus", "2"], "no script"),
        (["--num_gpus", "0", "t.py"], "at least 1"),
        (["--num_gpus", "two", "t.py"], "'two'"),
        (["--num_nodes", "2", "t.py"], "one host"),
        (["--module", "--no_python", "t"], "exclude each other"),
        (["--num_gpu", "2", "t.py"], "--num_gpu"),
        (["--log_level", "loud", "t.py"], "loud"),
    ],
)
def test_faults_are_named(words, message):
    with pytest.raises(UsageError, match=message):
        parse(words)


@pytest.mark.parametrize(
    "words",
    [
        ["-H", "hosts"],
        ["--hostfile=hosts"],
        ["--launcher", "pdsh"],
        ["--no_ssh"],
        ["--node_rank", "0"],
        ["--elastic_training"],
        ["--autotuning", "run"],
        ["--bind_cores_to_rank"],
    ],
)
def test_flags_of_later_releases_are_errors(words):
    with pytest.raises(UsageError, match=f"{words[0].partition('=')[0]} is for .*does not have"):
        parse([*words, "train.py"])
