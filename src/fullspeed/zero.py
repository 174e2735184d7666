"""ZeRO stage 3 as its users meet it: building, reading, changing and loading models whose parameters are sharded.

The names of `deepspeed.zero`, and of `deepspeed.utils` where they are about sharded parameters.
"""

from __future__ import annotations

from fullspeed.engine.export import save_weights
from fullspeed.engine.weights import LoadedWeights, load_weights
from fullspeed.sharding.access import (
    safe_get_full_fp32_param,
    safe_get_full_grad,
    safe_get_full_optimizer_state,
    safe_get_local_fp32_param,
    safe_get_local_grad,
    safe_get_local_optimizer_state,
    safe_set_full_fp32_param,
    safe_set_full_grad,
    safe_set_full_optimizer_state,
    safe_set_local_fp32_param,
    safe_set_local_grad,
    safe_set_local_optimizer_state,
)
from fullspeed.sharding.attributes import ZeroParamType, is_zero_param
from fullspeed.sharding.estimate import (
    estimate_zero2_model_states_mem_needs,
    estimate_zero2_model_states_mem_needs_all_cold,
    estimate_zero2_model_states_mem_needs_all_live,
    estimate_zero3_model_states_mem_needs,
    estimate_zero3_model_states_mem_needs_all_cold,
    estimate_zero3_model_states_mem_needs_all_live,
    model_state_bytes,
)
from fullspeed.sharding.external import (
    external_parameters,
    register_external_parameter,
    unregister_external_parameter,
)
from fullspeed.sharding.gathered import GatheredParameters, unwrap_model_for_generation
from fullspeed.sharding.init import Init
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
from fullspeed.sharding.on_device import OnDevice
from fullspeed.sharding.placeholder import ZeroParamStatus
from fullspeed.sharding.tiled_linear import TiledLinear, TiledLinearReturnBias

MiCS_Init = Init  # shard groups are made at initialize, from `mics_shard_size`

__all__ = [
    "GatheredParameters",
    "Init",
    "LoadedWeights",
    "MiCS_Init",
    "OnDevice",
    "TiledLinear",
    "TiledLinearReturnBias",
    "ZeroParamStatus",
    "ZeroParamType",
    "estimate_zero2_model_states_mem_needs",
    "estimate_zero2_model_states_mem_needs_all_cold",
    "estimate_zero2_model_states_mem_needs_all_live",
    "estimate_zero3_model_states_mem_needs",
    "estimate_zero3_model_states_mem_needs_all_cold",
    "estimate_zero3_model_states_mem_needs_all_live",
    "external_parameters",
    "get_z3_leaf_modules",
    "is_zero_param",
    "load_weights",
    "model_state_bytes",
    "register_external_parameter",
    "safe_get_full_fp32_param",
    "safe_get_full_grad",
    "safe_get_full_optimizer_state",
    "safe_get_local_fp32_param",
    "safe_get_local_grad",
    "safe_get_local_optimizer_state",
    "safe_set_full_fp32_param",
    "safe_set_full_grad",
    "safe_set_full_optimizer_state",
    "safe_set_local_fp32_param",
    "safe_set_local_grad",
    "safe_set_local_optimizer_state",
    "save_weights",
    "set_z3_leaf_module",
    "set_z3_leaf_modules",
    "set_z3_leaf_modules_by_name",
    "set_z3_leaf_modules_by_suffix",
    "unregister_external_parameter",
    "unset_z3_leaf_modules",
    "unwrap_model_for_generation",
    "z3_leaf_module",
    "z3_leaf_parameter",
]
