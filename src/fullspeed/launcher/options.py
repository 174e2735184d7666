"""The command line of `fullspeed run`: its own flags, then the script and the script's words, untouched."""

from __future__ import annotations

import argparse
import shlex
from collections.abc import Sequence
from typing import NamedTuple, NoReturn

from fullspeed.base.errors import UsageError
from fullspeed.base.log import LEVELS
from fullspeed.launcher.slots import Wish

DEFAULT_HOSTFILE = "/job/hostfile"
LAUNCHERS = ("ssh", "pdsh", "openmpi", "mpich", "impi", "mvapich", "slurm")


class LaunchOptions(NamedTuple):
    """What the user asked the launcher for."""

    target: str  # path of the script, name of the module, or program
    target_args: tuple[str, ...]
    hostfile: str | None  # None: the default one, if it exists
    wish: Wish
    master_addr: str | None  # None: the first host
    master_port: int | None  # None: a free one on one host, else the usual one
    node_rank: int | None  # start this node only
    force_multi: bool
    launcher: str
    launcher_args: tuple[str, ...]
    ssh_port: int | None
    ssh_asks: bool  # whether ssh may ask for a password
    venv_script: str | None
    module: bool
    no_python: bool
    no_local_rank: bool
    as_deepspeed: bool  # scripts that import deepspeed get FullSpeed
    save_pid: bool
    each_rank_log: str | None
    bind_cores: str | None  # a list such as 0-3,8; "" for all cores; None: do not bind
    elastic_nodes: tuple[int, int] | None  # fewest and most nodes of an elastic job
    elastic_wait_s: int
    node_timeout_s: float
    log_level: str
    quiet: bool


class _Parser(argparse.ArgumentParser):
    """argparse that raises instead of ending the process."""

    def error(self, message: str) -> NoReturn:
        raise UsageError(f"{message}; see `fullspeed run --help`")


def make_parser() -> argparse.ArgumentParser:
    """The parser of the launcher's own flags; the script and its words are split off before it sees them."""
    parser = _Parser(
        prog="fullspeed run",
        usage="fullspeed [run] [flags] script.py [words for the script]",
        description="Start a script in several ranks, on this host or on those of a hostfile.",
        allow_abbrev=False,
    )
    _add_place_flags(parser.add_argument_group("where ranks run"))
    _add_node_flags(parser.add_argument_group("several hosts"))
    _add_elastic_flags(parser.add_argument_group("elastic jobs"))
    _add_script_flags(parser.add_argument_group("the script and its output"))
    return parser


def _add_place_flags(group: argparse._ArgumentGroup) -> None:
    add = group.add_argument
    add("-H", "--hostfile", metavar="FILE", help=f"lines 'host slots=N' (default: {DEFAULT_HOSTFILE} if it is there)")
    add("-i", "--include", default="", metavar="SLOTS", help="only these slots, such as work1:0,2@work2")
    add("-e", "--exclude", default="", metavar="SLOTS", help="all slots but these")
    add("--num_nodes", type=int, metavar="N", help="the first N hosts (default: all)")
    add(
        "--num_gpus",
        "--num_accelerators",
        type=int,
        metavar="N",
        help="ranks on each host (default: one per slot; without a hostfile one per device, or 1 on CPU)",
    )
    add("--bind_cores_to_rank", action="store_true", help="give each rank cores of its own")
    add("--bind_core_list", metavar="CORES", help="cores to share out, such as 0-15,32-47 (default: all)")


def _add_node_flags(group: argparse._ArgumentGroup) -> None:
    add = group.add_argument
    add("--master_addr", metavar="HOST", help="address ranks meet at (default: the first host)")
    add("--master_port", type=int, metavar="PORT", help="port ranks meet at (default: 29500; on one host a free one)")
    add("--launcher", default="ssh", choices=LAUNCHERS, help="what starts the nodes (default: %(default)s)")
    add("--launcher_args", default="", metavar="WORDS", help="further words for it, as one shell-quoted text")
    add("--ssh_port", type=int, metavar="PORT", help="port of the hosts' ssh servers")
    add("--no_ssh_check", action="store_true", help="let ssh ask for passwords instead of failing")
    add("--no_ssh", action="store_true", help="start only this node; run the command on every host, with --node_rank")
    add("--node_rank", type=int, metavar="N", help="index of this node; implies --no_ssh")
    add("--force_multi", action="store_true", help="reach the host as one of several, even if it is one and this one")
    add("--venv_script", metavar="FILE", help="script to source on every host before Python starts")
    add("--node_timeout", type=float, default=30, metavar="S", help="end when a host is silent so long (%(default)s)")


def _add_elastic_flags(group: argparse._ArgumentGroup) -> None:
    add = group.add_argument
    add("--elastic_training", action="store_true", help="restart the ranks when a node is lost or joins")
    add("--min_elastic_nodes", type=int, metavar="N", help="fewest nodes to go on with (default: 1)")
    add("--max_elastic_nodes", type=int, metavar="N", help="most nodes (default: those there are)")
    add("--elastic_wait", type=int, default=30, metavar="S", help="wait so long for more nodes (default: %(default)s)")


