"""The best implementation that can run is chosen, unless a name is asked for; and why is known."""

from __future__ import annotations

import pytest
import torch

from fullspeed.base.errors import UsageError
from fullspeed.kernels import registry
from fullspeed.kernels.registry import Implementation, Op, choices, runs_anywhere, using

CPU, META = torch.device("cpu"), torch.device("meta")


def only_on_meta(device: torch.device) -> str:
    return "" if device.type == "meta" else f"not for {device.type}"


@pytest.fixture
def op(monkeypatch: pytest.MonkeyPatch) -> Op:
    monkeypatch.setattr(registry, "_ops", {})
    return Op(
        "root",
        Implementation("fast", "math:isqrt", only_on_meta),
        Implementation("torch", "math:sqrt", runs_anywhere),
    )


def test_the_best_that_can_run_is_chosen(op):
    assert op.on(META)(9) == 3
    assert isinstance(op.on(META)(9), int)
    assert isinstance(op.on(CPU)(9), float)
    assert [(choice.implementation, choice.reason) for choice in choices(CPU)] == [("torch", "fast: not for cpu")]
    assert op.choice(META).reason == "the best there is"


def test_a_name_can_be_asked_for_in_a_block(op):
    assert isinstance(op.on(META)(9), int)
    with using(root="torch"):
        assert isinstance(op.on(META)(9), float)
        assert op.choice(META).reason == "asked for by name"
    assert isinstance(op.on(META)(9), int)
    with pytest.raises(UsageError, match="cannot run on cpu: not for cpu"), using(root="fast"):
        op.on(CPU)
    with pytest.raises(UsageError, match=r"no implementation 'slow'; it has fast, torch"), using(root="slow"):
        pass
    with pytest.raises(UsageError, match=r"no operation 'roof'; there are root"), using(roof="fast"):
        pass


@pytest.mark.parametrize("value", ["torch", "root=torch", "other=x, root=torch", "fast,torch", "root=fast,root=torch"])
def test_the_environment_names_one(op, monkeypatch, value):
    monkeypatch.setenv(registry.VARIABLE, value)
    assert op.choice(META).implementation == "torch"
    with using(root="fast"):
        assert op.choice(META).implementation == "fast"


def test_a_wrong_name_in_the_environment_is_an_error(op, monkeypatch):
    monkeypatch.setenv(registry.VARIABLE, "root=slow")
    with pytest.raises(UsageError, match="no implementation 'slow'"):
        op.on(CPU)


def test_quantisation_runs_natively_on_the_cpu_where_the_library_can():
    import fullspeed.kernels.quantize  # noqa: F401
    from fullspeed.kernels.native import needs_native

    found = {choice.op: choice for choice in choices(CPU)}
    assert {"quantize", "dequantize", "dequantize_sum"} <= found.keys()
    assert found["quantize"].implementation == ("torch" if needs_native(CPU) else "native")
    assert "triton" in found["quantize"].reason
