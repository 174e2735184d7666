"""Activation checkpointing under the names of DeepSpeed's `deepspeed.checkpointing`, and FullSpeed's own.

`docs/activation-checkpointing.md` says what each is for.
"""

from fullspeed.activation.configure import (
    CheckpointFunction,
    checkpoint,
    configure,
    current_checkpointer,
    current_settings,
    held_bytes,
    is_configured,
    model_parallel_reconfigure_tp_seed,
    non_reentrant_checkpoint,
    partition_activations_in_checkpoint,
    reset,
    set_num_layers,
    unconfigure,
    unit_times,
)
from fullspeed.activation.configure import model_parallel_manual_seed as model_parallel_cuda_manual_seed
from fullspeed.activation.hidden_states import get_checkpoint_hidden_states_offloading_ctx_manager
from fullspeed.activation.offload import offload_activations
from fullspeed.activation.rng import RngTracker as CudaRNGStatesTracker
from fullspeed.activation.rng import get_rng_tracker as get_cuda_rng_tracker
from fullspeed.activation.selective import checkpoint_modules

__all__ = [
    "CheckpointFunction",
    "CudaRNGStatesTracker",
    "checkpoint",
    "checkpoint_modules",
    "configure",
    "current_checkpointer",
    "current_settings",
    "get_checkpoint_hidden_states_offloading_ctx_manager",
    "get_cuda_rng_tracker",
    "held_bytes",
    "is_configured",
    "model_parallel_cuda_manual_seed",
    "model_parallel_reconfigure_tp_seed",
    "non_reentrant_checkpoint",
    "offload_activations",
    "partition_activations_in_checkpoint",
    "reset",
    "set_num_layers",
    "unconfigure",
    "unit_times",
]
