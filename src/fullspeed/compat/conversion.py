"""DeepSpeed's converter to universal checkpoints as a function."""

from __future__ import annotations

from typing import Any

from fullspeed.checkpoint.relayout import convert_to_universal


def main(args: Any) -> None:
    """Convert `args.input_folder`, one checkpoint's folder, into `args.output_folder`.

    What else DeepSpeed's command has tells it how to work, and does not matter here.
    """
    convert_to_universal(args.input_folder, args.output_folder)
