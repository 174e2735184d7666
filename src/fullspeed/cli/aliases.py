"""Commands under the names of DeepSpeed's; the distribution in the folder `compat` installs them."""

from __future__ import annotations

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


def ds_bench() -> int:
    """`ds_bench [flags]`: measure collectives, with the flags of `fullspeed bench comm`."""
    return main(["bench", "comm", *sys.argv[1:]])
