"""A sharded parameter answers what needs no values and raises, or gathers, for what does."""

import copy
import io

import pytest
import torch
from torch import nn

from fullspeed.sharding import placeholder


class ShardedError(Exception):
    pass


class Refusing:
    """An owner that has no values to give."""

    def run(self, tensors: list[torch.Tensor], operation: placeholder.Operation) -> None:
        raise ShardedError(operation.name)

    def copy_of(self, tensor: torch.Tensor) -> torch.Tensor:
        raise ShardedError("copy")

    deep_copy_of = copy_of


class Gathering:
    """An owner that makes values whole when asked."""

    def __init__(self) -> None:
        self.names: list[str] = []

    def run(self, tensors: list[torch.Tensor], operation: placeholder.Operation) -> object:
        self.names.append(operation.name)
        for tensor in tensors:
            placeholder.show(tensor)
        return operation.carry_out()

    def copy_of(self, tensor: torch.Tensor) -> torch.Tensor:
        self.names.append("copy")
        placeholder.show(tensor)
        return nn.Parameter(tensor.detach().clone(), tensor.requires_grad)

    deep_copy_of = copy_of


REFUSING = Refusing()  # owners are referenced weakly


@pytest.fixture
def param() -> nn.Parameter:
    made = nn.Parameter(torch.arange(32.0).view(4, 8))
    placeholder.adopt(made, REFUSING)
    placeholder.hide(made)
    made.__dict__["storage"] = None  # attributes survive
    return made


def test_shape_and_identity_answer(param: nn.Parameter) -> None:
    assert isinstance(param, nn.Parameter)
    assert param.shape == (4, 8)
    assert (param.numel(), param.dim(), param.size(1), len(param), param.ndim) == (32, 2, 8, 4, 2)
    assert param.dtype is torch.float32
    assert param.device.type == "cpu"
    assert param.requires_grad
    assert param.is_leaf
    assert param.grad is None
    assert param.is_floating_point()
    assert hash(param) == id(param)
    assert "values in shards" in repr(param)
    param.requires_grad_(False)
    assert not param.requires_grad


VALUES = {
    "arithmetic": lambda p: p + 1,
    "reflected": lambda p: torch.ones(4, 8) @ p.t(),
    "linear": lambda p: nn.functional.linear(torch.ones(2, 8), p),
    "embedding": lambda p: nn.functional.embedding(torch.tensor([1]), p),
    "clone": lambda p: p.clone(),
    "detach": lambda p: p.detach(),
    "item": lambda p: p.sum().item(),
    "list": lambda p: p.tolist(),
    "numpy": lambda p: p.detach().numpy(),
    "index": lambda p: p[0],
    "iterate": lambda p: list(p),
    "data": lambda p: p.data.add_(1),
    "set data": lambda p: setattr(p, "data", torch.ones(4, 8)),
    "init": lambda p: nn.init.normal_(p),
    "copy_": lambda p: p.copy_(torch.ones(4, 8)),
    "deepcopy": copy.deepcopy,
    "save": lambda p: torch.save(p, io.BytesIO()),
    "stack": lambda p: torch.stack([p, p]),
    "foreach": lambda p: torch._foreach_norm([p]),
    "compare": lambda p: p == p,
    "norm": lambda p: torch.linalg.vector_norm(p),
    "pointer": lambda p: p.data_ptr(),
    "half": lambda p: p.half(),
    "keyword": lambda p: torch.add(input=p, other=1),
}


@pytest.mark.parametrize("use", VALUES.values(), ids=VALUES)
def test_values_do_not(param: nn.Parameter, use: object) -> None:
    with pytest.raises(ShardedError):
        use(param)


@pytest.mark.parametrize("use", VALUES.values(), ids=VALUES)
def test_an_owner_that_gathers_lets_the_operation_go_on(use: object) -> None:
    param = nn.Parameter(torch.arange(32.0).view(4, 8), requires_grad=False)
    owner = Gathering()
    placeholder.adopt(param, owner)
    placeholder.hide(param)
    use(param)
    assert owner.names
    assert not placeholder.is_sharded(param)


def test_subclasses_keep_their_class() -> None:
    class Special(nn.Parameter):
        pass

    param = Special(torch.ones(2))
    placeholder.adopt(param, REFUSING)
    placeholder.hide(param)
    placeholder.hide(param)
    assert isinstance(param, Special)
    assert placeholder.is_sharded(param)
    placeholder.show(param)
    assert type(param) is Special
    placeholder.show(param)


def test_module_lists_and_counts_its_sharded_parameters() -> None:
    linear = nn.Linear(3, 2)
    for param in linear.parameters():
        placeholder.adopt(param, REFUSING)
        placeholder.hide(param)
    assert sum(p.numel() for p in linear.parameters()) == 8
    assert "Linear(in_features=3" in repr(linear)
    assert set(linear.parameters()) == {linear.weight, linear.bias}
    with pytest.raises(ShardedError):
        linear(torch.ones(1, 3))
    with pytest.raises(ShardedError):
        linear.state_dict()


def test_parameters_of_two_owners_are_prepared_by_both() -> None:
    first, second = (nn.Parameter(torch.ones(2), requires_grad=False) for _ in range(2))
    owners = Gathering(), Gathering()
    for param, owner in zip((first, second), owners, strict=True):
        placeholder.adopt(param, owner)
        placeholder.hide(param)
    assert (first + second).tolist() == [2.0, 2.0]
    assert [owner.names for owner in owners] == [["add"], ["add"]]


def test_a_view_stays_the_owners_business() -> None:
    view = torch.ones(3)
    placeholder.hide_view(view, REFUSING)
    assert placeholder.is_sharded(view)
    assert view.shape == (3,)
    with pytest.raises(ShardedError):
        view.add_(1)


def test_ds_status_follows_only_where_there_is_one() -> None:
    with_status, without = nn.Parameter(torch.ones(2)), nn.Parameter(torch.ones(2))
    with_status.ds_status = placeholder.ZeroParamStatus.AVAILABLE
    for param in (with_status, without):
        placeholder.hide(param)
    assert with_status.ds_status is placeholder.ZeroParamStatus.NOT_AVAILABLE
    assert not hasattr(without, "ds_status")
    placeholder.show(with_status)
    assert with_status.ds_status is placeholder.ZeroParamStatus.AVAILABLE
