"""The `scheduler` section: which learning-rate schedule, and which parameters each kind takes."""

from collections.abc import Mapping
from typing import Annotated, Any, ClassVar, Literal

from pydantic import BeforeValidator, ConfigDict, Field, ValidationInfo, field_validator

from fullspeed.config.optimizer import check_params
from fullspeed.config.section import Chosen, Section
from fullspeed.config.types import (
    Count,
    Fraction,
    NonNegative,
    NonNegativeNumber,
    Number,
    Positive,
    as_tuple,
    lower,
)

Rates = Annotated[NonNegativeNumber | tuple[NonNegativeNumber, ...], BeforeValidator(as_tuple)]
Shape = Annotated[Literal["log", "linear"], BeforeValidator(lower)]
Open = Literal["auto"]  # a required key may wait for an integration to fill it


class SchedulerParams(Section):
    """Parameters of a class in `torch.optim.lr_scheduler`, passed on as they are."""

    model_config = ConfigDict(extra="allow")

    auto_means: ClassVar[Literal["default", "unset", "kept"]] = "kept"


class NativeSchedulerParams(SchedulerParams):
    """What every native schedule takes."""

    model_config = ConfigDict(extra="forbid")

    last_batch_iteration: Count = Field(-1, description="Step to continue from; -1 is the beginning.")


class LRRangeTestParams(NativeSchedulerParams):
    """Parameters of `LRRangeTest`."""

    lr_range_test_min_lr: Rates = Field(1e-3, description="First learning rate; one, or one per group.")
    lr_range_test_step_size: Positive = Field(2000, description="Steps per unit of growth.")
    lr_range_test_step_rate: Number = Field(1.0, description="Growth per unit, as a multiple of the first rate.")
    lr_range_test_staircase: bool = Field(False, description="Grow once per unit instead of every step.")


class OneCycleParams(NativeSchedulerParams):
    """Parameters of `OneCycle`."""

    cycle_min_lr: Rates | Open = Field(description="Lowest learning rate of the cycle; one, or one per group.")
    cycle_max_lr: Rates | Open = Field(description="Highest learning rate of the cycle; one, or one per group.")
    decay_lr_rate: NonNegativeNumber = Field(
        0.0, description="Decay of the rate per `decay_step_size` after the cycle."
    )
    cycle_first_step_size: Positive = Field(2000, description="Steps of the rising half.")
    cycle_second_step_size: Positive | None = Field(None, description="Steps of the falling half; unset is the same.")
    cycle_first_stair_count: NonNegative = Field(0, description="Stairs of the rising half; 0 is smooth.")
    cycle_second_stair_count: NonNegative | None = Field(
        None, description="Stairs of the falling half; unset is the same."
    )
    decay_step_size: NonNegative = Field(0, description="Steps per unit of decay after the cycle; 0 is no decay.")
    cycle_momentum: bool = Field(True, description="Move the momentum against the learning rate.")
    cycle_min_mom: Fraction = Field(0.8, description="Lowest momentum.")
    cycle_max_mom: Fraction = Field(0.9, description="Highest momentum.")
    decay_mom_rate: NonNegativeNumber = Field(0.0, description="Growth of momentum per `decay_step_size`.")


class WarmupLRParams(NativeSchedulerParams):
    """Parameters of `WarmupLR`."""

    warmup_min_lr: Rates = Field(0.0, description="First learning rate; one, or one per group.")
    warmup_max_lr: Rates | None = Field(None, description="Last learning rate; unset is the optimizer's own.")
    warmup_num_steps: Positive = Field(1000, description="Steps of the rise.")
    warmup_type: Shape = Field("log", description="Form of the rise: `log` or `linear`.")


class WarmupDecayLRParams(WarmupLRParams):
    """Parameters of `WarmupDecayLR`."""

    total_num_steps: Positive | Open = Field(description="Steps until the learning rate reaches zero.")


class WarmupCosineLRParams(NativeSchedulerParams):
    """Parameters of `WarmupCosineLR`."""

    total_num_steps: Positive | Open = Field(description="Steps until the end of the cosine.")
    warmup_min_ratio: NonNegativeNumber = Field(0.0, description="First rate, as a share of the optimizer's own.")
    warmup_num_steps: Positive = Field(1000, description="Steps of the rise.")
    cos_min_ratio: NonNegativeNumber = Field(1e-4, description="Last rate, as a share of the optimizer's own.")
    warmup_type: Shape = Field("log", description="Form of the rise: `log` or `linear`.")


NATIVE_SCHEDULERS: Mapping[str, type[SchedulerParams]] = {
    "LRRangeTest": LRRangeTestParams,
    "OneCycle": OneCycleParams,
    "WarmupLR": WarmupLRParams,
    "WarmupDecayLR": WarmupDecayLRParams,
    "WarmupCosineLR": WarmupCosineLRParams,
}
"""The native schedules and the parameters they take."""

TORCH_SCHEDULERS = (
    "ChainedScheduler", "ConstantLR", "CosineAnnealingLR", "CosineAnnealingWarmRestarts", "CyclicLR",
    "ExponentialLR", "LambdaLR", "LinearLR", "MultiStepLR", "MultiplicativeLR", "OneCycleLR", "PolynomialLR",
    "ReduceLROnPlateau", "SequentialLR", "StepLR",
)  # fmt: skip
"""Classes of `torch.optim.lr_scheduler` at the time of writing: for suggestions; torch itself decides."""


def chosen_scheduler_params(raw: Mapping[str, Any]) -> type[SchedulerParams]:
    """The parameters that go with the `type` in the text of the block."""
    kind = raw.get("type")
    return NATIVE_SCHEDULERS.get(kind, SchedulerParams) if isinstance(kind, str) else SchedulerParams


class Scheduler(Section):
    """The learning-rate schedule; absent when the caller passes one or wants none."""

    type: str = Field(description="A native name, or the exact name of a class in `torch.optim.lr_scheduler`.")
    params: Mapping[str, Any] = Field(default_factory=dict, description="Its parameters; native types are checked.")

    @classmethod
    def chosen(cls, raw: Mapping[str, Any]) -> Chosen:
        """`params` has the shape that `type` asks for."""
        return {"params": chosen_scheduler_params(raw)}

    @field_validator("params", mode="after")
    @classmethod
    def _params_fit_type(cls, params: Mapping[str, Any], info: ValidationInfo) -> dict[str, Any]:
        return check_params(chosen_scheduler_params(info.data), params)
