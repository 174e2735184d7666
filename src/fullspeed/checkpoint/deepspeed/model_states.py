"""What DeepSpeed's files of weights hold besides optimizer state: names, counters, buffers, the user's own entries."""

from __future__ import annotations

from collections.abc import Mapping
from functools import partial
from typing import Any

import torch

from fullspeed.checkpoint.deepspeed.mapped import Stored, stored_whole
from fullspeed.checkpoint.manifest import BUFFER
from fullspeed.config.recorded import recorded_config

EXTRA_STATE = "_extra_state"  # how torch names what a module's `get_extra_state` returned
RESERVED = frozenset(
    (
        "module", "buffer_names", "optimizer", "param_shapes", "frozen_param_shapes", "shared_params",
        "frozen_param_fragments", "lr_scheduler", "data_sampler", "random_ltd", "sparse_tensor_module_names",
        "csr_tensor_module_names", "skipped_steps", "global_steps", "global_samples", "dp_world_size", "mp_world_size",
        "checkpoint_parallel_dimensions", "ds_config", "ds_version", "num_experts", "ds_autoep_layers",
        "universal_checkpoint_info",
    )
)  # fmt: skip
"""Entries that are DeepSpeed's; all others are the user's client state."""


def aliases_of(model: Mapping[str, Any]) -> dict[str, str]:
    """Further name -> first name of tied parameters: as recorded, else from tensors that share memory."""
    if model.get("shared_params") is not None:
        return dict(model["shared_params"])
    first: dict[tuple[int, torch.Size], str] = {}
    aliases = {}
    for fqn, value in model["module"].items():
        if isinstance(value, torch.Tensor) and value.numel():
            canonical = first.setdefault((value.data_ptr(), value.shape), fqn)
            if canonical != fqn:
                aliases[fqn] = canonical
    return aliases


def counters_of(model: Mapping[str, Any]) -> dict[str, int]:
    """Steps and samples. Micro-batches are not recorded: they follow from the steps."""
    steps = model["global_steps"]
    return {
        "global_steps": steps,
        "global_samples": model["global_samples"],
        "micro_steps": steps * recorded_config(model.get("ds_config") or {}).grad_accum_steps,
        "skipped_steps": model["skipped_steps"],
    }


def buffers_of(model: Mapping[str, Any]) -> dict[tuple[str, str], Stored]:
    """Persistent buffers."""
    module = model["module"]
    return {
        (BUFFER, fqn): stored_whole(partial(module.get, fqn), module[fqn].shape, per_element=False)
        for fqn in model["buffer_names"]
        if fqn in module
    }


def extra_states_of(model: Mapping[str, Any]) -> dict[str, Any]:
    """What modules that define `get_extra_state` returned, by module name."""
    return {
        name.removesuffix(EXTRA_STATE).rstrip("."): value
        for name, value in model["module"].items()
        if name.endswith(EXTRA_STATE)
    }


def client_state_of(model: Mapping[str, Any]) -> dict[str, Any]:
    """What the user added."""
    return {name: value for name, value in model.items() if name not in RESERVED}
