"""The settings of checkpointed calls in this process, and the calls themselves.

The settings are the configuration's `activation_checkpointing` section. `configure` sets them by hand; otherwise an
engine whose configuration has the section does.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from torch.utils import checkpoint as torch_checkpoint

from fullspeed.accelerator import get_accelerator
from fullspeed.activation.checkpointer import Checkpointer
from fullspeed.activation.host_pool import HostPool
from fullspeed.activation.places import Contiguous, HeldBytes, OnDevice, OnHost, Place, Sharded
from fullspeed.activation.rng import get_rng_tracker, reseed_tensor_parallel, seed_tensor_parallel
from fullspeed.activation.times import Stopwatch, UnitTimes
from fullspeed.base.log import warn_once
from fullspeed.comm import Group, get_rank
from fullspeed.config import Config, load_config
from fullspeed.config.activation import ActivationCheckpointing

MAX_FREE_HOST_BUFFERS = 256  # page-locking is slow, so as many stay as a deep model has checkpointed calls


class _Settings:
    """What was configured, and the checkpointer made of it."""

    def __init__(self, section: ActivationCheckpointing, tp_group: Group | None) -> None:
        self.section, self.tp_group = section, tp_group
        watch = Stopwatch(synchronize=section.synchronize_checkpoint_boundary, profile=section.profile)
        self.checkpointer = Checkpointer(_place(section, tp_group), get_rng_tracker(), watch)

    def replaced(self, **changes: Any) -> _Settings:
        """The same with other values. Raises ConfigError when they do not fit together."""
        return _Settings(_checked({**self.section.model_dump(), **changes}), self.tp_group)


_default: _Settings | None = None  # made at the first use: it asks for the accelerator
_configured: _Settings | None = None
_is_by_hand = False


def configure(
    mpu_: Any = None,
    deepspeed_config: Mapping[str, Any] | str | Path | Config | None = None,
    partition_activations: bool | None = None,
    contiguous_checkpointing: bool | None = None,
    num_checkpoints: int | None = None,
    checkpoint_in_cpu: bool | None = None,
    synchronize: bool | None = None,
    profile: bool | None = None,
) -> None:
    """Set what checkpointed calls keep where, for all of this process.

    Args:
        mpu_: an object whose `get_tensor_model_parallel_group()` or `get_model_parallel_group()` names the ranks that
            share this rank's activations. None keeps the one of an earlier call.
        deepspeed_config: a configuration, in any form that `initialize` takes; its `activation_checkpointing` section
            counts where an argument below is None, and defaults where it is None too.
        partition_activations: shard saved inputs over those ranks.
        contiguous_checkpointing: copy them into one buffer; needs `partition_activations` and `num_checkpoints`.
        num_checkpoints: checkpointed calls between a forward and its backward; sizes that buffer.
        checkpoint_in_cpu: keep them in host memory.
        synchronize: wait for the device at the boundaries of each call.
        profile: note and log the times of each call.

    Raises:
        ConfigError: with every fault of the configuration, or when the settings do not fit together.
    """
    global _configured, _is_by_hand
    given = {
        "partition_activations": partition_activations,
        "contiguous_memory_optimization": contiguous_checkpointing,
        "number_checkpoints": num_checkpoints,
        "cpu_checkpointing": checkpoint_in_cpu,
        "synchronize_checkpoint_boundary": synchronize,
        "profile": profile,
    }
    section = load_config({} if deepspeed_config is None else deepspeed_config).activation_checkpointing
    overrides = {key: value for key, value in given.items() if value is not None}
    tp_group = _tp_group(mpu_) if mpu_ is not None else _present().tp_group
    _configured, _is_by_hand = _Settings(_checked({**section.model_dump(), **overrides}), tp_group), True


def configure_from_section(section: ActivationCheckpointing, mpu: Any) -> None:
    """Take an engine's section; no-op when `configure` was called, whose arguments count more."""
    global _configured
    if not _is_by_hand:
        _configured = _Settings(section, None if mpu is None else _tp_group(mpu))


def is_configured() -> bool:
    """Whether `configure` was called, or an engine brought the section."""
    return _configured is not None


def unconfigure() -> None:
    """Go back to the defaults, and let the next engine bring its section."""
    global _configured, _default, _is_by_hand
    _configured, _default, _is_by_hand = None, None, False


def reset() -> None:
    """Drop the buffers of contiguous checkpointing; those in use live on until their backward is over."""
    _replace()


def partition_activations_in_checkpoint(partition_activation: bool) -> None:
    """Shard saved inputs over the model-parallel ranks from now on, or no more."""
    _replace(partition_activations=partition_activation)


