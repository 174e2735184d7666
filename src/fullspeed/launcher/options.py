"""The command line of `fullspeed run`: its own flags, then the script and the script's words, untouched."""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from typing import NamedTuple, NoReturn

from fullspeed.base.errors import UsageError
from fullspeed.base.log import LEVELS

# Flags of the DeepSpeed launcher that this one does not have yet, with the number of values they take.
_NOT_YET = {
    "several hosts": {
        "-H": 1,
        "--hostfile": 1,
        "--node_rank": 1,
        "--no_ssh": 0,
        "--no_ssh_check": 0,
        "--ssh_port": 1,
        "--launcher": 1,
        "--launcher_args": 1,
        "--force_multi": 0,
        "--venv_script": 1,
    },
    "elastic training": {"--elastic_training": 0, "--min_elastic_nodes": 1, "--max_elastic_nodes": 1},
    "autotuning": {"--autotuning": 1},
    "binding of cores": {"--bind_cores_to_rank": 0, "--bind_core_list": 1},
}


class LaunchOptions(NamedTuple):
    """What the user asked the launcher for."""

    target: str  # path of the script, name of the module, or program
    target_args: tuple[str, ...]
    num_accelerators: int | None
    include: str
    exclude: str
    master_addr: str
    master_port: int | None  # None: a free one
    module: bool
    no_python: bool
    no_local_rank: bool
    save_pid: bool
    each_rank_log: str | None
    log_level: str
    quiet: bool


class _Parser(argparse.ArgumentParser):
    """argparse that raises instead of ending the process."""

    def error(self, message: str) -> NoReturn:
        raise UsageError(f"{message}; see `fullspeed run --help`")


class _NotYet(argparse.Action):
    """A flag that is known and not offered: saying so is better than ignoring it."""

    def __call__(
        self,
        parser: argparse.ArgumentParser,
        namespace: argparse.Namespace,
        values: object,
        option_string: str | None = None,
    ) -> NoReturn:
        raise UsageError(
            f"{option_string} is for {self.metavar}, which this release does not have; it starts all ranks "
            "on this host. Remove the flag, or start one `torchrun` per host yourself"
        )


def make_parser() -> argparse.ArgumentParser:
    """The parser of the launcher's own flags; the script and its words are split off before it sees them."""
    parser = _Parser(
        prog="fullspeed run",
        usage="fullspeed [run] [flags] script.py [words for the script]",
        description="Start a script in several ranks on this host.",
        allow_abbrev=False,
    )
    add = parser.add_argument
    add(
        "--num_gpus",
        "--num_accelerators",
        type=int,
        metavar="N",
        help="ranks to start: all devices, or 1 on CPU",
    )
    add("--num_nodes", type=int, default=1, metavar="1", help="hosts; this release starts ranks on one")
    add("-i", "--include", default="", metavar="SLOTS", help="only these slots, such as localhost:0,2")
    add("-e", "--exclude", default="", metavar="SLOTS", help="all slots but these")
    add(
        "--master_addr",
        default="127.0.0.1",
        metavar="HOST",
        help="address ranks meet at (default: %(default)s)",
    )
    add("--master_port", type=int, metavar="PORT", help="port ranks meet at (default: a free one)")
    add("--module", action="store_true", help="the script is a module name, as for python -m")
    add("--no_python", action="store_true", help="the script is a program of its own")
    add("--no_local_rank", action="store_true", help="do not pass --local_rank=N to the script")
    add("--save_pid", action="store_true", help="write the launcher's process id to <tmp>/<pid>.deepspeed")
    add("--enable_each_rank_log", metavar="DIR", help="write each rank's output to DIR/<time>_rank<r>.log")
    add("--log_level", default="info", choices=list(LEVELS), help="least level of messages to show")
    add("-q", "--quiet", action="store_true", help="show errors only")
    for subject, flags in _NOT_YET.items():
        for flag, num_values in flags.items():
            add(flag, action=_NotYet, nargs=None if num_values else 0, metavar=subject, help=argparse.SUPPRESS)
    return parser


def parse(words: Sequence[str]) -> LaunchOptions:
    """Options from the words after `fullspeed [run]`. Raises UsageError; `--help` prints and exits."""
    parser = make_parser()
    own, rest = _split(parser, words)
    given = parser.parse_args(own)
    if not rest:
        raise UsageError("no script given; see `fullspeed run --help`")
    if given.num_nodes not in (1, -1):
        raise UsageError(f"--num_nodes is {given.num_nodes}; this release starts ranks on one host only")
    if given.num_gpus is not None and given.num_gpus < 1 and given.num_gpus != -1:
        raise UsageError(f"--num_gpus is {given.num_gpus}; it must be at least 1, or -1 for all")
    if given.module and given.no_python:
        raise UsageError("--module and --no_python exclude each other")
    return LaunchOptions(
        target=rest[0],
        target_args=tuple(rest[1:]),
        num_accelerators=None if given.num_gpus == -1 else given.num_gpus,
        include=given.include,
        exclude=given.exclude,
        master_addr=given.master_addr,
        master_port=given.master_port,
        module=given.module,
        no_python=given.no_python,
        no_local_rank=given.no_local_rank,
        save_pid=given.save_pid,
        each_rank_log=given.enable_each_rank_log,
        log_level="error" if given.quiet else given.log_level,
        quiet=given.quiet,
    )


def _split(parser: argparse.ArgumentParser, words: Sequence[str]) -> tuple[list[str], list[str]]:
    """Cut `words` at the script. Argparse never sees what follows, so it cannot change it."""
    takes_value = {flag for action in parser._actions if action.nargs != 0 for flag in action.option_strings}
    at = 0
    while at < len(words) and words[at].startswith("-"):
        if words[at] == "--":
            return list(words[:at]), list(words[at + 1 :])
        at += 2 if words[at] in takes_value else 1
    return list(words[:at]), list(words[at:])
