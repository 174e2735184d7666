"""Which implementation of an operation runs: the best one that can, unless the user says otherwise.

The plain PyTorch implementation of an operation is its specification: it runs everywhere, and the others are tested
against it. The variable FULLSPEED_KERNELS chooses by name: "torch" for all operations that have it, "quantize=torch"
for one, several separated by commas, later ones first.
"""

from __future__ import annotations

import importlib
import importlib.util
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any, Generic, NamedTuple, TypeVar, cast

import torch

from fullspeed.base import env
from fullspeed.base.errors import UsageError

VARIABLE = "FULLSPEED_KERNELS"

F = TypeVar("F", bound=Callable[..., object])


class Implementation(NamedTuple):
    """One way to carry out an operation."""

    name: str  # "torch", "triton", "native"
    where: str  # "module:function", imported at first use
    obstacle: Callable[[torch.device], str]  # why it cannot run on a device; "" where it can


class Choice(NamedTuple):
    """What runs for an operation on a kind of device, and why."""

    op: str
    device: str
    implementation: str
    reason: str


class Op(Generic[F]):
    """An operation, called as `op.on(device)(...)`. Implementations are given best first; the last runs everywhere."""

    def __init__(self, name: str, *implementations: Implementation) -> None:
        assert name not in _ops, name
        self.name = name
        self.implementations = implementations
        self._chosen: dict[str, tuple[F, Choice]] = {}
        _ops[name] = self

    def on(self, device: torch.device) -> F:
        """The function to call for tensors on `device`.

        Raises:
            UsageError: the implementation asked for by name cannot run there.
        """
        return self._resolve(device)[0]

    def choice(self, device: torch.device) -> Choice:
        """What `on` returns there, and why."""
        return self._resolve(device)[1]

    def forget(self) -> None:
        """Choose anew at the next use: what was asked for may have changed."""
        self._chosen.clear()

    def _resolve(self, device: torch.device) -> tuple[F, Choice]:
        if device.type not in self._chosen:
            chosen, reason = self._choose(device)
            module, _, function = chosen.where.partition(":")
            found = cast(F, getattr(importlib.import_module(module), function))
            self._chosen[device.type] = found, Choice(self.name, device.type, chosen.name, reason)
        return self._chosen[device.type]

    def _choose(self, device: torch.device) -> tuple[Implementation, str]:
        obstacles = {each.name: each.obstacle(device) for each in self.implementations}
        name = _wanted(self.name, obstacles)
        if name is None:
            chosen = next(each for each in self.implementations if not obstacles[each.name])
            passed_over = [f"{name}: {why}" for name, why in obstacles.items() if why]
            return chosen, "; ".join(passed_over) or "the best there is"
        if obstacles[name]:
            raise UsageError(
                f"{VARIABLE} asks for {self.name}={name}, which cannot run on {device.type}: {obstacles[name]}; "
                f"remove it, or choose one of {', '.join(name for name, why in obstacles.items() if not why)}"
            )
        return next(each for each in self.implementations if each.name == name), "asked for by name"


_ops: dict[str, Op[Any]] = {}
_overrides: list[Mapping[str, str]] = []


def choices(device: torch.device) -> list[Choice]:
    """What runs on `device` for every operation, by name."""
    return [_ops[name].choice(device) for name in sorted(_ops)]


@contextmanager
def using(**implementations: str) -> Iterator[None]:
    """Have operations run by the implementations named, for the length of a block.

    Example: `with using(quantize="torch"): ...`
    """
    for name, implementation in implementations.items():
        _check(name, implementation)
    _overrides.append(implementations)
    _forget_all()
    try:
        yield
    finally:
        _overrides.remove(implementations)
        _forget_all()


def _forget_all() -> None:
    for op in _ops.values():
        op.forget()


def _check(op: str, implementation: str) -> None:
    if op not in _ops:
        raise UsageError(f"there is no operation {op!r}; there are {', '.join(sorted(_ops))}")
    known = [each.name for each in _ops[op].implementations]
    if implementation not in known:
        raise UsageError(f"operation {op} has no implementation {implementation!r}; it has {', '.join(known)}")


def _wanted(op: str, known: Mapping[str, str]) -> str | None:
    """The implementation that `using` or the environment names for an operation; None leaves the choice open."""
    for names in reversed(_overrides):
        if op in names:
            return names[op]
    for entry in reversed((env.get(VARIABLE) or "").split(",")):
        name, separator, implementation = entry.strip().rpartition("=")
        if not separator and implementation in known:
            return implementation
        if name == op:
            _check(op, implementation)
            return implementation
    return None


def runs_anywhere(device: torch.device) -> str:
    """The obstacle of plain PyTorch: none."""
    del device
    return ""


def needs_triton(device: torch.device) -> str:
    """The obstacle of a Triton kernel: the package, and a device it compiles for (or its interpreter)."""
    if importlib.util.find_spec("triton") is None:
        return "triton is not installed"
    if device.type in ("cuda", "xpu") or env.get("TRITON_INTERPRET") == "1":
        return ""
    return f"triton does not compile for {device.type}"
