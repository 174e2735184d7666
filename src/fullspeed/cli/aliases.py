"""Commands under the names of DeepSpeed's; the distribution in the folder `compat` installs them."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence

from fullspeed.cli.main import main

_REPORT_SWITCHES = ("--hide_operator_status", "--hide_errors_and_warnings")  # there is nothing to hide
_UNITS = {"": 1, "K": 1 << 10, "M": 1 << 20, "G": 1 << 30}


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
    """`ds_io --folder FOLDER [flags]`: how fast a disk is at one setting, or over a sweep where none is given."""
    parser = argparse.ArgumentParser(prog="ds_io", description=ds_io.__doc__)
    add = parser.add_argument
    add("--folder", default=".", help="where to write (here)")
    add("--io_size", type=_nbytes, default=4096, help="bytes of the file; at least 1 MiB is moved (4K)")
    add("--read", action="store_true", help="report reading only")
    add("--block_size", type=_nbytes, help="bytes of a request")
    add("--queue_depth", type=int, help="requests under way at once")
    add("--loops", type=int, default=3, help="transfers of which the median counts (3)")
    given, rest = parser.parse_known_args()
    _say_what_is_ignored("ds_io", rest)
    words = [given.folder, "--mib", _mib(given.io_size), "--trials", str(given.loops)]
    words += ["--block-kib", str(-(-given.block_size // 1024))] if given.block_size else []
    words += ["--depth", str(given.queue_depth)] if given.queue_depth else []
    return main(["bench", "io", *words, *(["--only", "read"] if given.read else [])])


def ds_nvme_tune() -> int:
    """`ds_nvme_tune --nvme_dir FOLDER... [flags]`: the best `aio` block for each folder's disk."""
    parser = argparse.ArgumentParser(prog="ds_nvme_tune", description=ds_nvme_tune.__doc__)
    add = parser.add_argument
    add("--nvme_dir", nargs="+", required=True, help="folders, one on each disk")
    add("--io_size", type=_nbytes, default=400 << 20, help="bytes of the file (400M)")
    add("--no_read", action="store_true", help="choose by writing only")
    add("--no_write", action="store_true", help="choose by reading only")
    add("--loops", type=int, default=3, help="transfers of which the median counts (3)")
    given, rest = parser.parse_known_args()
    if given.no_read and given.no_write:
        parser.error("--no_read and --no_write leave nothing to measure")
    _say_what_is_ignored("ds_nvme_tune", rest)
    only = ["--only", "write" if given.no_read else "read"] if given.no_read or given.no_write else []
    words = ["--mib", _mib(given.io_size), "--trials", str(given.loops), *only]
    return max(main(["bench", "io", folder, *words]) for folder in given.nvme_dir)


def _nbytes(text: str) -> int:
    """A size such as 4K, 64M or 1G."""
    number, unit = (text[:-1], text[-1].upper()) if text[-1:].upper() in _UNITS else (text, "")
    try:
        return int(number) * _UNITS[unit]
    except ValueError:
        raise argparse.ArgumentTypeError(f"{text!r} is no size; write bytes, or a number with K, M or G") from None


def _mib(nbytes: int) -> str:
    return str(max(1, nbytes >> 20))


def _say_what_is_ignored(program: str, words: Sequence[str]) -> None:
    if words:
        print(f"{program}: without effect here: {' '.join(words)}", file=sys.stderr)


def ds_bench() -> int:
    """`ds_bench [flags]`: measure collectives, with the flags of `fullspeed bench comm`."""
    return main(["bench", "comm", *sys.argv[1:]])
