"""Which modules are units and which parameters share a flat buffer. Reads modules, allocates nothing.

A unit is a module whose parameters are needed at the same time: a transformer block, an embedding, a head. Units come
from, in this order: leaf modules the user declared; the classes a Hugging Face model lists in `_no_split_modules`; the
members of every `ModuleList` and `Sequential`; and each remaining module that owns parameters itself. Inside such a
unit, declared leaves and the tiles of a `TiledLinear` are units of their own: they come and go while it computes.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

import torch
from torch import nn

from fullspeed.base.layout import FlatLayout
from fullspeed.sharding.always_sharded import ShardsFrozen, always_sharded
from fullspeed.sharding.leaves import class_paths, z3_leaf_module
from fullspeed.sharding.tiled_linear import TiledLinear

# Consecutive units smaller than this are gathered and reduced together: below it a message is all latency.
MERGE_NUMEL = 1 << 18


class Grouping(NamedTuple):
    """Overrides of the automatic grouping."""

    merge_numel: int = MERGE_NUMEL  # elements up to which consecutive small units share a group
    leaf_classes: Collection[str] = ()  # class names, or qualified names, of modules gathered as one
    leaf_names: Collection[str] = ()  # fully qualified names of modules gathered as one
    leaf_suffixes: Collection[str] = ()  # endings of names of modules gathered as one
    granularity: int = 0  # a module with fewer parameters per module of its subtree is gathered as one; 0 is off


class GroupKey(NamedTuple):
    """Parameters share a buffer only if they agree on all of this."""

    dtype: torch.dtype
    device: torch.device
    requires_grad: bool
    wire: torch.dtype | None
    always_sharded: bool  # at every stage, and frozen


@dataclass
class PlannedGroup:
    """The parameters of one group to be, by first name."""

    key: GroupKey
    params: list[tuple[str, nn.Parameter]] = field(default_factory=list)

    @property
    def numel(self) -> int:
        """Elements of all its parameters."""
        return sum(param.numel() for _, param in self.params)

    def shard_numel(self, world_size: int) -> int:
        """Elements of one of so many shards, padding included."""
        return FlatLayout([(fqn, tuple(param.shape)) for fqn, param in self.params], world_size).shard_numel


@dataclass(frozen=True)
class Plan:
    """Groups in registration order, and the units in module order, those inside another before it."""

    groups: list[PlannedGroup]
    units: list[nn.Module]


def make_plan(
    root: nn.Module,
    managed: Collection[nn.Parameter],
    grouping: Grouping,
    wires: dict[nn.Parameter, torch.dtype] | None = None,
) -> Plan:
    """Divide parameters of `root` into units and groups.

    Args:
        root: the model. A parameter with several names, or a module reached by several paths, is planned once.
        managed: the parameters to plan; others are left alone.
        grouping: overrides.
        wires: reduction dtype of single parameters, where it differs from their group's default.

    Returns:
        Every managed parameter in exactly one group; parameters that differ in dtype, device, `requires_grad` or
        reduction dtype are never in the same one.
    """
    names = {param: fqn for fqn, param in root.named_parameters()}
    units = list(_units(root, grouping))
    unclaimed, sharded = set(managed), always_sharded(root)
    groups: list[PlannedGroup] = []
    open_groups: dict[GroupKey, PlannedGroup] = {}
    for unit in [*units, root]:
        of_unit: dict[GroupKey, PlannedGroup] = {}
        for param in unit.parameters():
            if param not in unclaimed:
                continue
            unclaimed.remove(param)
            key = GroupKey(param.dtype, param.device, param.requires_grad, (wires or {}).get(param), param in sharded)
            of_unit.setdefault(key, PlannedGroup(key)).params.append((names[param], param))
        for key, group in of_unit.items():
            previous = open_groups.get(key)
            if previous is not None and previous.numel + group.numel <= grouping.merge_numel:
                previous.params.extend(group.params)
            else:
                groups.append(group)
                open_groups[key] = group
    return Plan(groups, units)


def _units(root: nn.Module, grouping: Grouping) -> Iterator[nn.Module]:
    """Unit modules, in registration order; modules with parameters of their own outside them follow suit."""
    block_classes = _block_classes(root)
    seen: set[int] = set()

    def walk(module: nn.Module, name: str, *, is_member: bool) -> Iterator[nn.Module]:
        if id(module) in seen:
            return
        seen.add(id(module))
        has_own = any(True for _ in module.parameters(recurse=False))
        is_container = isinstance(module, nn.ModuleList | nn.ModuleDict | nn.Sequential | TiledLinear)
        is_leaf = _is_leaf(module, name, grouping) if module is not root else z3_leaf_module(root)
        is_leaf = is_leaf or isinstance(module, ShardsFrozen)
        is_block = type(module).__name__ in block_classes or (is_member and not is_container and not block_classes)
        if is_leaf or (is_block and module is not root):
            if any(True for _ in module.parameters()):
                inside = () if is_leaf else dict.fromkeys(_units_inside(module, name, grouping))
                yield from (inner for inner in inside if id(inner) not in seen)
                seen.update(id(inner) for inner in module.modules())
                yield module
            return
        if has_own and module is not root:
            yield from (inner for inner in [module] if not any(True for _ in module.children()))
        for child_name, child in module.named_children():
            path = f"{name}.{child_name}" if name else child_name
            yield from walk(child, path, is_member=is_container)

    yield from walk(root, "", is_member=False)


def _units_inside(unit: nn.Module, name: str, grouping: Grouping) -> Iterator[nn.Module]:
    """Modules gathered by themselves although the unit around them is: declared leaves, tiles."""
    for child_name, child in unit.named_children():
        path = f"{name}.{child_name}" if name else child_name
        if _is_declared_leaf(child, path, grouping):
            yield child
        elif isinstance(child, TiledLinear):
            yield from (tile for row in child.tile_rows() for tile in row)
        else:
            yield from _units_inside(child, path, grouping)


def _block_classes(root: nn.Module) -> set[str]:
    """Class names a Hugging Face model declares as its blocks, as far as the model contains any."""
    declared: set[str] = set()
    for module in root.modules():
        listed = getattr(module, "_no_split_modules", None)
        if isinstance(listed, Collection) and not isinstance(listed, str):
            declared.update(str(name) for name in listed)
    present = {type(module).__name__ for module in root.modules()}
    return declared & present


def _is_leaf(module: nn.Module, name: str, grouping: Grouping) -> bool:
    return _is_declared_leaf(module, name, grouping) or _is_fine_grained(module, grouping.granularity)


def _is_declared_leaf(module: nn.Module, name: str, grouping: Grouping) -> bool:
    return (
        z3_leaf_module(module)
        or not class_paths(type(module)).isdisjoint(grouping.leaf_classes)
        or name in grouping.leaf_names
        or any(name.endswith(suffix) for suffix in grouping.leaf_suffixes)
    )


def _is_fine_grained(module: nn.Module, granularity: int) -> bool:
    if granularity <= 0:
        return False
    num_modules = sum(1 for _ in module.modules())
    return num_modules > 1 and sum(param.numel() for param in module.parameters()) / num_modules < granularity


def scope_groups(module: nn.Module, group_of: dict[nn.Parameter, int], units: Collection[nn.Module]) -> Sequence[int]:
    """Indices of the groups that must be whole while `module` computes.

    A unit needs those of its whole subtree, but for other units inside; another module those of its own parameters.
    """
    owners = _without_units_inside(module, units) if module in units else [module]
    params = (param for owner in owners for param in owner.parameters(recurse=False))
    return sorted({group_of[param] for param in params if param in group_of})


def _without_units_inside(module: nn.Module, units: Collection[nn.Module]) -> Iterator[nn.Module]:
    yield module
    for child in module.children():
        if child not in units:
            yield from _without_units_inside(child, units)
