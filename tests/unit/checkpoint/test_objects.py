"""Other state is loadable without trust, or refused by name when saving."""

from __future__ import annotations

import collections
import pathlib

import numpy as np
import pytest
import torch

from fullspeed.base.errors import CheckpointError
from fullspeed.checkpoint import objects
from fullspeed.checkpoint.objects import pack, unpack


def test_round_trip(tmp_path):
    state = {
        "n": 3, "f": 0.5, "s": "text", "none": None, "t": torch.arange(3), "l": [1, (2, "x")],
        "d": collections.OrderedDict(a=torch.float16, b=torch.Size([1, 2])), "big": 2**70,
    }  # fmt: skip
    path = tmp_path / "o.pt"
    path.write_bytes(pack(state))
    loaded = unpack(path)
    assert torch.equal(loaded.pop("t"), state.pop("t"))
    assert loaded == state


class Custom:
    pass


@pytest.mark.parametrize(
    ("value", "name", "kind"),
    [
        ({"a": {"b": [1, np.zeros(2)]}}, r"a\['b'\]\[1\]", "numpy.ndarray"),
        ({"p": pathlib.PurePosixPath("x")}, "p", "PurePosixPath"),
        ({"ok": 1, "c": Custom()}, "c", "Custom"),
        ({"f": lambda: 0}, "f", "function"),
        ({"d": collections.defaultdict(int)}, "d", "defaultdict"),
    ],
)
def test_the_entry_that_cannot_be_loaded_is_named(value, name, kind):
    with pytest.raises(CheckpointError, match=rf"^{name} is a .*{kind}"):
        pack(value)


def test_what_is_taken_for_loadable_without_a_trial_is(monkeypatch, tmp_path):
    state = {
        "a": [1, 2.5, True, None, ("x", {3: torch.arange(2), "n": float("inf")})],
        "b": [[], (), {}],
        "c": -(2**80),
    }
    monkeypatch.setattr(objects, "_is_loadable", None)
    path = tmp_path / "o.pt"
    path.write_bytes(pack(state))
    assert str(unpack(path)) == str(state)


def test_a_view_is_saved_without_the_rest_of_its_storage():
    assert len(pack({"t": torch.zeros(100_000)[:2]})) < 10_000


def test_a_torn_file_is_named(tmp_path):
    path = tmp_path / "o.pt"
    path.write_bytes(pack({"t": torch.arange(3)})[:50])
    with pytest.raises(CheckpointError, match=r"o\.pt"):
        unpack(path)