def set_num_layers(nlayers: int) -> None:
    """Set how many checkpointed calls lie between a forward and its backward."""
    _replace(number_checkpoints=nlayers)


def current_checkpointer() -> Checkpointer:
    """What runs checkpointed calls now."""
    return _present().checkpointer


def current_settings() -> ActivationCheckpointing:
    """The section in force."""
    return _present().section


def checkpoint(function: Callable[..., Any], *args: Any, use_reentrant: bool = True) -> Any:
    """`function(*args)`, of which only `args` are kept; backward computes the rest again.

    Random numbers are drawn again as in the forward: those of the CPU, the device and the tracker.

    Args:
        function: any callable; its outputs may be nested, and are without a graph if nothing in it requires gradients.
        args: anything. Tensors in them, nested or not, need not require gradients.
        use_reentrant: let backward run a second autograd pass inside itself (not with `torch.autograd.grad`); else as
            `non_reentrant_checkpoint` does, as always when no argument requires gradients.
    """
    return current_checkpointer().run(function, *args, reentrant=use_reentrant)


def non_reentrant_checkpoint(function: Callable[..., Any], *args: Any) -> Any:
    """As `checkpoint`, through hooks on saved tensors: recomputing stops early, `torch.autograd.grad` works."""
    return current_checkpointer().run(function, *args, reentrant=False)


class CheckpointFunction(torch_checkpoint.CheckpointFunction):
    """The autograd function's form of `checkpoint`."""

    @classmethod
    def apply(cls, function: Callable[..., Any], all_outputs: list[Any], *args: Any) -> Any:
        """`checkpoint(function, *args)`, whose outputs are also appended to `all_outputs`."""
        outputs = checkpoint(function, *args)
        all_outputs.extend(outputs if isinstance(outputs, tuple) else (outputs,))
        return outputs


def held_bytes() -> HeldBytes:
    """Bytes of inputs that this process keeps sharded, on the host or in a contiguous buffer now."""
    return current_checkpointer().held_bytes()


def unit_times() -> list[UnitTimes]:
    """The times of the present pass's calls, in order; empty unless `profile` is set."""
    return current_checkpointer().watch.times()


def model_parallel_manual_seed(seed: int) -> None:
    """Seed all ranks alike, and the tensor-parallel state with seed + 2718 + this rank's place in `configure`'s mpu."""
    seed_tensor_parallel(seed, _tp_rank())


def model_parallel_reconfigure_tp_seed(seed: int) -> None:
    """Begin the tensor-parallel state anew at seed + 2718 + this rank's place."""
    reseed_tensor_parallel(seed, _tp_rank())


def _present() -> _Settings:
    global _default
    if _configured is not None:
        return _configured
    if _default is None:
        _default = _Settings(ActivationCheckpointing(), None)
    return _default


def _replace(**changes: Any) -> None:
    """Change the settings in force, be they configured or the defaults."""
    global _configured, _default
    changed = _present().replaced(**changes)
    if _configured is None:
        _default = changed
    else:
        _configured = changed


def _checked(values: Mapping[str, Any]) -> ActivationCheckpointing:
    return load_config({"activation_checkpointing": values}).activation_checkpointing


def _tp_group(mpu: Any) -> Group | None:
    """The ranks that share this rank's activations, if the mpu knows any; Megatron's newer name wins."""
    for name in ("get_tensor_model_parallel_group", "get_model_parallel_group"):
        if hasattr(mpu, name):
            group: Group = getattr(mpu, name)()
            return group
    return None


def _tp_rank() -> int:
    group = _present().tp_group
    return 0 if group is None else get_rank(group)


def _place(section: ActivationCheckpointing, tp_group: Group | None) -> Place | None:
    """Where inputs wait; None leaves them to autograd."""
    pin = section.cpu_checkpointing and get_accelerator().device_type != "cpu"
    place: Place | None = None
    if section.contiguous_memory_optimization:
        assert section.number_checkpoints is not None, "the configuration's rules demand it"
        place = Contiguous(section.number_checkpoints, on_host=section.cpu_checkpointing, pin=pin)
    elif section.cpu_checkpointing:
        place = OnHost(HostPool(pin=pin, max_free=MAX_FREE_HOST_BUFFERS))
    if not section.partition_activations:
        return place
    if tp_group is None:
        warn_once(
            "activation_checkpointing.partition_activations shards over model-parallel ranks, and there are none: give "
            "an mpu with a model-parallel group to initialize or to checkpointing.configure"
        )
        return place
    return Sharded(tp_group, place or OnDevice())
