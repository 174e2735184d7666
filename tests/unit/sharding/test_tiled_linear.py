"""A tiled layer is the whole layer: values, gradients, every way of splitting; and what it refuses."""

import copy
import itertools

import pytest
import torch
from torch import nn

from fullspeed.base.errors import UsageError
from fullspeed.sharding.plan import Grouping, make_plan
from fullspeed.sharding.tiled_linear import TiledLinear, TiledLinearReturnBias

SPLITS = list(itertools.product((1, 2, 3, 7), (1, 2, 5)))


def whole(bias: bool = True) -> nn.Linear:
    torch.manual_seed(0)
    return nn.Linear(7, 5, bias=bias)


def gathered(tiled: TiledLinear, of: str) -> torch.Tensor:
    """The tiles' weights, or gradients of weights, put together."""
    pick = (lambda tile: tile.weight) if of == "weight" else (lambda tile: tile.weight.grad)
    return torch.cat([torch.cat([pick(tile) for tile in row], dim=1) for row in tiled.tile_rows()])


@pytest.mark.parametrize("bias", [True, False])
@pytest.mark.parametrize(("in_splits", "out_splits"), SPLITS)
def test_forward_and_backward_equal_the_whole_layer(in_splits, out_splits, bias) -> None:
    linear = whole(bias)
    tiled = TiledLinear(7, 5, bias, in_splits, out_splits, init_linear=linear)
    assert sum(len(row) for row in tiled.tile_rows()) == in_splits * out_splits
    x = torch.randn(2, 3, 7)
    ours, theirs = x.clone().requires_grad_(), x.clone().requires_grad_()
    torch.testing.assert_close(tiled(ours), linear(theirs), atol=1e-6, rtol=1e-6)
    tiled(ours).square().sum().backward()
    linear(theirs).square().sum().backward()
    torch.testing.assert_close(ours.grad, theirs.grad, atol=1e-5, rtol=1e-6)
    torch.testing.assert_close(gathered(tiled, "grad"), linear.weight.grad, atol=1e-5, rtol=1e-6)
    if bias:
        ours_bias = torch.cat([row[-1].bias.grad for row in tiled.tile_rows()])
        torch.testing.assert_close(ours_bias, linear.bias.grad, atol=1e-5, rtol=1e-6)


def test_uneven_parts_differ_by_one_and_only_the_last_tile_of_a_row_has_a_bias() -> None:
    tiled = TiledLinear(7, 5, in_splits=3, out_splits=2)
    shapes = [[tuple(tile.weight.shape) for tile in row] for row in tiled.tile_rows()]
    assert shapes == [[(3, 3), (3, 2), (3, 2)], [(2, 3), (2, 2), (2, 2)]]
    assert [[tile.bias is not None for tile in row] for row in tiled.tile_rows()] == [[False, False, True]] * 2
    assert sum(param.numel() for param in tiled.parameters()) == 7 * 5 + 5


def test_input_and_output_may_stay_in_parts() -> None:
    linear = whole()
    tiled = TiledLinear(
        7, 5, in_splits=2, out_splits=2, input_is_already_split=True, combine_out_splits=False, init_linear=linear
    )
    x = torch.randn(4, 7)
    parts = tiled([x[:, :4], x[:, 4:]])
    assert [part.shape[-1] for part in parts] == [3, 2]
    torch.testing.assert_close(torch.cat(parts, dim=-1), linear(x))


def test_one_part_takes_a_tensor_though_the_input_is_called_split() -> None:
    linear = whole()
    tiled = TiledLinear(7, 5, out_splits=5, input_is_already_split=True, init_linear=linear)
    x = torch.randn(4, 7)
    torch.testing.assert_close(tiled(x), linear(x))
    torch.testing.assert_close(tiled([x]), linear(x))


def test_the_values_are_copied_not_shared() -> None:
    linear = whole()
    tiled = TiledLinear(7, 5, in_splits=2, init_linear=linear)
    before = gathered(tiled, "weight").clone()
    with torch.no_grad():
        linear.weight.zero_()
    assert torch.equal(gathered(tiled, "weight"), before)


