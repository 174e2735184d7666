"""Declaring leaf modules: what is marked, what is said when nothing is, and what the plan makes of it."""

import gc
import re
import weakref

import pytest
from torch import nn

from fullspeed.base.errors import UsageError
from fullspeed.sharding.leaves import (
    get_z3_leaf_modules,
    set_z3_leaf_module,
    set_z3_leaf_modules,
    set_z3_leaf_modules_by_name,
    set_z3_leaf_modules_by_suffix,
    unset_z3_leaf_modules,
    z3_leaf_module,
    z3_leaf_parameter,
)
from fullspeed.sharding.plan import Grouping, make_plan


class Experts(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.gate = nn.Linear(4, 2, bias=False)
        self.experts = nn.ModuleList(nn.Linear(4, 4, bias=False) for _ in range(2))


class SharedExperts(Experts):
    """A subclass: an instance of its parent, but with another name."""


class Layer(nn.Module):
    def __init__(self, experts: nn.Module) -> None:
        super().__init__()
        self.attention, self.mlp = nn.Linear(4, 4, bias=False), experts


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList([Layer(Experts()), Layer(SharedExperts())])
        self.head = nn.Linear(4, 8, bias=False)


def groups_of(model: nn.Module, **overrides: object) -> list[list[str]]:
    plan = make_plan(model, list(model.parameters()), Grouping(**{"merge_numel": 1, **overrides}))
    return [[fqn for fqn, _ in group.params] for group in plan.groups]


def test_classes_mark_their_instances_in_order() -> None:
    model = Model()
    assert set_z3_leaf_modules(model, [Experts]) == [model.layers[0].mlp, model.layers[1].mlp]
    assert get_z3_leaf_modules(model) == [model.layers[0].mlp, model.layers[1].mlp]


@pytest.mark.parametrize("named", ["Experts", ["Experts", "Absent"], f"{Experts.__module__}.Experts"])
def test_texts_mark_exactly_that_class(named) -> None:
    model = Model()
    assert set_z3_leaf_modules(model, named) == [model.layers[0].mlp]


def test_one_class_needs_no_list_and_the_model_itself_counts() -> None:
    model = Model()
    assert set_z3_leaf_modules(model, Model) == [model]
    assert z3_leaf_module(model)


def test_names_and_suffixes() -> None:
    model = Model()
    assert set_z3_leaf_modules_by_name(model, "layers.1.mlp") == [model.layers[1].mlp]
    assert set_z3_leaf_modules_by_suffix(model, ["0.mlp", "head"]) == [model.layers[0].mlp, model.head]
    assert get_z3_leaf_modules(model) == [model.layers[0].mlp, model.layers[1].mlp, model.head]


def test_unset_takes_the_marks_away() -> None:
    model = Model()
    set_z3_leaf_modules(model, [Experts, nn.Linear])
    assert unset_z3_leaf_modules(model, ["SharedExperts"]) == [model.layers[1].mlp]
    assert not z3_leaf_module(model.layers[1].mlp)
    unset_z3_leaf_modules(model, [Experts, nn.Linear])
    assert get_z3_leaf_modules(model) == []


def test_single_modules_and_parameters() -> None:
    model = Model()
    leaf = model.layers[0].mlp
    set_z3_leaf_module(leaf, True)
    assert z3_leaf_module(leaf)
    assert not z3_leaf_module(leaf.gate), "the mark is on the module, its subtree belongs to it"
    assert z3_leaf_parameter(leaf.experts[1].weight)
    assert not z3_leaf_parameter(model.head.weight)
    set_z3_leaf_module(leaf, False)
    assert not z3_leaf_parameter(leaf.experts[1].weight)


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda m: set_z3_leaf_modules(m, ["Expert"]), "no module of the model is a Expert; did you mean Experts"),
        (lambda m: set_z3_leaf_modules(m, [nn.Conv2d]), "is a Conv2d; it has Model, ModuleList, Layer, Linear"),
        (lambda m: unset_z3_leaf_modules(m, "Zzz"), "is a Zzz; it has"),
        (lambda m: set_z3_leaf_modules_by_name(m, ["head", "layer.0.mlp"]), "is named 'layer.0.mlp'; did you mean lay"),
        (lambda m: set_z3_leaf_modules_by_suffix(m, "block_sparse"), "a name that ends in 'block_sparse'; it has"),
        (lambda m: set_z3_leaf_modules(m, [3]), "leaf module class is 3; give a class, its name or its dotted path"),
    ],
)
def test_nothing_found_names_what_there_is(call, message) -> None:
    model = Model()
    with pytest.raises(UsageError, match=re.escape(message)):
        call(model)
    assert get_z3_leaf_modules(model) == []


def test_nothing_found_may_be_allowed() -> None:
    model = Model()
    assert set_z3_leaf_modules(model, ["Absent"], raise_if_not_found=False) == []
    assert set_z3_leaf_modules_by_name(model, ["absent", "head"], raise_if_not_found=False) == [model.head]
    assert set_z3_leaf_modules_by_suffix(model, ["absent"], raise_if_not_found=False) == []


def test_a_marked_module_is_one_group() -> None:
    model = nn.Sequential(
        nn.Linear(4, 4, bias=False), nn.ModuleDict({"a": Experts(), "b": nn.Linear(4, 4, bias=False)})
    )
    inside = ["1.a.gate.weight", "1.a.experts.0.weight", "1.a.experts.1.weight"]
    set_z3_leaf_modules_by_name(model, "1")
    assert groups_of(model) == [["0.weight"], [*inside, "1.b.weight"]]


def test_a_leaf_inside_a_block_is_a_unit_of_its_own() -> None:
    model = Model()
    set_z3_leaf_modules_by_name(model, "layers.0.mlp")
    leaf = ["layers.0.mlp.gate.weight", "layers.0.mlp.experts.0.weight", "layers.0.mlp.experts.1.weight"]
    by_mark = groups_of(model)
    assert by_mark[:2] == [leaf, ["layers.0.attention.weight"]]
    assert len(by_mark) == 4
    assert groups_of(Model(), leaf_names=["layers.0.mlp"]) == by_mark, "the configuration's leaves are alike"


def test_the_outermost_leaf_wins() -> None:
    model = Model()
    set_z3_leaf_modules(model, [Layer, Experts])
    assert [len(group) for group in groups_of(model)] == [4, 4, 1]


def test_a_marked_model_is_one_group() -> None:
    model = Model()
    set_z3_leaf_module(model, True)
    assert len(groups_of(model)) == 1


def test_a_mark_keeps_nothing_alive() -> None:
    model = Model()
    set_z3_leaf_modules(model, [Experts])
    gone = weakref.ref(model.layers[0].mlp)
    del model
    gc.collect()
    assert gone() is None
