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
       fullspeed report

commands:
  run      start a script in several ranks on this host (the default); `fullspeed run --help` lists its flags
  report   print versions, device, backends and cores

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
    from fullspeed.launcher.local import launch

    outcome = launch(options)
    if outcome.cause:
        print(f"\nfullspeed: {outcome.cause}", file=sys.stderr)
    return outcome.exit_code


def report(words: Sequence[str]) -> int:
    """Print what FullSpeed finds on this machine."""
    if words:
        print(f"fullspeed: error: report takes no words, but got {' '.join(words)!r}", file=sys.stderr)
        return USAGE_EXIT_CODE
    from fullspeed.cli.report import collect

    rows = collect()
    width = max(len(name) for name, _ in rows)
    for name, value in rows:
        print(f"{name:<{width}}  {value}")
    return 0


COMMANDS: dict[str, Callable[[Sequence[str]], int]] = {"run": run, "report": report}

if __name__ == "__main__":
    sys.exit(main())