class ApartBias(nn.Linear):
    """Returns its bias instead of adding it."""

    def forward(self, x):
        return nn.functional.linear(x, self.weight), self.bias


@pytest.mark.parametrize(("in_splits", "out_splits"), [(1, 1), (2, 3), (3, 1)])
def test_a_returned_bias_is_whole_and_added_nowhere(in_splits, out_splits) -> None:
    linear = whole()
    tiled = TiledLinearReturnBias(7, 5, True, in_splits, out_splits, linear_cls=ApartBias, init_linear=linear)
    x = torch.randn(2, 7)
    output, bias = tiled(x)
    torch.testing.assert_close(output, x @ linear.weight.t())
    assert torch.equal(bias, linear.bias)


def test_returned_bias_in_parts_and_absent() -> None:
    apart = TiledLinearReturnBias(7, 5, out_splits=2, combine_out_splits=False, linear_cls=ApartBias)
    outputs, biases = apart(torch.randn(2, 7))
    assert [part.shape for part in outputs] == [(2, 3), (2, 2)]
    assert [part.shape for part in biases] == [(3,), (2,)]
    assert TiledLinearReturnBias(7, 5, bias=False, in_splits=2, linear_cls=ApartBias)(torch.randn(2, 7))[1] is None


def test_further_arguments_reach_the_tiles() -> None:
    tiled = TiledLinear(4, 4, in_splits=2, dtype=torch.float64, device="meta")
    assert {(param.dtype, param.device.type) for param in tiled.parameters()} == {(torch.float64, "meta")}


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"in_splits": 0}, r"in_splits is 0; choose 1 to in_features = 7"),
        ({"in_splits": 8}, r"in_splits is 8; choose 1 to in_features = 7"),
        ({"out_splits": 6}, r"out_splits is 6; choose 1 to out_features = 5"),
        ({"init_linear": nn.Linear(5, 7)}, r"weight of shape \(7, 5\), the tiles together \(5, 7\)"),
        ({"init_linear": nn.Linear(7, 5, bias=False)}, r"has no bias and bias=True"),
        ({"init_linear": nn.Linear(7, 5), "bias": False}, r"has a bias and bias=False"),
    ],
)
def test_wrong_arguments_are_refused(arguments, message) -> None:
    with pytest.raises(UsageError, match=message):
        TiledLinear(7, 5, **arguments)


def test_wrong_inputs_are_refused() -> None:
    plain, split = TiledLinear(7, 5, in_splits=2), TiledLinear(7, 5, in_splits=2, input_is_already_split=True)
    with pytest.raises(UsageError, match="last dimension is 6, in_features is 7"):
        plain(torch.ones(2, 6))
    with pytest.raises(UsageError, match="set input_is_already_split=True"):
        plain([torch.ones(2, 4), torch.ones(2, 3)])
    with pytest.raises(UsageError, match="pass 2 tensors, not one"):
        split(torch.ones(2, 7))
    with pytest.raises(UsageError, match=r"last dimensions \[3, 4\], the tiles take \[4, 3\]"):
        split([torch.ones(2, 3), torch.ones(2, 4)])


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm, self.up = nn.LayerNorm(7), TiledLinear(7, 5, in_splits=2, out_splits=2)


def test_tiles_are_groups_of_their_own_even_inside_a_block() -> None:
    blocks = nn.ModuleList([Block(), copy.deepcopy(Block())])
    plan = make_plan(blocks, list(blocks.parameters()), Grouping(merge_numel=1))
    tiles = [tile for block in blocks for row in block.up.tile_rows() for tile in row]
    assert all(tile in plan.units for tile in tiles)
    of_tiles = [[param for _, param in group.params] for group in plan.groups]
    for tile in tiles:
        assert any({*group} == {*tile.parameters()} for group in of_tiles)
    assert len(plan.groups) == len(tiles) + 2, "and one group of the rest of each block"


def test_tiles_outside_blocks_are_units_too() -> None:
    model = nn.Sequential(TiledLinear(7, 5, in_splits=2), nn.Linear(5, 2))
    plan = make_plan(model, list(model.parameters()), Grouping(merge_numel=1))
    assert plan.units == [*model[0].tile_rows()[0], model[1]]
