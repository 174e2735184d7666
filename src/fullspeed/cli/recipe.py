"""`fullspeed recipe`: job descriptions for platforms that start the nodes themselves."""

from __future__ import annotations

import argparse
from collections.abc import Sequence

from fullspeed.base.errors import UsageError
from fullspeed.launcher.options import parse, split_at_script
from fullspeed.launcher.recipes import Job, azureml, kubernetes

PLATFORMS = {"kubernetes": kubernetes, "azureml": azureml}


def write(words: Sequence[str]) -> str:
    """The description that `words` ask for, as YAML. Raises UsageError."""
    parser = argparse.ArgumentParser(
        prog="fullspeed recipe",
        description="Print a job description for a platform that starts the nodes itself.",
        usage="fullspeed recipe kubernetes|azureml [flags] [-- launcher flags] script.py [words for the script]",
        allow_abbrev=False,
    )
    parser.add_argument("--name", default="fullspeed", help="name of the job (default: %(default)s)")
    parser.add_argument("--nodes", type=int, default=1, metavar="N", help="nodes (default: %(default)s)")
    parser.add_argument("--gpus", type=int, default=1, metavar="N", help="devices of each node (default: %(default)s)")
    parser.add_argument("--image", required=True, help="container image with the script and FullSpeed")
    parser.add_argument("--compute", default="", metavar="CLUSTER", help="azureml: name of the cluster")
    platform, own, rest = _split(parser, words)
    given = parser.parse_args(own)
    if given.nodes < 1 or given.gpus < 1:
        raise UsageError(f"--nodes is {given.nodes} and --gpus {given.gpus}; both must be at least 1")
    if (platform == "azureml") != bool(given.compute):
        raise UsageError("--compute names the cluster of an azureml job; give it there, and only there")
    parse(rest)  # a mistake is better found now than in the cluster
    job = Job(given.name, tuple(rest), given.nodes, given.gpus, given.image, given.compute)
    return PLATFORMS[platform](job)


def _split(parser: argparse.ArgumentParser, words: Sequence[str]) -> tuple[str, list[str], list[str]]:
    """The platform, this command's own flags, and the launcher's flags with the script."""
    if not words or words[0] not in PLATFORMS:
        if set(words) & {"-h", "--help"}:
            return "", list(words), []
        raise UsageError(f"recipe is for {' or '.join(PLATFORMS)}; see `fullspeed recipe --help`")
    return words[0], *split_at_script(parser, words[1:])