def _add_script_flags(group: argparse._ArgumentGroup) -> None:
    add = group.add_argument
    add("--module", action="store_true", help="the script is a module name, as for python -m")
    add("--no_python", action="store_true", help="the script is a program of its own")
    add("--no_local_rank", action="store_true", help="do not pass --local_rank=N to the script")
    add(
        "--as-deepspeed", "--as_deepspeed", action="store_true", help="`import deepspeed` in the script gives FullSpeed"
    )
    add("--save_pid", action="store_true", help="write the launcher's process id to <tmp>/<pid>.deepspeed")
    add("--enable_each_rank_log", metavar="DIR", help="write each rank's output to DIR/<time>_rank<r>.log")
    add("--log_level", default="info", choices=list(LEVELS), help="least level of messages to show")
    add("-q", "--quiet", action="store_true", help="show errors only")
    add("--autotuning", choices=("tune", "run"), help=argparse.SUPPRESS)


def parse(words: Sequence[str]) -> LaunchOptions:
    """Options from the words after `fullspeed [run]`. Raises UsageError; `--help` prints and exits."""
    parser = make_parser()
    own, rest = split_at_script(parser, words)
    given = parser.parse_args(own)
    if not rest:
        raise UsageError("no script given; see `fullspeed run --help`")
    _check(given)
    is_bound = given.bind_cores_to_rank or given.bind_core_list is not None
    return LaunchOptions(
        target=rest[0],
        target_args=tuple(rest[1:]),
        hostfile=given.hostfile,
        wish=Wish(_count("--num_nodes", given), _count("--num_gpus", given), given.include, given.exclude),
        master_addr=given.master_addr,
        master_port=given.master_port,
        node_rank=_node_rank(given),
        force_multi=given.force_multi,
        launcher=given.launcher,
        launcher_args=_shell_words(given.launcher_args),
        ssh_port=given.ssh_port,
        ssh_asks=given.no_ssh_check,
        venv_script=given.venv_script,
        module=given.module,
        no_python=given.no_python,
        no_local_rank=given.no_local_rank,
        as_deepspeed=given.as_deepspeed,
        save_pid=given.save_pid,
        each_rank_log=given.enable_each_rank_log,
        bind_cores=(given.bind_core_list or "") if is_bound else None,
        elastic_nodes=_elastic_nodes(given),
        elastic_wait_s=given.elastic_wait,
        node_timeout_s=given.node_timeout,
        log_level="error" if given.quiet else given.log_level,
        quiet=given.quiet,
    )


def _check(given: argparse.Namespace) -> None:
    """Refuse what cannot be, and what each value alone does not show."""
    if given.autotuning:
        raise UsageError(
            "--autotuning would start the script many times with changed configurations; the launcher starts it once. "
            "Remove the flag"
        )
    if given.module and given.no_python:
        raise UsageError("--module and --no_python exclude each other")
    if given.master_addr is not None and not given.master_addr.strip():
        raise UsageError("--master_addr is empty; give the address of the first host, or leave the flag out")
    for flag, least in (("--elastic_wait", 1), ("--node_timeout", 1)):
        value = getattr(given, flag[2:])
        if value < least:
            raise UsageError(f"{flag} is {value:g}; it must be at least {least} s")


def _count(flag: str, given: argparse.Namespace) -> int | None:
    """A number of hosts or ranks; -1, like no flag, stands for all."""
    value: int | None = getattr(given, flag[2:])
    if value is not None and value < 1 and value != -1:
        raise UsageError(f"{flag} is {value}; it must be at least 1, or -1 for all")
    return None if value == -1 else value


def _node_rank(given: argparse.Namespace) -> int | None:
    """Index of the one node to start here, or None to start all."""
    rank: int | None = None if given.node_rank == -1 else given.node_rank
    if rank is not None and rank < 0:
        raise UsageError(f"--node_rank is {rank}; nodes are numbered from 0")
    if given.no_ssh and rank is None:
        raise UsageError("--no_ssh starts one node only; say which with --node_rank")
    return rank


def _elastic_nodes(given: argparse.Namespace) -> tuple[int, int] | None:
    """Fewest and most nodes; a most of 0 stands for all there are."""
    if not given.elastic_training:
        if given.min_elastic_nodes is not None or given.max_elastic_nodes is not None:
            raise UsageError("--min_elastic_nodes and --max_elastic_nodes need --elastic_training")
        return None
    low, high = given.min_elastic_nodes, given.max_elastic_nodes
    low, high = (1 if low in (None, -1) else low), (0 if high in (None, -1) else high)
    if low < 1 or high < 0 or (high and high < low):
        raise UsageError(f"elastic nodes are {low} to {high}; the least must be at least 1, the most not below it")
    return low, high


def _shell_words(text: str) -> tuple[str, ...]:
    try:
        return tuple(shlex.split(text))
    except ValueError as error:
        raise UsageError(f"--launcher_args is {text!r}: {error}; quote it as for a shell") from None


def split_at_script(parser: argparse.ArgumentParser, words: Sequence[str]) -> tuple[list[str], list[str]]:
    """Cut `words` at the script, or behind the first `--`. Argparse never sees what follows, so it cannot change it."""
    takes_value = {flag for action in parser._actions if action.nargs != 0 for flag in action.option_strings}
    at = 0
    while at < len(words) and words[at].startswith("-"):
        if words[at] == "--":
            return _attach(words[:at], takes_value), list(words[at + 1 :])
        at += 2 if words[at] in takes_value else 1
    return _attach(words[:at], takes_value), list(words[at:])


def _attach(words: Sequence[str], takes_value: set[str]) -> list[str]:
    """The same flags with each value in the flag's word: argparse would take a value such as `-o X` for a flag."""
    attached, at = [], 0
    while at < len(words):
        is_pair = words[at] in takes_value and words[at].startswith("--") and at + 1 < len(words)
        attached.append(f"{words[at]}={words[at + 1]}" if is_pair else words[at])
        at += 2 if is_pair else 1
    return attached
