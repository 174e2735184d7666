"""The command-line arguments of a training script: `--deepspeed --deepspeed_config ds.json`."""

from __future__ import annotations

import argparse


def add_config_arguments(parser: argparse.ArgumentParser) -> argparse.ArgumentParser:
    """Add `--deepspeed` and `--deepspeed_config PATH` (and their old `deepscale` spellings) to `parser`; return it."""
    group = parser.add_argument_group("FullSpeed", "configuration of the training engine")
    group.add_argument("--deepspeed", action="store_true", help="train with the engine (kept for scripts that ask)")
    group.add_argument("--deepspeed_config", type=str, default=None, metavar="PATH", help="JSON configuration file")
    group.add_argument("--deepscale", action="store_true", help=argparse.SUPPRESS)
    group.add_argument("--deepscale_config", type=str, default=None, help=argparse.SUPPRESS)
    return parser
