"""`fullspeed convert`: checkpoints, ours or DeepSpeed's, into other files, without a training job."""

from __future__ import annotations

import argparse
import pathlib
from collections.abc import Sequence

import torch

from fullspeed.checkpoint.convert import convert_zero_checkpoint_to_state_dict
from fullspeed.checkpoint.deepspeed.write import Target
from fullspeed.checkpoint.relayout import convert_to_deepspeed, convert_to_fullspeed, convert_to_universal
from fullspeed.sharding.placement import placement_of

_DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16, "stored": None}


def describe(words: Sequence[str]) -> list[str]:
    """Convert, and return lines that say what was written."""
    given = _parser().parse_args(list(words))
    if given.to == "to-universal":
        return [str(convert_to_universal(given.checkpoint, given.output, given.tag))]
    if given.to == "from-deepspeed":
        return [str(convert_to_fullspeed(given.checkpoint, given.output, given.tag))]
    if given.to == "to-deepspeed":
        return [str(convert_to_deepspeed(given.checkpoint, given.output, _target(given), given.tag))]
    written = convert_zero_checkpoint_to_state_dict(
        given.checkpoint,
        given.output,
        given.max_shard_size,
        given.to == "to-safetensors" or given.safe_serialization,
        given.tag,
        given.exclude_frozen_parameters,
        torch.float32 if given.to == "to-fp32" else _DTYPES[given.dtype],
    )
    return [f"{path}  {path.stat().st_size / 1e6:.1f} MB" for path in written]


def _target(given: argparse.Namespace) -> Target:
    placement = placement_of(given.stage)
    return Target(given.stage, given.ranks, placement.params, placement.optim, config={})


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="fullspeed convert", description="Checkpoints into other files; ours and DeepSpeed's are read alike."
    )
    commands = parser.add_subparsers(dest="to", required=True, metavar="COMMAND")
    weights = {
        "to-fp32": "weights in fp32, of trained parameters the masters",
        "to-torch": "weights as state dicts of torch.save",
        "to-safetensors": "weights as files that from_pretrained loads",
    }
    whole = {
        "to-universal": "a universal checkpoint",
        "to-deepspeed": "DeepSpeed's files, as a number of ranks would have written them",
        "from-deepspeed": "a checkpoint in FullSpeed's layout",
    }
    for name, text in {**weights, **whole}.items():
        command = commands.add_parser(name, help=text, description=text)
        command.add_argument("checkpoint", type=pathlib.Path, help="directory given to save_checkpoint")
        command.add_argument("output", type=pathlib.Path, help="directory to write to")
        command.add_argument("-t", "--tag", help="which checkpoint; by default the one named in `latest`")
        if name in weights:
            _add_weight_flags(command, with_dtype=name != "to-fp32")
        if name == "to-deepspeed":
            command.add_argument("--stage", type=int, choices=range(4), default=2, help="ZeRO stage; 2 by default")
            command.add_argument("--ranks", type=_positive, default=1, help="data-parallel ranks; 1 by default")
    return parser


def _positive(word: str) -> int:
    if not word.isdigit() or int(word) < 1:
        raise argparse.ArgumentTypeError(f"{word!r} is no number of ranks; give 1 or more")
    return int(word)


def _add_weight_flags(command: argparse.ArgumentParser, *, with_dtype: bool) -> None:
    command.add_argument("--max_shard_size", default="5GB", help="bytes in a file, such as 5GB, which is the default")
    command.add_argument("--safe_serialization", action="store_true", help="write safetensors files")
    command.add_argument("--exclude_frozen_parameters", action="store_true", help="only parameters that were trained")
    if with_dtype:
        command.add_argument("--dtype", choices=_DTYPES, default="stored", help="of values; as stored by default")
