"""The `activation_checkpointing` section: what recomputation keeps and where."""

from pydantic import Field

from fullspeed.config.section import Section
from fullspeed.config.types import Positive


class ActivationCheckpointing(Section):
    """Recompute activations in backward; for calls through the checkpointing function."""

    partition_activations: bool = Field(False, description="Shard saved inputs over model-parallel ranks.")
    cpu_checkpointing: bool = Field(False, description="Keep saved inputs in CPU memory.")
    contiguous_memory_optimization: bool = Field(False, description="Copy saved inputs into one buffer.")
    number_checkpoints: Positive | None = Field(None, description="Recomputed units per forward; sizes that buffer.")
    synchronize_checkpoint_boundary: bool = Field(False, description="Wait for the device at each unit.")
    profile: bool = Field(False, description="Time each unit.")
