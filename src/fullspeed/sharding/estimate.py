"""Bytes of parameters, gradients and optimizer states before any of them exists. Arithmetic only.

`model_state_bytes` is what an engine of FullSpeed holds. The `estimate_...` functions answer for DeepSpeed's layout:
16-bit training with Adam, optional offload to host memory. They keep its names, arguments and numbers for scripts that
plan with them.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from typing import TYPE_CHECKING, NamedTuple

from fullspeed.base.errors import UsageError
from fullspeed.base.log import log_dist
from fullspeed.sharding.placement import placement_of

if TYPE_CHECKING:
    from torch import nn

GIB = 1 << 30


class ElementBytes(NamedTuple):
    """Bytes that one element of a parameter costs in each kind of state."""

    params: int
    grads: int
    master: int
    optimizer: int


MIXED_ADAM = ElementBytes(params=2, grads=2, master=4, optimizer=8)  # bf16 or fp16 with fp32 masters
FP32_ADAM = ElementBytes(params=4, grads=4, master=0, optimizer=8)


class StateBytes(NamedTuple):
    """Bytes on one rank, by the names that `engine.memory_bytes()` uses."""

    params: float
    grads: float
    master: float
    optimizer: float

    @property
    def total(self) -> float:
        """Bytes of all four."""
        return sum(self)


def model_state_bytes(num_params: int, world_size: int, stage: int, element: ElementBytes = MIXED_ADAM) -> StateBytes:
    """What one rank of a FullSpeed engine holds between backward and step, where each kind is largest.

    ZeRO's formulas (arXiv:1910.02054, section 3); 16P, 4P + 12P/N, 2P + 14P/N, 16P/N for the default `element`.
    Not in it: padding, activations, and the whole values that live around their use (`live` in `memory_bytes`).

    >>> [model_state_bytes(10**9, 4, stage).total / 10**9 for stage in (0, 1, 2, 3)]
    [16.0, 7.0, 5.5, 4.0]

    Args:
        num_params: elements of all parameters, P.
        world_size: data-parallel ranks, N.
        stage: ZeRO stage, 0 to 3.
        element: bytes per element of each kind.
    """
    _require_counts(num_params=num_params, world_size=world_size)
    placement = placement_of(stage)
    is_sharded = (placement.params, placement.grads, placement.optim, placement.optim)
    shares = (world_size if sharded else 1 for sharded in is_sharded)
    return StateBytes(*(num_params * nbytes / share for nbytes, share in zip(element, shares, strict=True)))


# ------------------------------------------------------------------ DeepSpeed's layout


class Zero2Needs(NamedTuple):
    """Bytes per node of host memory, and per device."""

    cpu: int
    gpu: int


class Zero3Needs(NamedTuple):
    """Bytes per node of host memory, per device, and of the largest layer whole (part of `gpu`)."""

    cpu: int
    gpu: int
    largest_layer: int


class Option(NamedTuple):
    """One row of a table: what is needed under these settings."""

    needs: Zero2Needs | Zero3Needs
    settings: dict[str, bool]


def estimate_zero2_model_states_mem_needs(
    total_params: int,
    num_gpus_per_node: int = 1,
    num_nodes: int = 1,
    cpu_offload: bool = True,
    additional_buffer_factor: float = 1.5,
) -> Zero2Needs:
    """Memory for parameters, gradients and optimizer states at stage 2.

    Args:
        total_params: elements of all parameters.
        num_gpus_per_node: devices on each node.
        num_nodes: nodes.
        cpu_offload: optimizer states and gradients are in host memory.
        additional_buffer_factor: host memory is multiplied by this, for buffers.
    """
    _require_counts(total_params=total_params, num_gpus_per_node=num_gpus_per_node, num_nodes=num_nodes)
    world_size = num_gpus_per_node * num_nodes
    if cpu_offload:
        gpu = 2.0 * total_params
        cpu = total_params * max(4 * world_size, 16) * additional_buffer_factor
    else:
        gpu = 2 * total_params + 18 * total_params / world_size
        cpu = total_params * 4 * num_gpus_per_node * additional_buffer_factor
    return Zero2Needs(int(cpu), int(gpu))


def estimate_zero3_model_states_mem_needs(
    total_params: int,
    largest_layer_params: int,
    num_gpus_per_node: int = 1,
    num_nodes: int = 1,
    cpu_offload: bool = True,
    cpu_offload_params: bool = True,
    zero_init: bool = True,
    additional_buffer_factor: float = 1.5,
) -> Zero3Needs:
    """Memory for parameters, gradients and optimizer states at stage 3.

    Args:
        total_params: elements of all parameters.
        largest_layer_params: elements of the module that owns most.
        num_gpus_per_node: devices on each node.
        num_nodes: nodes.
        cpu_offload: optimizer states are in host memory.
        cpu_offload_params: parameters are too; counts only together with `cpu_offload`.
        zero_init: parameters are sharded while the model is built, instead of whole on every rank first.
        additional_buffer_factor: host memory is multiplied by this, for buffers.
    """
    _require_counts(total_params=total_params, num_gpus_per_node=num_gpus_per_node, num_nodes=num_nodes)
    world_size = num_gpus_per_node * num_nodes
    largest_layer = 4 * largest_layer_params
    whole_on_each_rank = 4 * total_params * num_gpus_per_node
    resident: float  # host memory per node once training runs
    if not cpu_offload:
        gpu = largest_layer + 18 * total_params / world_size
        # Built by shards, a node's host holds one layer of each of its ranks at a time.
        cpu: float = largest_layer * num_gpus_per_node if zero_init else whole_on_each_rank
    else:
        gpu = largest_layer if cpu_offload_params else largest_layer + 2 * total_params / world_size
        resident = (18 if cpu_offload_params else 16) * total_params / num_nodes
        cpu = resident if zero_init else max(whole_on_each_rank, resident)
    return Zero3Needs(int(cpu * additional_buffer_factor), int(gpu), largest_layer)


def estimate_zero2_model_states_mem_needs_all_cold(
    total_params: int,
    num_gpus_per_node: int = 1,
    num_nodes: int = 1,
    additional_buffer_factor: float = 1.5,
) -> list[Option]:
    """Every setting of stage 2 for a model of `total_params` elements; also logged as a table on rank 0."""
    options = [
        Option(
            estimate_zero2_model_states_mem_needs(
                total_params, num_gpus_per_node, num_nodes, offload, additional_buffer_factor
            ),
            {"cpu_offload": offload},
        )
        for offload in (True, False)
    ]
    model = f"{total_params / 1e6:.0f}M total params"
    log_dist(_table(model, num_gpus_per_node, num_nodes, options))
    return options


def estimate_zero2_model_states_mem_needs_all_live(
    model: nn.Module, num_gpus_per_node: int = 1, num_nodes: int = 1, additional_buffer_factor: float = 1.5
) -> list[Option]:
    """Every setting of stage 2 for `model`; also logged as a table on rank 0."""
    return estimate_zero2_model_states_mem_needs_all_cold(
        count_params(model).total, num_gpus_per_node, num_nodes, additional_buffer_factor
    )


def estimate_zero3_model_states_mem_needs_all_cold(
    total_params: int,
    largest_layer_params: int,
    num_gpus_per_node: int = 1,
    num_nodes: int = 1,
    additional_buffer_factor: float = 1.5,
) -> list[Option]:
    """Every setting of stage 3 for a model of these sizes in elements; also logged as a table on rank 0."""
    offloads = ((True, True), (True, False), (False, False))
    options = [
        Option(
            estimate_zero3_model_states_mem_needs(
                total_params, largest_layer_params, num_gpus_per_node, num_nodes,
                cpu_offload=optimizer, cpu_offload_params=params, zero_init=zero_init,
                additional_buffer_factor=additional_buffer_factor,
            ),
            {"cpu_offload": optimizer, "cpu_offload_params": params, "zero_init": zero_init},
        )
        for (optimizer, params), zero_init in itertools.product(offloads, (True, False))
    ]  # fmt: skip
    model = f"{total_params / 1e6:.0f}M total params, {largest_layer_params / 1e6:.0f}M largest layer params"
    log_dist(_table(model, num_gpus_per_node, num_nodes, options))
    return options


def estimate_zero3_model_states_mem_needs_all_live(
    model: nn.Module, num_gpus_per_node: int = 1, num_nodes: int = 1, additional_buffer_factor: float = 1.5
) -> list[Option]:
    """Every setting of stage 3 for `model`; also logged as a table on rank 0."""
    count = count_params(model)
    return estimate_zero3_model_states_mem_needs_all_cold(
        count.total, count.largest_layer, num_gpus_per_node, num_nodes, additional_buffer_factor
    )


class ParamCount(NamedTuple):
    """Elements of all parameters of a model, tied ones once, and of the module that owns most itself."""

    total: int
    largest_layer: int


def count_params(model: nn.Module) -> ParamCount:
    """Count the parameters of `model`, sharded ones by their logical shape."""
    total = sum(param.numel() for param in model.parameters())
    layers = (sum(param.numel() for param in module.parameters(recurse=False)) for module in model.modules())
    return ParamCount(total, max(layers))


def _table(model: str, num_gpus_per_node: int, num_nodes: int, options: Sequence[Option]) -> str:
    nodes, devices = _counted(num_nodes, "node"), _counted(num_gpus_per_node, "device")
    head = (
        f"Memory for parameters, gradients and optimizer states of {model}\n"
        f"on {nodes} with {devices} each\n"
        f"  per node |  per GPU | settings\n"
    )
    rows = (
        f"{option.needs.cpu / GIB:8.2f}GB | {option.needs.gpu / GIB:6.2f}GB | "
        + ", ".join(f"{name}={int(value)}" for name, value in option.settings.items())
        for option in options
    )
    return head + "\n".join(rows)


def _counted(number: int, noun: str) -> str:
    return f"{number} {noun}" if number == 1 else f"{number} {noun}s"


def _require_counts(**counts: int) -> None:
    for name, value in counts.items():
        if value < 1:
            raise UsageError(f"{name} is {value}; give a whole number of at least 1")
