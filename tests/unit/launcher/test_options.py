"""The launcher's command line: its own flags are read, the script's words are not touched."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from fullspeed.base.errors import UsageError
from fullspeed.launcher.options import parse
from fullspeed.launcher.slots import Wish

SCRIPT_WORDS = st.lists(st.text(max_size=8), max_size=6)


def test_defaults():
    options = parse(["train.py"])
    assert (options.target, options.target_args) == ("train.py", ())
    assert options.wish == Wish()
    assert (options.hostfile, options.master_addr, options.master_port, options.node_rank) == (None,) * 4
    assert (options.launcher, options.launcher_args, options.elastic_nodes) == ("ssh", (), None)
    assert not any((options.module, options.no_python, options.no_local_rank, options.save_pid))


def test_own_flags_before_the_script():
    words = "--num_gpus=2 -i localhost:0 --master_port 7 --no_local_rank --enable_each_rank_log logs -q train.py"
    options = parse(words.split())
    assert (options.wish.num_slots, options.wish.include) == (2, "localhost:0")
    assert options.master_port == 7
    assert options.no_local_rank
    assert options.each_rank_log == "logs"
    assert options.log_level == "error"
    assert options.target == "train.py"


@pytest.mark.parametrize("flag", ["--num_gpus", "--num_accelerators"])
def test_both_names_of_the_number_of_ranks(flag):
    assert parse([flag, "3", "train.py"]).wish.num_slots == 3
    assert parse([flag, "-1", "train.py"]).wish.num_slots is None


@given(SCRIPT_WORDS)
def test_words_after_the_script_are_untouched(words):
    options = parse(["--num_gpus", "2", "train.py", *words])
    assert options.target_args == tuple(words)
    assert options.wish.num_slots == 2


def test_script_words_that_look_like_ours_stay_the_scripts():
    words = ["--num_gpus", "9", "--help", "--hostfile", "h", "--", "-q", "--k=a b", "it's", '5"', '{"a": 1}']
    options = parse(["train.py", *words])
    assert options.target_args == tuple(words)
    assert options.wish == Wish()


def test_double_dash_ends_our_flags():
    assert parse(["-q", "--", "-odd.py", "x"])[:2] == ("-odd.py", ("x",))


@pytest.mark.parametrize(
    ("words", "message"),
    [
        ([], "no script"),
        (["--num_gpus", "2"], "no script"),
        (["--num_gpus", "0", "t.py"], "at least 1"),
        (["--num_gpus", "two", "t.py"], "'two'"),
        (["--num_nodes", "0", "t.py"], "--num_nodes is 0"),
        (["--master_addr", "", "t.py"], "--master_addr is empty"),
        (["--node_rank", "-2", "t.py"], "numbered from 0"),
        (["--no_ssh", "t.py"], "say which with --node_rank"),
        (["--launcher", "rsh", "t.py"], "rsh"),
        (["--launcher_args", "'", "t.py"], '--launcher_args is "\'"'),
        (["--min_elastic_nodes", "2", "t.py"], "need --elastic_training"),
        (["--elastic_training", "--min_elastic_nodes", "3", "--max_elastic_nodes", "2", "t.py"], "3 to 2"),
        (["--node_timeout", "0", "t.py"], "--node_timeout is 0"),
        (["--autotuning", "run", "t.py"], "--autotuning would start the script many times"),
        (["--module", "--no_python", "t"], "exclude each other"),
        (["--num_gpu", "2", "t.py"], "--num_gpu"),
        (["--log_level", "loud", "t.py"], "loud"),
    ],
)
def test_faults_are_named(words, message):
    with pytest.raises(UsageError, match=message):
        parse(words)


def test_flags_for_several_hosts():
    words = "-H hosts --num_nodes 2 --launcher pdsh --ssh_port 7 --no_ssh_check --force_multi --venv_script v/activate"
    options = parse([*words.split(), "--launcher_args", "-F 'my file' -v", "--node_rank", "1", "train.py"])
    assert (options.hostfile, options.wish.num_hosts, options.launcher, options.ssh_port) == ("hosts", 2, "pdsh", 7)
    assert options.launcher_args == ("-F", "my file", "-v")
    assert options.ssh_asks
    assert options.force_multi
    assert (options.venv_script, options.node_rank) == ("v/activate", 1)


@pytest.mark.parametrize(("flag", "expected"), [([], None), (["--node_rank", "-1"], None), (["--node_rank", "0"], 0)])
def test_node_rank(flag, expected):
    assert parse([*flag, "train.py"]).node_rank == expected


@pytest.mark.parametrize(
    ("words", "expected"),
    [
        ("", (1, 0)),
        ("--min_elastic_nodes 2", (2, 0)),
        ("--min_elastic_nodes 2 --max_elastic_nodes 4", (2, 4)),
        ("--min_elastic_nodes -1 --max_elastic_nodes -1", (1, 0)),
    ],
)
def test_elastic_nodes(words, expected):
    assert parse(["--elastic_training", *words.split(), "train.py"]).elastic_nodes == expected


@pytest.mark.parametrize(
    ("words", "expected"),
    [([], None), (["--bind_cores_to_rank"], ""), (["--bind_core_list", "0-3"], "0-3")],
)
def test_binding_of_cores(words, expected):
    assert parse([*words, "train.py"]).bind_cores == expected
