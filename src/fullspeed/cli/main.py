"""Entry of the `fullspeed` command: chooses the subcommand; a command line without one is `run`.

Importing and parsing cost no torch; each subcommand imports what it needs when it runs.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence

from fullspeed import __version__
from fullspeed.base.errors import FullSpeedError
from fullspeed.launcher.options import parse

HELP = """\
usage: fullspeed [run] [flags] script.py [words for the script]
       fullspeed elastic -c ds_config.json [-w devices]
       fullspeed recipe kubernetes|azureml --image IMAGE [flags] script.py [words]
       fullspeed report [--json]
       fullspeed config check ds_config.json [--ranks N] [--params P]
       fullspeed plot RUN [-o curves.png]
       fullspeed bench comm [--ranks N] [flags]
       fullspeed bench io [FOLDER] [flags]
       fullspeed bench memory [flags]
       fullspeed convert COMMAND CHECKPOINT OUTPUT [flags]

commands:
  run      start a script in several ranks (the default); `fullspeed run --help` lists its flags
  elastic  print the numbers of devices that an elastic configuration can run on
  recipe   print a job description for a platform that starts the nodes itself
  report   print versions, device, kernels, backends and cores
  config   print what a configuration asks for, what of it does nothing, and the memory it needs
  plot     draw the curves that json_monitor or csv_monitor wrote
  bench    measure collectives over sizes, beside the backend's own; a disk, for the best aio settings; or memory
  convert  turn checkpoints, FullSpeed's or DeepSpeed's, into other files

options:
  -h, --help   show this text
  --version    print the version
"""
USAGE_EXIT_CODE = 2


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command line and return its exit code."""
    words = list(sys.argv[1:] if argv is None else argv)
    if not words or words[0] in ("-h", "--help"):
        print(HELP, end="")
        return 0 if words else USAGE_EXIT_CODE
    if words[0] == "--version":
        print(f"fullspeed {__version__}")
        return 0
    command = COMMANDS.get(words[0])
    try:
        return run(words) if command is None else command(words[1:])
    except FullSpeedError as error:
        print(f"fullspeed: error: {error}", file=sys.stderr)
        return USAGE_EXIT_CODE


def run(words: Sequence[str]) -> int:
    """Start a script; returns its exit code, after showing the first cause when it failed."""
    options = parse(words)
    if options.as_deepspeed:
        from fullspeed.compat import activate_children

        activate_children()
    from fullspeed.launcher.launch import launch

    exit_code, cause = launch(options)
    if cause:
        print(f"\nfullspeed: {cause}", file=sys.stderr)
    return exit_code


def node(words: Sequence[str]) -> int:
    """Run one node's ranks of a job that another host started: the order, and which node this is."""
    from fullspeed.launcher.node import end_with_input, run_node
    from fullspeed.launcher.order import NodeOrder

    order = NodeOrder.from_word(words[0])
    if order.ends_with_stdin:
        end_with_input()
    index = order.find_node(words[1])
    outcome = run_node(order, index)
    if outcome.cause and (index == 0 or not outcome.is_known_to_first):
        print(f"\nfullspeed: {outcome.cause}", file=sys.stderr)
    return outcome.exit_code


def report(words: Sequence[str]) -> int:
    """Print what FullSpeed finds on this machine."""
    from fullspeed.cli.report import describe

    print("\n".join(describe(words)))
    return 0


def config(words: Sequence[str]) -> int:
    """Print what a configuration asks for, or its faults."""
    from fullspeed.cli.config_check import describe

    print("\n".join(describe(words)))
    return 0


def plot(words: Sequence[str]) -> int:
    """Draw the curves of a run."""
    from fullspeed.cli.plot import describe

    print("\n".join(describe(words)))
    return 0


def bench(words: Sequence[str]) -> int:
    """Measure collectives, a disk, or memory."""
    if words and words[0] == "io":
        from fullspeed.cli.bench_io import run as run_io

        return run_io(words[1:])
    if words and words[0] == "memory":
        from fullspeed.cli.bench_memory import run as run_memory

        return run_memory(words[1:])
    from fullspeed.cli.bench_comm import run

    return run(words)


def convert(words: Sequence[str]) -> int:
    """Turn a checkpoint into other files."""
    from fullspeed.cli.convert import describe

    print("\n".join(describe(words)))
    return 0


def elastic(words: Sequence[str]) -> int:
    """Print the sizes of an elastic job."""
    from fullspeed.cli.elastic import describe

    print("\n".join(describe(words)))
    return 0


def recipe(words: Sequence[str]) -> int:
    """Print a job description."""
    from fullspeed.cli.recipe import write

    print(write(words), end="")
    return 0


COMMANDS: dict[str, Callable[[Sequence[str]], int]] = {
    "run": run,
    "node": node,
    "elastic": elastic,
    "recipe": recipe,
    "report": report,
    "config": config,
    "plot": plot,
    "bench": bench,
    "convert": convert,
}

if __name__ == "__main__":
    sys.exit(main())
