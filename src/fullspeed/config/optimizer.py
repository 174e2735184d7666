"""The `optimizer` section: which optimizer, and which parameters each kind takes."""

from collections.abc import Mapping
from typing import Annotated, Any, ClassVar, Literal

from pydantic import BeforeValidator, ConfigDict, Field, ValidationInfo, field_validator

from fullspeed.config.section import AUTO, Chosen, Section, own_auto
from fullspeed.config.types import Fraction, NonNegativeNumber, Positive, PositiveNumber, as_tuple

Betas = Annotated[tuple[Fraction, Fraction], BeforeValidator(as_tuple)]


class OptimizerParams(Section):
    """Parameters of a `torch.optim` class, passed on as they are."""

    model_config = ConfigDict(extra="allow")

    auto_means: ClassVar[Literal["default", "unset", "kept"]] = "kept"
    refused: ClassVar[Mapping[str, str]] = {
        "max_grad_norm": "clipping is not the optimizer's; use the top-level key gradient_clipping"
    }


class NativeParams(OptimizerParams):
    """What every native optimizer takes."""

    model_config = ConfigDict(extra="forbid")

    lr: NonNegativeNumber = Field(1e-3, description="Learning rate; a scheduler may change it.")
    weight_decay: NonNegativeNumber = Field(0.0, description="Decay per step relative to the learning rate.")


class AdamParams(NativeParams):
    """Parameters of `adam` and `adamw`."""

    aliases: ClassVar[Mapping[str, str]] = {"adamw_mode": "adam_w_mode"}

    betas: Betas = Field((0.9, 0.999), description="Decay rates of the first and second moment.")
    eps: NonNegativeNumber = Field(1e-8, description="Added to the denominator.")
    amsgrad: bool = Field(False, description="Use the largest second moment so far.")
    bias_correction: bool = Field(True, description="Correct the moments for their start at zero.")
    adam_w_mode: bool = Field(False, description="Decoupled weight decay for `adam`; `adamw` always has it.")
    torch_adam: bool = Field(False, description="Use torch's implementation.")
    fp32_optimizer_states: bool = Field(True, description="Keep moments in fp32.")
    foreach: bool | None = Field(None, description="Passed to torch's implementation.")
    fused: bool | None = Field(None, description="Passed to torch's implementation.")
    maximize: bool = Field(False, description="Go up the gradient.")
    capturable: bool = Field(False, description="Passed to torch's implementation.")
    differentiable: bool = Field(False, description="Passed to torch's implementation.")
    set_grad_none: bool = Field(True, description="Free gradients after a step instead of filling them with zeros.")


class AdagradParams(NativeParams):
    """Parameters of `adagrad`."""

    lr: NonNegativeNumber = Field(1e-2, description="Learning rate; a scheduler may change it.")
    eps: NonNegativeNumber = Field(1e-10, description="Added to the denominator.")
    amsgrad: bool = Field(False, description="Accepted for compatibility; must be false.")
    lr_decay: NonNegativeNumber = Field(0.0, description="Learning-rate decay per step.")
    initial_accumulator_value: NonNegativeNumber = Field(0.0, description="Start of the sum of squared gradients.")
    fp32_optimizer_states: bool = Field(True, description="Keep states in fp32.")
    foreach: bool | None = Field(None, description="Passed to torch's implementation.")
    fused: bool | None = Field(None, description="Passed to torch's implementation.")
    maximize: bool = Field(False, description="Go up the gradient.")
    differentiable: bool = Field(False, description="Passed to torch's implementation.")


class LionParams(NativeParams):
    """Parameters of `lion`."""

    betas: Betas = Field((0.9, 0.99), description="Weights of the momentum in the update and in its own average.")
    fp32_optimizer_states: bool = Field(True, description="Keep momentum in fp32.")
    set_grad_none: bool = Field(True, description="Free gradients after a step instead of filling them with zeros.")


class LambParams(NativeParams):
    """Parameters of `lamb`."""

    betas: Betas = Field((0.9, 0.999), description="Decay rates of the first and second moment.")
    eps: NonNegativeNumber = Field(1e-8, description="Added to the denominator.")
    bias_correction: bool = Field(True, description="Correct the moments for their start at zero.")
    eps_inside_sqrt: bool = Field(False, description="Add `eps` under the root.")
    max_coeff: PositiveNumber = Field(10.0, description="Upper bound of the trust ratio.")
    min_coeff: NonNegativeNumber = Field(0.01, description="Lower bound of the trust ratio.")
    amsgrad: bool = Field(False, description="Accepted for compatibility; must be false.")
    set_grad_none: bool = Field(True, description="Free gradients after a step instead of filling them with zeros.")


