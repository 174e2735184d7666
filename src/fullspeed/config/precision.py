"""Sections about number formats: `fp16`, `bf16`, `amp`, `torch_autocast` and `data_types`."""

from typing import Annotated, Literal

from pydantic import BeforeValidator, ConfigDict, Field

from fullspeed.config.section import Section
from fullspeed.config.types import (
    DType,
    NonNegative,
    NonNegativeNumber,
    Positive,
    Texts,
    as_tuple,
)


class FP16(Section):
    """Train in fp16 with fp32 master weights and a loss scale."""

    enabled: bool = Field(False, description="Cast parameters to fp16, keep fp32 masters, scale the loss.")
    auto_cast: bool = Field(False, description="Cast floating-point inputs of forward to fp16.")
    loss_scale: NonNegativeNumber = Field(0.0, description="Static loss scale; 0 adapts it to overflows.")
    initial_scale_power: NonNegative = Field(16, description="The adaptive scale starts at 2 to this power.")
    loss_scale_window: Positive = Field(1000, description="Good steps before the adaptive scale doubles.")
    hysteresis: Positive = Field(2, description="Overflows before the adaptive scale halves.")
    consecutive_hysteresis: bool = Field(False, description="Refill the hysteresis at every good step.")
    min_loss_scale: NonNegativeNumber = Field(1.0, description="Floor of the adaptive scale.")
    fp16_master_weights_and_grads: bool = Field(False, description="Keep master weights in fp16; saves memory.")


class BF16(Section):
    """Train in bf16 with fp32 master weights and no loss scale."""

    enabled: bool = Field(False, description="Cast parameters to bf16, keep fp32 masters.")
    immediate_grad_update: bool = Field(False, description="Add each gradient to its fp32 sum as soon as it exists.")
    check_grad_overflow: bool = Field(True, description="Skip a step whose gradients are infinite or NaN.")
    bf16_master_weights_and_grads: bool = Field(False, description="Keep master weights in bf16; saves memory.")
    bf16_optimizer_states: bool = Field(False, description="Keep optimizer moments in bf16 too.")


class Amp(Section):
    """NVIDIA Apex mixed precision; other keys go to it as they are."""

    model_config = ConfigDict(extra="allow")

    enabled: bool = Field(False, description="Train with Apex.")


class TorchAutocast(Section):
    """Run forward under `torch.autocast`; parameters stay in fp32."""

    enabled: bool = Field(False, description="Wrap forward in `torch.autocast`.")
    dtype: DType = Field("bf16", description="Format of the operations autocast lowers: `bf16` or `fp16`.")
    lower_precision_safe_modules: Texts = Field(
        ("torch.nn.Linear", "torch.nn.Conv1d", "torch.nn.Conv2d", "torch.nn.Conv3d"),
        description="Classes whose parameters travel between ranks in `dtype`.",
    )


class DataTypes(Section):
    """Formats of gradients, parameters and buffers."""

    grad_accum_dtype: DType | None = Field(None, description="Format gradients are summed in; unset is the model's.")
    param_dtype: DType | None = Field(None, description="Must agree with `fp16`/`bf16`; a check, not a switch.")
    buffer_dtype: DType | None = Field(None, description="Cast floating-point buffers to this; unset leaves them.")
    keep_in_fp32_modules: Annotated[Literal["auto"] | tuple[str, ...], BeforeValidator(as_tuple)] = Field(
        "auto", description="Patterns of buffers that stay fp32; `auto` asks the model."
    )
