"""`fullspeed config check`: what a configuration asks for, what of it does nothing, and what it needs."""

from __future__ import annotations

import argparse
import json
from collections.abc import Sequence

from fullspeed.base.errors import UsageError
from fullspeed.config import Config, check_ranks, load_config, resolve_batch, unresolved_auto
from fullspeed.config.idle import idle_settings
from fullspeed.sharding.estimate import FP32_ADAM, MIXED_ADAM, model_state_bytes


def describe(words: Sequence[str]) -> list[str]:
    """Lines about the configuration that `words` name. Raises ConfigError with every fault it has."""
    parser = argparse.ArgumentParser(prog="fullspeed config", description="Look at a configuration file.")
    commands = parser.add_subparsers(required=True)
    check = commands.add_parser("check", help="list faults, values, idle settings and memory")
    check.add_argument("file", metavar="FILE", help="a JSON configuration")
    check.add_argument("-r", "--ranks", type=int, default=1, metavar="N", help="data-parallel ranks (1)")
    check.add_argument("-p", "--params", type=float, metavar="P", help="parameters of the model, such as 7e9")
    given = parser.parse_args(list(words))
    if given.ranks < 1:
        raise UsageError(f"--ranks is {given.ranks}; it must be at least 1")
    if given.params is not None and given.params < 1:
        raise UsageError(f"--params is {given.params:g}; it must be at least 1")
    config = load_config(given.file)
    lines = [f"{given.file}: no faults", "", "values that are not the default"]
    lines += json.dumps(config.model_dump(exclude_defaults=True), indent=2).splitlines()
    lines += ["", *_batch(config, given.ranks)]
    idle = idle_settings(config)
    if idle:
        lines += ["", "settings that do nothing", *(f"  {path}: {reason}" for path, reason in idle)]
    if given.params is not None:
        lines += ["", *_memory(config, int(given.params), given.ranks)]
    return lines


def _batch(config: Config, num_ranks: int) -> list[str]:
    waiting = unresolved_auto(config)
    if waiting:
        return [f'"auto", for an integration to fill in: {", ".join(waiting)}']
    check_ranks(config, num_ranks)
    batch = resolve_batch(config, num_ranks, "--ranks")
    return [
        f"on {num_ranks} ranks: {batch.train_batch_size} samples per update = {batch.micro_batch_size} per forward "
        f"* {batch.grad_accum_steps} accumulation steps * {num_ranks}"
    ]


def _memory(config: Config, num_params: int, num_ranks: int) -> list[str]:
    is_mixed = config.precision_dtype() != "fp32"
    held = model_state_bytes(
        num_params, num_ranks, config.zero_optimization.stage, MIXED_ADAM if is_mixed else FP32_ADAM
    )
    parts = ", ".join(f"{name} {nbytes / 2**30:.2f}" for name, nbytes in held._asdict().items())
    return [
        f"model states of {num_params:.3g} parameters with Adam: {held.total / 2**30:.2f} GiB on each rank",
        f"  ({parts}; activations are not in it)",
    ]
