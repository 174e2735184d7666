"""Optimizers for parameters in host memory: one pass over parameters, states and 16-bit copies (`kernels/update.py`).

They run in the native library where it is there, else as torch's fused optimizers, with the same numbers. State dicts
are those of the optimizers in torch of the same rules, so either loads the other's.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from typing import Any, ClassVar, Literal, NamedTuple

import torch
from torch import Tensor
from torch.optim.optimizer import Optimizer, ParamsT

from fullspeed.base.errors import ConfigError, ConfigFault, UsageError
from fullspeed.kernels.update import NARROW_DTYPES, Item, Update, update
from fullspeed.optim.stepping import check_hyperparameters, run_closure

PARAM_DTYPES = (torch.float32, *NARROW_DTYPES)
_WITHOUT = ("amsgrad", "maximize", "lr_decay")  # what torch's optimizers can do and these cannot


class _Attached(NamedTuple):
    grad: Tensor | None
    copy: Tensor | None


class CPUOptimizer(Optimizer):
    """What the three have in common: collecting a group's tensors, and keeping their states.

    Param-group entries: lr, weight_decay, decoupled_weight_decay, and by rule betas, eps, bias_correction. State of a
    parameter: step, () fp32, and the tensors named in `state_names`, fp32 or, without `fp32_optimizer_states`, of the
    parameter's dtype.
    """

    rule: ClassVar[Literal["adam", "adagrad", "lion"]]
    state_names: ClassVar[tuple[str, ...]]

    def __init__(self, params: ParamsT, defaults: dict[str, Any], fp32_optimizer_states: bool = True) -> None:
        self._has_fp32_states = fp32_optimizer_states
        self._attached: dict[Tensor, _Attached] = {}
        super().__init__(params, defaults)

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Add parameters. Raises UsageError for those that this optimizer cannot step."""
        super().add_param_group(param_group)
        for param in self.param_groups[-1]["params"]:
            if param.device.type != "cpu" or param.dtype not in PARAM_DTYPES:
                raise UsageError(
                    f"{type(self).__name__} steps fp32, bf16 and fp16 tensors in host memory, not {param.dtype} on "
                    f"{param.device}; use torch.optim for those"
                )
            if param.dtype == torch.float16 and not self._has_fp32_states:
                raise UsageError("fp16 cannot hold the squares of small gradients; keep fp32_optimizer_states")

    def attach(self, param: Tensor, *, grad: Tensor | None = None, copy: Tensor | None = None) -> None:
        """Give an fp32 parameter tensors of its own shape in bf16 or fp16, which each `step` then uses.

        grad: is read instead of `param.grad`. copy: gets the new values as well, rounded.
        """
        for tensor in (grad, copy):
            if tensor is not None and (tensor.dtype not in NARROW_DTYPES or tensor.shape != param.shape):
                raise UsageError(f"attach takes bf16 or fp16 tensors of shape {tuple(param.shape)}, not {tensor.dtype}")
            if tensor is not None and not tensor.is_contiguous():
                raise UsageError("attach takes contiguous tensors")
        if param.dtype != torch.float32 or not param.is_contiguous():
            raise UsageError("attach takes a contiguous fp32 parameter")
        self._attached[param] = _Attached(grad, copy)

    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """Update every parameter that has a gradient. Returns what `closure` returned, if given."""
        loss = run_closure(closure)
        for group in self.param_groups:
            self._step_group(group)
        return loss

    def _step_group(self, group: Mapping[str, Any]) -> None:
        sources = [(param, grad) for param in group["params"] if (grad := self._grad_of(param)) is not None]
        states = [self._state_of(param) for param, _ in sources]
        steps = [state["step"] for state in states]
        if steps:
            torch._foreach_add_(steps, 1)
        lr, has_correction = float(group["lr"]), group.get("bias_correction", True)
        items = [
            self._item(param, grad, state, step.item() if has_correction else math.inf, lr)
            for (param, grad), state, step in zip(sources, states, steps, strict=True)
        ]
        how = Update(
            self.rule,
            group["weight_decay"],
            group["decoupled_weight_decay"],
            group.get("betas", (0.0, 0.0)),
            group.get("eps", 0.0),
        )
        update(items, how)
        for (param, _), item in zip(sources, items, strict=True):
            if item.param is not param:
                param.copy_(item.param)

    def _grad_of(self, param: Tensor) -> Tensor | None:
        attached = self._attached.get(param) if self._attached else None
        return param.grad if attached is None or attached.grad is None else attached.grad

    def _state_of(self, param: Tensor) -> dict[str, Any]:
        """The parameter's state, made of zeros before its first step."""
        state: dict[str, Any] = self.state[param]
        if not state:
            state["step"] = torch.tensor(0.0)
            for name in self.state_names:
                state[name] = torch.zeros(param.shape, dtype=self._state_dtype(param))
        return state

    def _item(self, param: Tensor, grad: Tensor, state: Mapping[str, Any], step: float, lr: float) -> Item:
        """What one parameter's update reads and writes; a parameter of another layout is stepped as a copy."""
        if grad.is_sparse:
            raise UsageError("this optimizer cannot take sparse gradients; build the embedding with sparse=False")
        attached = self._attached.get(param) if self._attached else None
        values = param if param.is_contiguous() else param.contiguous()
        moments = [state[name] for name in self.state_names]
        second = moments[1] if len(moments) > 1 else None
        return Item(values, grad.contiguous(), moments[0], second, attached.copy if attached else None, step, lr)

    def _state_dtype(self, param: Tensor) -> torch.dtype:
        return torch.float32 if self._has_fp32_states else param.dtype

    def __setstate__(self, state: dict[str, Any]) -> None:
        """Take over param groups, torch's among them: entries they lack are this optimizer's defaults."""
        super().__setstate__(state)
        for group in self.param_groups:
            for name in _WITHOUT:
                if group.get(name):
                    raise UsageError(f"the loaded state has {name} {group[name]!r}, which {type(self).__name__} lacks")
            for name, value in self.defaults.items():
                group.setdefault(name, value)

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Load a state dict of this optimizer or torch's. States keep their precision, whatever the parameters'."""
        super().load_state_dict(state_dict)
        saved = [index for group in state_dict["param_groups"] for index in group["params"]]
        params = [param for group in self.param_groups for param in group["params"]]
        for index, param in zip(saved, params, strict=True):
            for name in self.state_names:
                if name in state_dict["state"].get(index, {}):
                    tensor = state_dict["state"][index][name]
                    self.state[param][name] = tensor.to(self._state_dtype(param), copy=True).contiguous()


class CPUAdam(CPUOptimizer):
    """Adam, with `adamw_mode` AdamW, for parameters in host memory. State: exp_avg, exp_avg_sq."""

    rule = "adam"
    state_names = ("exp_avg", "exp_avg_sq")

    def __init__(
        self,
        model_params: ParamsT,
        lr: float = 1e-3,
        bias_correction: bool = True,
        betas: tuple[float, float] = (0.9, 0.999),
        eps: float = 1e-8,
        weight_decay: float = 0.0,
        amsgrad: bool = False,
        adamw_mode: bool = True,
        fp32_optimizer_states: bool = True,
    ) -> None:
        check_hyperparameters(lr=lr, betas=betas, eps=eps, weight_decay=weight_decay)
        _refuse_amsgrad(amsgrad)
        defaults = {
            "lr": lr,
            "betas": tuple(betas),
            "eps": eps,
            "weight_decay": weight_decay,
            "decoupled_weight_decay": adamw_mode,
            "bias_correction": bias_correction,
        }
        super().__init__(model_params, defaults, fp32_optimizer_states)


class CPUAdagrad(CPUOptimizer):
    """Adagrad for parameters in host memory. State: sum."""

    rule = "adagrad"
    state_names = ("sum",)

    def __init__(
        self,
        model_params: ParamsT,
        lr: float = 1e-2,
        eps: float = 1e-10,
        weight_decay: float = 0.0,
        amsgrad: bool = False,
        fp32_optimizer_states: bool = True,
    ) -> None:
        check_hyperparameters(lr=lr, eps=eps, weight_decay=weight_decay)
        _refuse_amsgrad(amsgrad)
        defaults = {
            "lr": lr,
            "lr_decay": 0.0,  # torch's Adagrad asks loaded groups for it
            "eps": eps,
            "weight_decay": weight_decay,
            "decoupled_weight_decay": False,
        }
        super().__init__(model_params, defaults, fp32_optimizer_states)


class CPULion(CPUOptimizer):
    """Lion for parameters in host memory. State: exp_avg."""

    rule = "lion"
    state_names = ("exp_avg",)

    def __init__(
        self,
        model_params: ParamsT,
        lr: float = 1e-3,
        betas: tuple[float, float] = (0.9, 0.99),
        weight_decay: float = 0.0,
        fp32_optimizer_states: bool = True,
    ) -> None:
        check_hyperparameters(lr=lr, betas=betas, weight_decay=weight_decay)
        defaults = {"lr": lr, "betas": tuple(betas), "weight_decay": weight_decay, "decoupled_weight_decay": True}
        super().__init__(model_params, defaults, fp32_optimizer_states)


def _refuse_amsgrad(amsgrad: bool) -> None:
    if amsgrad:
        raise ConfigError([ConfigFault("amsgrad", True, "not available on the CPU", "use torch.optim.Adam")])
