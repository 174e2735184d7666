"""`DeepSpeedConfig`: a configuration as an object, with the attributes that programs read."""

from __future__ import annotations

from typing import Any

from fullspeed.comm import get_world_group, get_world_size, is_initialized
from fullspeed.config import load_config, resolve_batch


class DeepSpeedConfig:
    """A checked configuration with its batch sizes resolved for the ranks there are.

    Any name of a section or key is an attribute: `fp16`, `zero_optimization`, `gradient_clipping`, ...

    Args:
        config: a dict, a path to a JSON file, or base64 of its text.
        mpu: an object whose `get_data_parallel_group()` names the ranks that share a model.

    Raises:
        ConfigError: with every fault.
    """

    def __init__(self, config: Any, mpu: Any = None, mesh_device: Any = None) -> None:
        del mesh_device
        self._param_dict = config
        self._settings = load_config(config)
        self.world_size = 1
        if mpu is not None:
            self.world_size = get_world_size(mpu.get_data_parallel_group())
        elif is_initialized():
            self.world_size = get_world_size(get_world_group())
        batch = resolve_batch(self._settings, self.world_size, "the ranks there are")
        self.train_batch_size = batch.train_batch_size
        self.train_micro_batch_size_per_gpu = batch.micro_batch_size
        self.gradient_accumulation_steps = batch.grad_accum_steps
        self.zero_config = self._settings.zero_optimization
        self.zero_optimization_stage = self.zero_config.stage
        self.zero_enabled = bool(self.zero_optimization_stage)

    def __getattr__(self, name: str) -> Any:
        if name.startswith("_"):
            raise AttributeError(name)
        return getattr(self._settings, name)

    def print(self, name: str) -> None:
        """Log everything that differs from its default, on rank 0."""
        from fullspeed.base.log import log_dist

        log_dist(f"{name}: {self._settings.model_dump_json(indent=2, exclude_defaults=True)}")
