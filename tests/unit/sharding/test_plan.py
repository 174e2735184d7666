"""Which modules are units and which parameters share a group."""

import torch
from torch import nn

from fullspeed.sharding.plan import Grouping, make_plan, scope_groups


class Block(nn.Module):
    def __init__(self, size: int = 4) -> None:
        super().__init__()
        self.norm, self.linear = nn.LayerNorm(size), nn.Linear(size, size)


class Transformer(nn.Module):
    def __init__(self, num_blocks: int = 3) -> None:
        super().__init__()
        self.embed = nn.Embedding(8, 4)
        self.blocks = nn.ModuleList(Block() for _ in range(num_blocks))
        self.norm = nn.LayerNorm(4)
        self.head = nn.Linear(4, 8, bias=False)


def plan_of(model: nn.Module, **overrides: object) -> list[list[str]]:
    grouping = Grouping(**{"merge_numel": 1, **overrides})
    plan = make_plan(model, list(model.parameters()), grouping)
    return [[fqn for fqn, _ in group.params] for group in plan.groups]


BLOCK = ["norm.weight", "norm.bias", "linear.weight", "linear.bias"]


def test_blocks_and_leaves_are_units() -> None:
    assert plan_of(Transformer()) == [
        ["embed.weight"],
        *([f"blocks.{i}.{name}" for name in BLOCK] for i in range(3)),
        ["norm.weight", "norm.bias"],
        ["head.weight"],
    ]


def test_small_units_merge_up_to_the_limit() -> None:
    assert len(plan_of(Transformer(), merge_numel=10**6)) == 1
    sizes = plan_of(Transformer(), merge_numel=60)
    assert [len(group) for group in sizes] == [5, 8, 3]


def test_a_tied_parameter_is_planned_once_under_its_first_name() -> None:
    model = Transformer(1)
    model.head.weight = model.embed.weight
    names = [fqn for group in plan_of(model) for fqn in group]
    assert "embed.weight" in names
    assert "head.weight" not in names


def test_a_shared_module_is_planned_once() -> None:
    model = Transformer(1)
    model.blocks.append(model.blocks[0])
    assert len(plan_of(model)) == len(plan_of(Transformer(1)))


def test_dtype_and_requires_grad_divide_a_unit() -> None:
    model = Transformer(1)
    model.blocks[0].norm.weight.requires_grad_(False)
    model.blocks[0].linear.bias.data = model.blocks[0].linear.bias.data.double()
    groups = plan_of(model)
    assert ["blocks.0.norm.weight"] in groups
    assert ["blocks.0.linear.bias"] in groups


def test_no_split_modules_name_the_blocks() -> None:
    model = Transformer()
    model._no_split_modules = ["LayerNorm"]
    groups = plan_of(model)
    assert ["blocks.0.norm.weight", "blocks.0.norm.bias"] in groups
    assert ["blocks.0.linear.weight", "blocks.0.linear.bias"] in groups


def test_declared_leaves_win() -> None:
    whole = [[fqn for fqn, _ in Transformer().blocks.named_parameters(prefix="blocks")]]
    assert plan_of(Transformer(), leaf_names=["blocks"])[1:2] == whole
    assert plan_of(Transformer(), leaf_suffixes=["ocks"])[1:2] == whole
    assert plan_of(Transformer(), leaf_classes=["ModuleList"])[1:2] == whole


def test_a_fine_grained_subtree_is_one_unit() -> None:
    assert len(plan_of(Transformer(), granularity=100)) == 4  # embedding, all blocks, norm, head


def test_parameters_of_inner_modules_with_children_are_covered() -> None:
    model = Transformer(1)
    model.register_parameter("scale", nn.Parameter(torch.ones(2)))
    names = sorted(fqn for group in plan_of(model) for fqn in group)
    assert names == sorted(fqn for fqn, _ in model.named_parameters())


def test_unmanaged_parameters_are_left_out() -> None:
    model = Transformer(1)
    plan = make_plan(model, [model.head.weight], Grouping(merge_numel=1))
    assert [[fqn for fqn, _ in group.params] for group in plan.groups] == [["head.weight"]]


def test_scope_groups() -> None:
    model = Transformer(1)
    group_of = {param: i for i, param in enumerate(model.parameters())}
    block = model.blocks[0]
    assert scope_groups(block, group_of, units=[]) == []
    assert scope_groups(block, group_of, units=[block]) == [1, 2, 3, 4]
    assert scope_groups(block, group_of, units=[block, block.linear]) == [1, 2], "units inside come by themselves"
    block.norm.weight = block.linear.weight
    assert scope_groups(block, group_of, units=[block, block.linear]) == [2, 3], "but a tied one is needed twice"
