"""Models built on the meta device and in another dtype, without touching torch's own settings for good."""

import threading

import pytest
import torch
from torch import nn

from fullspeed.base.errors import UsageError
from fullspeed.sharding.on_device import OnDevice


class Legacy(nn.Module):
    """Parameters and buffers made in every way modules make them."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.Tensor(4, 3))
        self.scale = nn.Parameter(torch.ones(4))
        self.exact = nn.Parameter(torch.zeros(2, dtype=torch.float64))
        self.register_buffer("steps", torch.zeros((), dtype=torch.long))
        self.register_buffer("mean", torch.zeros(4))
        self.register_buffer("positions", torch.arange(4))
        self.register_buffer("frequencies", torch.arange(4.0, device="cpu"))
        nn.init.kaiming_uniform_(self.weight)


def test_everything_is_on_the_device_in_the_dtype() -> None:
    with OnDevice(torch.bfloat16):
        model = nn.Sequential(nn.Embedding(10, 4), nn.Linear(4, 4), nn.LayerNorm(4), nn.LSTM(4, 4), nn.BatchNorm1d(4))
    assert {param.device.type for param in model.parameters()} == {"meta"}
    assert {param.dtype for param in model.parameters()} == {torch.bfloat16}
    assert model[4].running_mean.dtype == torch.bfloat16
    assert model[4].num_batches_tracked.dtype == torch.long


def test_what_is_said_explicitly_is_honoured() -> None:
    with OnDevice(torch.float16):
        model = Legacy()
        linear = nn.Linear(2, 2, dtype=torch.float64)
        here = nn.Linear(2, 2, device="cpu")
    assert (model.weight.device.type, model.weight.dtype) == ("meta", torch.float16)
    assert (model.scale.device.type, model.scale.dtype) == ("meta", torch.float16)
    assert model.exact.dtype == torch.float64
    assert (model.steps.dtype, model.positions.dtype, model.mean.dtype) == (torch.long, torch.long, torch.float16)
    assert (model.frequencies.device.type, model.mean.device.type) == ("cpu", "meta")
    assert (linear.weight.dtype, linear.weight.device.type) == (torch.float64, "meta")
    assert (here.weight.dtype, here.weight.device.type) == (torch.float16, "cpu")


def test_a_real_device_gives_real_values() -> None:
    with OnDevice(torch.float64, device="cpu"):
        linear = nn.Linear(3, 3)
    assert linear.weight.dtype == torch.float64
    assert linear.weight.abs().sum() > 0


def test_data_the_caller_brings_stays() -> None:
    outside = nn.Parameter(torch.ones(3))
    with OnDevice(torch.bfloat16):
        model = nn.Module()
        model.weight = outside
        data = torch.Tensor([1.0, 2.0])
    assert model.weight is outside
    assert data.device.type == "cpu"


def test_torch_is_as_before_afterwards() -> None:
    with pytest.raises(ZeroDivisionError), OnDevice(torch.bfloat16):
        _ = 1 / 0
    assert torch.get_default_dtype() == torch.float32
    assert torch.Tensor(2, 2).device.type == nn.Linear(1, 1).weight.device.type == "cpu"


def test_contexts_nest_and_can_be_entered_again() -> None:
    outer = OnDevice(torch.bfloat16)
    with outer:
        with OnDevice(torch.float64, device="cpu"):
            inner = nn.Linear(2, 2)
        with outer:
            pass
        after = nn.Linear(2, 2)
    assert (inner.weight.dtype, inner.weight.device.type) == (torch.float64, "cpu")
    assert (after.weight.dtype, after.weight.device.type) == (torch.bfloat16, "meta")
    assert torch.get_default_dtype() == torch.float32


def test_disabled_does_nothing() -> None:
    with OnDevice(torch.bfloat16, enabled=False):
        linear = nn.Linear(2, 2)
    assert (linear.weight.dtype, linear.weight.device.type) == (torch.float32, "cpu")


def test_another_thread_builds_on_its_own_device() -> None:
    built: list[nn.Linear] = []
    with OnDevice(torch.float32):
        thread = threading.Thread(target=lambda: built.append(nn.Linear(2, 2)))
        thread.start()
        thread.join()
    assert built[0].weight.device.type == "cpu"


def test_a_meta_model_can_be_given_values() -> None:
    with OnDevice(torch.float32):
        model = nn.Linear(3, 2)
    whole = nn.Linear(3, 2)
    model.to_empty(device="cpu").load_state_dict(whole.state_dict())
    assert torch.equal(model(torch.ones(1, 3)), whole(torch.ones(1, 3)))


@pytest.mark.parametrize("dtype", [torch.int8, "bf16", None])
def test_other_dtypes_are_refused(dtype: object) -> None:
    with pytest.raises(UsageError, match="choose a floating dtype"):
        OnDevice(dtype)  # type: ignore[arg-type]
