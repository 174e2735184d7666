"""What DeepSpeed's optimizer states are in our terms: tensors of parameters, hyper-parameters, loss scale."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import torch

from fullspeed.checkpoint.deepspeed.layout import Span
from fullspeed.checkpoint.deepspeed.mapped import Stored, stored_whole
from fullspeed.checkpoint.manifest import MASTER, OPTIMIZER

STEP = "step"


class FlatGroup(NamedTuple):
    """Parameters whose values follow one another in each rank's flat tensors.

    `master(rank)` and `state(rank)` give a rank's masters, and its optimizer state by entry name.
    """

    shapes: Mapping[str, tuple[int, ...]]
    spans: Sequence[Sequence[Span]]  # of each parameter
    master: Callable[[int], torch.Tensor]
    state: Callable[[int], Mapping[str, Any]]
    step: Any = None  # number of updates, where the optimizer keeps it with its hyper-parameters


def group_tensors(group: FlatGroup) -> dict[tuple[str, str], Stored]:
    """Masters and optimizer state of a flat group, by kind and name. What rank 0 has, every rank has."""
    state = dict(group.state(0))
    if group.step is not None:
        state.setdefault(STEP, group.step)
    numel = group.master(0).numel()
    found: dict[tuple[str, str], Stored] = {}
    for (fqn, shape), spans in zip(group.shapes.items(), group.spans, strict=True):
        found[MASTER, fqn] = Stored(shape, spans, group.master)
        for name, value in state.items():
            if isinstance(value, torch.Tensor) and value.dim() and value.numel() >= numel:
                found[OPTIMIZER + name, fqn] = Stored(shape, spans, _entry_of(group, name))
            elif isinstance(value, (torch.Tensor, int, float)):
                found[OPTIMIZER + name, fqn] = stored_scalar(value)
    return found


def _entry_of(group: FlatGroup, name: str) -> Callable[[int], torch.Tensor]:
    def fetch(rank: int) -> torch.Tensor:
        tensor: torch.Tensor = group.state(rank)[name]
        return tensor

    return fetch


def stored_scalar(value: Any) -> Stored:
    """A number of updates, say; as a tensor, which is how our optimizers keep it."""
    tensor = value if isinstance(value, torch.Tensor) else torch.tensor(float(value))
    return stored_whole(lambda: tensor.clone(), tensor.shape, per_element=False)


def hyperparameters(row: Mapping[str, Any], fqns: Sequence[str]) -> dict[str, Any]:
    """A param group as our checkpoints have it: without what is state, with the names of its parameters."""
    return {**{name: value for name, value in row.items() if name not in ("params", STEP)}, "fqns": list(fqns)}


def loss_scale_of(state: Mapping[str, Any]) -> dict[str, float | int]:
    """The loss scale as `precision.loss_scale` writes it, from the entries of an optimizer's file."""
    scaler = state.get("loss_scaler")
    values = dict(state) if scaler is None else vars(scaler)
    found: dict[str, float | int] = {"scale": float(values.get("cur_scale", 1.0))}
    if values.get("dynamic", values.get("dynamic_loss_scale")):
        found["iteration"] = values["cur_iter"]
        found["last_overflow"] = values["last_overflow_iter"]
        # Optimizers of stage 0 halve the scale at every overflow, and record no hysteresis.
        found["hysteresis_left"] = values.get("cur_hysteresis", 1)
    return found
