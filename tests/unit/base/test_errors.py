"""Errors can be caught by kind, and a configuration error tells every fault."""

from __future__ import annotations

import pytest

from fullspeed.base import errors
from fullspeed.base.errors import ConfigError, ConfigFault


def test_one_fault_is_one_sentence():
    fault = ConfigFault("zero_optimization.stage", 4, "choose 0, 1, 2 or 3")
    assert str(ConfigError([fault])) == "zero_optimization.stage is 4: choose 0, 1, 2 or 3"


def test_every_fault_is_told_with_its_fix():
    faults = [
        ConfigFault("a", "x", "must be a number", "remove the quotes"),
        ConfigFault("b", -1, "must be positive"),
    ]
    error = ConfigError(faults)
    assert error.faults == tuple(faults)
    assert str(error).splitlines() == [
        "2 faults in the configuration:",
        "  - a is 'x': must be a number; remove the quotes",
        "  - b is -1: must be positive",
    ]


def test_plain_text_has_no_faults():
    assert ConfigError("no such file").faults == ()


@pytest.mark.parametrize(
    ("kind", "builtin"),
    [
        (ConfigError, ValueError),
        (errors.UsageError, RuntimeError),
        (errors.CommError, RuntimeError),
        (errors.CheckpointError, RuntimeError),
        (errors.LossScaleError, RuntimeError),
    ],
)
def test_kinds(kind, builtin):
    assert issubclass(kind, errors.FullSpeedError)
    assert issubclass(kind, builtin)
