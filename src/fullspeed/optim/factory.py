"""Building the optimizer a configuration names, and telling which optimizers may step shards."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import partial
from typing import Any, TypeVar

import torch
from torch import Tensor
from torch.optim.optimizer import Optimizer

from fullspeed.base.errors import ConfigError, ConfigFault
from fullspeed.base.log import warn_once
from fullspeed.optim.cpu import PARAM_DTYPES, CPUAdagrad, CPUAdam, CPULion
from fullspeed.optim.lamb import Lamb
from fullspeed.optim.lion import Lion
from fullspeed.optim.muon import MuonWithAuxAdam, muon_param_groups
from fullspeed.optim.names import nearest, unknown_arguments
from fullspeed.optim.shards import ShardAware
from fullspeed.optim.uncorrected_adam import UncorrectedAdam

ParamGroups = Sequence[Tensor] | Sequence[tuple[str, Tensor]] | Sequence[dict[str, Any]]
OptimizerT = TypeVar("OptimizerT", bound=type[Optimizer])

_PATH = "optimizer.params"
_UNAVAILABLE = ("onebitadam", "onebitlamb", "zerooneadam", "muadam", "muadamw", "musgd")
_HAS_FUSED = (torch.optim.Adam, torch.optim.AdamW, torch.optim.SGD, torch.optim.Adagrad)
_FUSED_DEVICES = {"cpu", "cuda"}
_ADAM_SWITCHES = {
    "torch_adam": False,  # with it, defaults are torch's: AdamW decays by 0.01
    "adam_w_mode": None,
    "bias_correction": True,
    "fp32_optimizer_states": None,
    "set_grad_none": True,
}
_ELEMENTWISE: set[type[Optimizer]] = {
    torch.optim.Adadelta,
    torch.optim.Adagrad,
    torch.optim.Adam,
    torch.optim.AdamW,
    torch.optim.Adamax,
    torch.optim.ASGD,
    torch.optim.NAdam,
    torch.optim.RAdam,
    torch.optim.RMSprop,
    torch.optim.Rprop,
    torch.optim.SGD,
    CPUAdagrad,
    CPUAdam,
    CPULion,
    Lion,
    UncorrectedAdam,
}


def is_elementwise(optimizer: Optimizer) -> bool:
    """Whether an element's update is known to need only its own history, so that shards step like wholes.

    Exact types: a subclass may do anything. An unknown type is answered False, which means untested, not
    wrong.
    """
    return type(optimizer) in _ELEMENTWISE


def is_shardable(optimizer: Optimizer) -> bool:
    """Whether the optimizer is right on shards: elementwise, or ready for `bind_shards` to ask for wholes."""
    return is_elementwise(optimizer) or isinstance(optimizer, ShardAware)


def declare_elementwise(kind: OptimizerT) -> OptimizerT:
    """Class decorator: the author vouches that this optimizer is elementwise."""
    _ELEMENTWISE.add(kind)
    return kind


def make_optimizer(type: str, params: Mapping[str, Any], param_groups: ParamGroups) -> Optimizer:
    """The optimizer named by a configuration.

    type: adam, adamw, adagrad, lamb, lion, muon or sgd in any case, or the exact name of a class in
    `torch.optim`.
    params: its keyword arguments; a group's own entries win over them.
    param_groups: parameters, named parameters, or groups of either. For muon the parameters carry `use_muon`
    flags (or are named), or every group does.

    `Adam` is torch's Adam (L2 penalty) unless `adam_w_mode` is true; `AdamW` is torch's AdamW. Without
    `torch_adam` the weight decay of both defaults to 0. torch's fused kernels are used where the device has
    them and nothing in `params` (fused, foreach, differentiable) decides otherwise. For 16-bit parameters in
    host memory `fp32_optimizer_states` asks for `CPUAdam`. Raises ConfigError naming every fault.
    """
    faults = _forbidden(type, params)
    if faults:
        raise ConfigError(faults)
    groups = list(param_groups)
    build = _NATIVE.get(type.lower())
    try:
        return build(params, groups) if build else _torch_optimizer(_torch_class(type), params, groups)
    except ConfigError as error:
        raise ConfigError([_below_params(fault) for fault in error.faults]) from None
    except (TypeError, ValueError) as error:  # torch's own checks of values such as betas
        raise ConfigError([ConfigFault(_PATH, dict(params), str(error))]) from error


def _forbidden(type: str, params: Mapping[str, Any]) -> list[ConfigFault]:
    faults = []
    if type.lower().replace("_", "") in _UNAVAILABLE:
        faults.append(ConfigFault("optimizer.type", type, "not available in this version", "use Adam, Lamb or SGD"))
    if "max_grad_norm" in params:
        rule = "gradients are not clipped by the optimizer"
        faults.append(ConfigFault(f"{_PATH}.max_grad_norm", params["max_grad_norm"], rule, "set gradient_clipping"))
    return faults


def _below_params(fault: ConfigFault) -> ConfigFault:
    """The fault with the full path of a hyperparameter an optimizer's constructor refused."""
    return fault if fault.path.startswith("optimizer.") else fault._replace(path=f"{_PATH}.{fault.path}")


