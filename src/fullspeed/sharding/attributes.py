"""The attributes that code written for DeepSpeed reads on a sharded parameter (`ds_id`, `ds_shape`, ...).

Nothing of FullSpeed uses them. A parameter has them for as long as its group shards it.
"""

from __future__ import annotations

import enum
import itertools
import weakref
from collections.abc import Iterable
from typing import Any

import torch
from torch import nn
from torch.utils.weak import WeakIdKeyDictionary

from fullspeed.sharding import placeholder
from fullspeed.sharding.gathered import GatheredParameters
from fullspeed.sharding.group import FlatGroup
from fullspeed.sharding.placeholder import ZeroParamStatus


class ZeroParamType(enum.Enum):
    """How a parameter is kept."""

    NORMAL = 1
    PARTITIONED = 2
    REMOTE = 3


_ids = itertools.count()
_held: WeakIdKeyDictionary = WeakIdKeyDictionary()  # parameter -> the context that keeps it whole since `all_gather`


def attach(group: FlatGroup, slot: int) -> None:
    """Give a parameter of a group whose parameters are sharded its attributes."""
    param, where = group.params[slot], group.layout.slots[slot]
    own = [piece for piece in group.layout.pieces(group.links.rank) if piece.slot == slot]
    start = own[0].shard_offset if own else 0
    numel = own[0].numel if own else 0
    shard: Any = group.resident.part(start, numel)
    shard.ds_numel, shard.status, shard.final_location = numel, ZeroParamStatus.AVAILABLE, None
    methods = _Methods(param, numel, group.links.world_size)
    param.__dict__.update(
        ds_id=next(_ids),
        ds_shape=torch.Size(where.shape),
        ds_numel=where.numel,
        ds_tensor=shard,
        ds_persist=False,
        ds_process_group=group.links.shard_group,
        ds_active_sub_modules=set(),
        ds_secondary_tensor=None,
        ds_param_type=ZeroParamType.PARTITIONED,
        nvme_swapper=None,
        ds_status=ZeroParamStatus.NOT_AVAILABLE if placeholder.is_sharded(param) else ZeroParamStatus.AVAILABLE,
        __getstate__=methods.own_state,
        **{name: getattr(methods, name) for name in _METHODS},
    )


def detach(param: nn.Parameter) -> None:
    """Take the attributes away."""
    _held.pop(param, None)
    for name in (*_NAMES, *_METHODS):
        param.__dict__.pop(name, None)


def is_zero_param(param: Any) -> bool:
    """Whether `param` is a parameter that is sharded, be it whole now or not."""
    return isinstance(param, torch.Tensor) and "ds_id" in getattr(param, "__dict__", {})


class _Methods:
    """Bound methods for one parameter, which it refers to weakly: the parameter holds them."""

    def __init__(self, param: nn.Parameter, numel: int, world_size: int) -> None:
        self._param = weakref.ref(param)
        self._numel, self._world_size = numel, world_size

    def _params(self, param_list: Iterable[nn.Parameter] | None) -> list[nn.Parameter]:
        param = self._param()
        assert param is not None, "called as a method of the parameter"
        return [param] if param_list is None else list(param_list)

    def all_gather(self, param_list: Iterable[nn.Parameter] | None = None, **_: Any) -> None:
        """Make parameters whole, exactly, until `partition`. Collective."""
        for param in self._params(param_list):
            if param not in _held:
                _held[param] = GatheredParameters(param)
                _held[param].__enter__()

    def partition(self, param_list: Iterable[nn.Parameter] | None = None, **_: Any) -> None:
        """End what `all_gather` began, keeping edits as GatheredParameters does. Collective."""
        for param in self._params(param_list):
            held = _held.pop(param, None)
            if held is not None:
                held.__exit__(None, None, None)

    def partition_numel(self) -> int:
        """Elements of the parameter in this rank's shard."""
        return self._numel

    def aligned_size(self) -> int:
        """Elements of the parameter; groups are padded as a whole, not each parameter."""
        return self._params(None)[0].numel()

    def padding_size(self) -> int:
        """Elements of padding in the parameter: none."""
        return 0

    def ds_summary(self, slice_param: Any = None, use_debug_name: bool = False) -> dict[str, Any]:
        """The attributes, for a log."""
        del slice_param, use_debug_name
        param: Any = self._params(None)[0]
        return {
            "id": param.ds_id,
            "status": param.ds_status.name,
            "numel": param.ds_numel,
            "shape": tuple(param.ds_shape),
            "requires_grad": param.requires_grad,
            "shard_numel": self._numel,
            "persist": param.ds_persist,
        }

    def own_state(self) -> dict[str, Any]:
        """The attributes that are not from here: what a pickled copy of the whole values takes along."""
        param = self._params(None)[0]
        return {name: value for name, value in vars(param).items() if name not in (*_NAMES, *_METHODS, "_shard_holder")}

    def convert_to_zero_parameters(self, param_list: Iterable[nn.Parameter] | None = None) -> None:
        """Nothing to do: the parameter is sharded already."""


_METHODS = (
    "all_gather", "partition", "partition_numel", "aligned_size", "padding_size", "ds_summary",
    "convert_to_zero_parameters",
)  # fmt: skip
_NAMES = (
    "ds_id", "ds_shape", "ds_numel", "ds_tensor", "ds_persist", "ds_process_group", "ds_active_sub_modules",
    "ds_secondary_tensor", "ds_param_type", "nvme_swapper", "ds_status", "__getstate__",
)  # fmt: skip
