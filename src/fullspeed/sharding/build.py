"""From a model and its configuration to a running ShardingRuntime."""

from __future__ import annotations

from collections.abc import Collection, Sequence

import torch
from torch import nn

from fullspeed.comm import Group, trim_shared_memory
from fullspeed.config import Config
from fullspeed.precision.policy import PrecisionPolicy, torch_dtype
from fullspeed.sharding.always_sharded import check_num_shards
from fullspeed.sharding.file_plan import make_files, plan_files
from fullspeed.sharding.gatherer import LiveBudget
from fullspeed.sharding.gradients import GradScaling
from fullspeed.sharding.group import FlatGroup
from fullspeed.sharding.intake import broadcast_first_values, check_params, first_values, managed_params
from fullspeed.sharding.leaves import class_paths
from fullspeed.sharding.links import make_links
from fullspeed.sharding.placement import Placement, placement_of
from fullspeed.sharding.plan import MERGE_NUMEL, Grouping, PlannedGroup, make_plan
from fullspeed.sharding.reductions import ReductionPolicy
from fullspeed.sharding.runtime import ShardingRuntime
from fullspeed.sharding.state_files import make_state_files, plan_states


def build_runtime(
    model: nn.Module,
    config: Config,
    precision: PrecisionPolicy,
    group: Group,
    device: torch.device,
    optimized: Collection[nn.Parameter] | None,
) -> ShardingRuntime:
    """Move the model's parameters into flat groups, placed as the configured ZeRO stage asks.

    Collective. Rank 0's values win: parameters and buffers are broadcast first. Afterwards every parameter is the
    same object with the same name and shape, backed by a group. Managed are the parameters in `optimized` and frozen
    ones nobody manages yet; without an optimizer (None), all. What is left stays the caller's, so two engines can
    train disjoint parts of one model.

    Raises:
        UsageError: a parameter is not on `device`, belongs to another engine, or shares memory with another one.
        ConfigError: a shard does not fit in a buffer of `offload_param`.
        StorageError: parameters shall wait in files and a rank cannot write them.
    """
    managed = managed_params(model, optimized)
    check_params(managed, device)
    broadcast_first_values(model, managed, group)
    zero = config.zero_optimization
    placement = placement_of(zero.stage)
    plan = make_plan(model, managed.values(), _grouping(config), _autocast_wires(model, config))
    persistent = _persistent_groups(plan.groups, zero.stage3_param_persistence_threshold,
                                    zero.stage3_model_persistence_threshold)  # fmt: skip
    links = make_links(zero, group, device)
    check_num_shards(model, links.world_size)
    scaling = _grad_scaling(config, links.num_ranks)
    file_plan = plan_files(plan.groups, persistent, zero.offload_param, precision, links.world_size)
    files = make_files(file_plan, config, links)
    waiting_states = plan_states(plan.groups, zero.offload_optimizer, links.world_size)
    state_files = make_state_files(waiting_states, config, links)
    groups = []
    with first_values() as values_of:
        for index, planned in enumerate(plan.groups):
            where = _placement_in(placement, planned, is_persistent=index in persistent)
            dtypes = precision.dtypes_of(planned.key.dtype, planned.key.wire)
            flat = FlatGroup(index, planned.params, where, dtypes, links, scaling, values_of)
            if files is not None and index in file_plan.waiting:
                flat.keep_in_file(files)
            if state_files is not None and flat.has_separate_master and index in waiting_states:
                flat.keep_master_in_file(state_files.tensor(flat, "master", dtypes.master))
            groups.append(flat)
    runtime = ShardingRuntime(
        root=model,
        groups=groups,
        units=plan.units,
        budget=LiveBudget(
            max_live_numel=zero.stage3_max_live_parameters,
            max_reuse_distance=zero.stage3_max_reuse_distance,
            prefetch_numel=0 if zero.stage3_allgather_sequential else zero.stage3_prefetch_bucket_size,
        ),
        policy=ReductionPolicy(
            overlap=zero.overlap_comm is not False,
            max_in_flight_numel=zero.reduce_bucket_size,
            each_backward=placement.grads,
        ),
        links=links,
        files=files,
        state_files=state_files,
    )
    runtime.check_files()
    if files is not None:
        trim_shared_memory()  # of the shards that lay in it until they were written
    return runtime


def _grouping(config: Config) -> Grouping:
    zero = config.zero_optimization
    leaf = zero.leaf_module
    return Grouping(
        merge_numel=min(MERGE_NUMEL, zero.reduce_bucket_size),
        leaf_classes=leaf.classes,
        leaf_names=leaf.names,
        leaf_suffixes=leaf.name_suffixes,
        granularity=zero.stage3_module_granularity_threshold,
    )


def _autocast_wires(model: nn.Module, config: Config) -> dict[nn.Parameter, torch.dtype]:
    """Under autocast, parameters of modules that compute in the lower dtype send their gradients in it too."""
    autocast = config.torch_autocast
    dtype = torch_dtype(autocast.dtype)
    if not autocast.enabled or dtype is None or config.communication_data_type is not None:
        return {}
    names = set(autocast.lower_precision_safe_modules)
    return {
        param: dtype
        for module in model.modules()
        if not names.isdisjoint(class_paths(type(module)))
        for param in module.parameters(recurse=False)
    }


def _persistent_groups(groups: Sequence[PlannedGroup], threshold: int, model_threshold: int) -> set[int]:
    """Groups of nothing but small parameters: kept whole, as long as all such together stay under the model's limit."""
    persistent: set[int] = set()
    total = 0
    for index, group in enumerate(groups):
        is_small = all(param.numel() < threshold for _, param in group.params)
        if is_small and total + group.numel <= model_threshold:
            persistent.add(index)
            total += group.numel
    return persistent


def _placement_in(placement: Placement, planned: PlannedGroup, *, is_persistent: bool) -> Placement:
    """The placement of one group at a stage with this placement."""
    if planned.key.always_sharded:
        return placement.always_sharded
    return placement.persistent if is_persistent else placement


def _grad_scaling(config: Config, num_ranks: int) -> GradScaling:
    """Where the division by the ranks happens. By default before the sum: there it costs no pass over memory."""
    if config.gradient_allreduce_op == "sum":
        return GradScaling(pre=1.0, post=1.0)
    factor = config.gradient_predivide_factor
    if factor == 1.0 or config.prescale_gradients:
        return GradScaling(pre=1.0 / num_ranks, post=1.0)
    return GradScaling(pre=1.0 / factor, post=factor / num_ranks)
