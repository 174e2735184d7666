"""Groups of ranks by axis, as code written for DeepSpeed asks for them: there is one axis here, data parallelism."""

from __future__ import annotations

from typing import Any

from fullspeed.base.errors import UsageError
from fullspeed.comm import Group, get_rank, get_world_group, get_world_size, new_group


def initialize(ep_size: int = 1, mpu: Any = None) -> None:
    """Set up groups: nothing to do. Raises UsageError for experts spread over ranks."""
    del mpu
    if ep_size != 1:
        raise UsageError(f"ep_size is {ep_size}; expert parallelism is not available in this version, leave it at 1")


def get_data_parallel_group() -> Group:
    """All ranks: they all have different data."""
    return get_world_group()


def get_data_parallel_world_size() -> int:
    """Number of ranks with different data."""
    return get_world_size()


def get_data_parallel_rank() -> int:
    """This rank among them."""
    return get_rank()


def get_model_parallel_world_size() -> int:
    """Ranks that share one copy of the layers: 1."""
    return 1


def get_model_parallel_rank() -> int:
    """This rank among them: 0."""
    return 0


def _clone_world_group() -> Group:
    """A new group of all ranks. Collective."""
    return new_group()


_get_data_parallel_group = _get_sequence_data_parallel_group = get_data_parallel_group
_get_data_parallel_world_size = _get_sequence_data_parallel_world_size = get_data_parallel_world_size
_get_data_parallel_rank = _get_sequence_data_parallel_rank = get_data_parallel_rank
_get_model_parallel_world_size = _get_sequence_parallel_world_size = get_model_parallel_world_size
get_tensor_model_parallel_world_size = get_model_parallel_world_size
get_tensor_model_parallel_rank = _get_sequence_parallel_rank = get_model_parallel_rank
