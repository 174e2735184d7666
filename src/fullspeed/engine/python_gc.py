"""Switching Python's cycle collector off while engines that ask for it live (`disable_python_gc`)."""

from __future__ import annotations

import gc

_num_holders = 0
_was_enabled = False


def hold_off() -> None:
    """One more engine wants the collector off."""
    global _num_holders, _was_enabled
    if _num_holders == 0:
        _was_enabled = gc.isenabled()
        gc.disable()
    _num_holders += 1


def let_go() -> None:
    """One engine fewer; the last one restores the collector."""
    global _num_holders
    _num_holders -= 1
    if _num_holders == 0 and _was_enabled:
        gc.enable()