def _torch_class(name: str) -> type[Optimizer]:
    found = {
        each: kind
        for each, kind in vars(torch.optim).items()
        if inspect.isclass(kind) and issubclass(kind, Optimizer) and kind is not Optimizer
    }
    if name not in found:
        rule = f"choose {', '.join(_NATIVE)} or a class of torch.optim"
        raise ConfigError([ConfigFault("optimizer.type", name, rule, nearest(name, [*_NATIVE, *found]))])
    return found[name]


def _checked(kind: type[Optimizer], params: Mapping[str, Any], also: Iterable[str] = ()) -> None:
    """Raise ConfigError unless `params` are arguments of `kind`; names in `also` are the caller's own."""
    own = {name: value for name, value in params.items() if name not in also}
    faults = unknown_arguments(_PATH, own, inspect.signature(kind), given=("params",))
    if faults:
        raise ConfigError(faults)


def _torch_optimizer(kind: type[Optimizer], params: Mapping[str, Any], groups: list[Any]) -> Optimizer:
    _checked(kind, params)
    build: Callable[..., Optimizer] = kind
    if kind in _HAS_FUSED and not params.keys() & {"fused", "foreach", "differentiable"} and _fits_fused(groups):
        build = partial(kind, fused=True)
    return build(groups, **params)


def _fits_fused(groups: list[Any]) -> bool:
    return all(param.device.type in _FUSED_DEVICES and param.is_floating_point() for param in _tensors(groups))


def _tensors(groups: Iterable[Any]) -> list[Tensor]:
    """All tensors of `groups`, making a list of any iterator a group holds so that it survives."""
    found: list[Tensor] = []
    for entry in groups:
        if isinstance(entry, dict):
            if not isinstance(entry["params"], (Tensor, list, tuple)):
                entry["params"] = list(entry["params"])
            members = entry["params"]
            found.extend([members] if isinstance(members, Tensor) else _tensors(members))
        else:
            found.append(entry[1] if isinstance(entry, tuple) else entry)
    return found


def _make_adam(is_adamw: bool, params: Mapping[str, Any], groups: list[Any]) -> Optimizer:
    switches = {name: params.get(name, default) for name, default in _ADAM_SWITCHES.items()}
    rest = {name: value for name, value in params.items() if name not in _ADAM_SWITCHES}
    if is_adamw and switches["adam_w_mode"] is False:
        warn_once("optimizer AdamW always decouples weight decay; adam_w_mode false has no effect, use Adam instead")
    decoupled = is_adamw or bool(switches["adam_w_mode"])
    kind = torch.optim.AdamW if decoupled else torch.optim.Adam
    _checked(kind, params, also=_ADAM_SWITCHES)
    tensors = _tensors(groups)
    if switches["fp32_optimizer_states"] and any(param.element_size() < 4 for param in tensors):
        is_plain = not switches["torch_adam"] and rest.keys() <= {"lr", "betas", "eps", "weight_decay"}
        if is_plain and all(param.device.type == "cpu" and param.dtype in PARAM_DTYPES for param in tensors):
            return CPUAdam(groups, **rest, bias_correction=switches["bias_correction"], adamw_mode=decoupled)
        rule = "optimizer states have the dtype of the parameters given to the optimizer, which is narrower"
        raise ConfigError([ConfigFault(f"{_PATH}.fp32_optimizer_states", True, rule, "keep fp32 master weights")])
    if not switches["torch_adam"]:
        rest.setdefault("weight_decay", 0.0)
    if switches["bias_correction"]:
        return _torch_optimizer(kind, rest, groups)
    known = ("lr", "betas", "eps", "weight_decay")
    faults = [
        ConfigFault(f"{_PATH}.{name}", value, "cannot be combined with bias_correction false")
        for name, value in rest.items()
        if name not in known and value not in (False, None)
    ]
    if faults:
        raise ConfigError(faults)
    chosen = {name: value for name, value in rest.items() if name in known}
    return UncorrectedAdam(groups, **chosen, decoupled_weight_decay=decoupled)


def _make_lamb(params: Mapping[str, Any], groups: list[Any]) -> Optimizer:
    _checked(Lamb, params, also=("amsgrad",))
    if params.get("amsgrad"):
        raise ConfigError([ConfigFault(f"{_PATH}.amsgrad", True, "LAMB has no amsgrad variant", "remove it")])
    return Lamb(groups, **{name: value for name, value in params.items() if name != "amsgrad"})


def _make_lion(params: Mapping[str, Any], groups: list[Any]) -> Optimizer:
    _checked(Lion, params)
    return Lion(groups, **params)


def _make_muon(params: Mapping[str, Any], groups: list[Any]) -> Optimizer:
    return MuonWithAuxAdam(muon_param_groups(groups, params))


_NATIVE: dict[str, Callable[[Mapping[str, Any], list[Any]], Optimizer]] = {
    "adam": partial(_make_adam, False),
    "adamw": partial(_make_adam, True),
    "adagrad": partial(_torch_optimizer, torch.optim.Adagrad),
    "lamb": _make_lamb,
    "lion": _make_lion,
    "muon": _make_muon,
    "sgd": partial(_torch_optimizer, torch.optim.SGD),
}
