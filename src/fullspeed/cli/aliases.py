"""Commands under the names of DeepSpeed's; the distribution in the folder `compat` installs them."""

from __future__ import annotations

import argparse
import sys

from fullspeed.cli.main import main

_REPORT_SWITCHES = ("--hide_operator_status", "--hide_errors_and_warnings")  # there is nothing to hide


def deepspeed() -> int:
    """`deepspeed [flags] script.py [words]`: start a script in several ranks."""
    return main(["run", *sys.argv[1:]])


def ds_report() -> int:
    """`ds_report`: what is found on this machine."""
    return main(["report", *(word for word in sys.argv[1:] if word not in _REPORT_SWITCHES)])


def ds_elastic() -> int:
    """`ds_elastic -c ds_config.json [-w devices]`: what sizes an elastic configuration can run on."""
    return main(["elastic", *sys.argv[1:]])


def zero_to_fp32() -> int:
    """`zero_to_fp32.py CHECKPOINT OUTPUT [flags]`: weights in fp32."""
    return main(["convert", "to-fp32", *(word for word in sys.argv[1:] if word not in ("-d", "--debug"))])


def ds_to_universal() -> int:
    """`ds_to_universal --input_folder CHECKPOINT --output_folder OUTPUT`: a universal checkpoint."""
    parser = argparse.ArgumentParser(prog="ds_to_universal", description=ds_to_universal.__doc__)
    parser.add_argument("--input_folder", required=True)
    parser.add_argument("--output_folder", required=True)
    given, _ = parser.parse_known_args()  # the others are about DeepSpeed's way of working
    return main(["convert", "to-universal", given.input_folder, given.output_folder])


def ds_io() -> int:
    """`ds_io --folder FOLDER`: measure a disk."""
    parser = argparse.ArgumentParser(prog="ds_io", description=ds_io.__doc__)
    parser.add_argument("--folder", default=".")
    given, _ = parser.parse_known_args()  # the sweep chooses sizes and depths itself
    return main(["bench", "io", given.folder])


def ds_bench() -> int:
    """`ds_bench [flags]`: measure collectives, with the flags of `fullspeed bench comm`."""
    return main(["bench", "comm", *sys.argv[1:]])