class MuonParams(NativeParams):
    """Parameters of `muon`: matrices by Newton-Schulz, the rest by Adam."""

    momentum: Fraction = Field(0.95, description="Momentum of the matrices.")
    muon_lr: NonNegativeNumber | None = Field(None, description="Learning rate of the matrices; unset is `lr`.")
    adam_lr: NonNegativeNumber | None = Field(None, description="Learning rate of the rest; unset is `lr`.")
    betas: Betas = Field((0.9, 0.95), description="Decay rates of Adam's moments.")
    eps: NonNegativeNumber = Field(1e-10, description="Added to Adam's denominator.")
    ns_method: Literal["gram", "standard"] = Field("gram", description="How Newton-Schulz is computed.")
    per_head_muon: bool = Field(False, description="Orthogonalise each attention head by itself.")


class OneBitAdamParams(AdamParams):
    """Parameters of `onebitadam`."""

    freeze_step: Positive = Field(100_000, description="Steps of exact Adam before compression begins.")
    cuda_aware: bool = Field(False, description="The MPI library can read device memory.")
    comm_backend_name: Literal["nccl", "mpi", "hccl", "compressed"] = Field("nccl", description="Transport.")


class OneBitLambParams(LambParams):
    """Parameters of `onebitlamb`."""

    freeze_step: Positive = Field(100_000, description="Steps of exact LAMB before compression begins.")
    cuda_aware: bool = Field(False, description="The MPI library can read device memory.")
    comm_backend_name: Literal["nccl", "mpi", "hccl", "compressed"] = Field("nccl", description="Transport.")
    coeff_beta: Fraction = Field(0.9, description="Decay of the trust ratio's average.")
    factor_max: PositiveNumber = Field(4.0, description="Upper bound of the trust ratio's change.")
    factor_min: PositiveNumber = Field(0.5, description="Lower bound of the trust ratio's change.")
    factor_threshold: PositiveNumber = Field(0.1, description="Largest change of that factor per step.")


class ZeroOneAdamParams(AdamParams):
    """Parameters of `zerooneadam`."""

    var_freeze_step: Positive = Field(100_000, description="Step after which the variance stays.")
    var_update_scaler: Positive = Field(16, description="Variance updates after which their interval doubles.")
    local_step_scaler: Positive = Field(32678, description="Steps after which the local interval doubles.")
    local_step_clipper: Positive = Field(16, description="Longest local interval, in steps.")
    cuda_aware: bool = Field(False, description="The MPI library can read device memory.")
    comm_backend_name: Literal["nccl", "mpi", "hccl", "compressed"] = Field("nccl", description="Transport.")


NATIVE: Mapping[str, type[OptimizerParams]] = {
    "adam": AdamParams,
    "adamw": AdamParams,
    "adagrad": AdagradParams,
    "lion": LionParams,
    "lamb": LambParams,
    "muon": MuonParams,
    "onebitadam": OneBitAdamParams,
    "onebitlamb": OneBitLambParams,
    "zerooneadam": ZeroOneAdamParams,
    "muadam": OptimizerParams,
    "muadamw": OptimizerParams,
    "musgd": OptimizerParams,
}
"""Optimizers known by a name of any case, and the parameters they take."""

TORCH_OPTIMIZERS = (
    "ASGD", "Adadelta", "Adafactor", "Adagrad", "Adam", "AdamW", "Adamax", "LBFGS", "Muon", "NAdam", "RAdam",
    "RMSprop", "Rprop", "SGD", "SparseAdam",
)  # fmt: skip
"""Classes of `torch.optim` at the time of writing: for suggestions only, torch itself decides."""


def optimizer_name(text: str) -> str:
    """The native name in lower case for any spelling of it; other text as it is, a class of `torch.optim`."""
    return text.lower() if text.lower() in NATIVE else text


def chosen_params(raw: Mapping[str, Any]) -> type[OptimizerParams]:
    """The parameters that go with the `type` in the text of the block."""
    kind = raw.get("type")
    return NATIVE.get(kind.lower(), OptimizerParams) if isinstance(kind, str) else OptimizerParams


def check_params(model: type[Section], params: Mapping[str, Any]) -> dict[str, Any]:
    """The given parameters, checked against `model`; "auto" stays. May raise ValidationError."""
    given = {key: value for key, value in params.items() if value != AUTO or key in own_auto(model)}
    made = model.model_validate(given)
    checked = {key: made.__dict__.get(key, value) for key, value in given.items()}
    return {key: checked.get(key, AUTO) for key in params}


class Optimizer(Section):
    """The optimizer; absent when the caller passes one."""

    type: str = Field(description="A native name in any case, or the exact name of a class in `torch.optim`.")
    params: Mapping[str, Any] = Field(default_factory=dict, description="Its parameters; native types are checked.")
    legacy_fusion: bool = Field(False, description="Accepted for compatibility; no effect.")

    @property
    def name(self) -> str:
        """The native name in lower case, or the name of a class in `torch.optim`."""
        return optimizer_name(self.type)

    @classmethod
    def chosen(cls, raw: Mapping[str, Any]) -> Chosen:
        """`params` has the shape that `type` asks for."""
        return {"params": chosen_params(raw)}

    @field_validator("params", mode="after")
    @classmethod
    def _params_fit_type(cls, params: Mapping[str, Any], info: ValidationInfo) -> dict[str, Any]:
        return check_params(chosen_params(info.data), params)
