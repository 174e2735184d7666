"""Parameters a module uses without owning them: a decoder that multiplies by the embedding's weight, for example.

Stage 3 gathers such a parameter by itself when it is used. Registered, it belongs to the module's scope instead: it is
gathered and prefetched when the module is entered, freed when it is left, and there when its backward begins.
"""

from __future__ import annotations

import weakref
from typing import Protocol

from torch import nn

from fullspeed.base.errors import UsageError


class Follower(Protocol):
    """Whoever gathers around modules."""

    def follow_external(self, module: nn.Module) -> None:
        """The external parameters of `module` have changed."""


_external: weakref.WeakKeyDictionary[nn.Module, list[nn.Parameter]] = weakref.WeakKeyDictionary()
_followers: weakref.WeakSet[Follower] = weakref.WeakSet()


def register_external_parameter(module: nn.Module, parameter: nn.Parameter) -> None:
    """Gather `parameter` around every call of `module`. Before or after `initialize`; again changes nothing.

    Every rank registers the same. A copy of the module has no external parameters.

    Raises:
        UsageError: the arguments are no module and parameter.
    """
    _check(module, parameter)
    if not any(known is parameter for known in external_parameters(module)):
        _external.setdefault(module, []).append(parameter)
        _tell_followers(module)


def unregister_external_parameter(module: nn.Module, parameter: nn.Parameter) -> None:
    """Undo `register_external_parameter`; UsageError if it has not been registered."""
    _check(module, parameter)
    known = external_parameters(module)
    remaining = [other for other in known if other is not parameter]
    if len(remaining) == len(known):
        raise UsageError(
            f"the parameter of shape {tuple(parameter.shape)} is not registered with this {type(module).__name__}; "
            f"it has {len(known)} external parameters"
        )
    _external[module] = remaining
    _tell_followers(module)


def external_parameters(module: nn.Module) -> tuple[nn.Parameter, ...]:
    """What is registered with `module`, in order."""
    return tuple(_external.get(module, ()))


def follow(follower: Follower) -> None:
    """Call `follower.follow_external` at every change from now on. Keeps nothing alive."""
    _followers.add(follower)


def _tell_followers(module: nn.Module) -> None:
    for follower in list(_followers):
        follower.follow_external(module)


def _check(module: object, parameter: object) -> None:
    if not isinstance(module, nn.Module):
        raise UsageError(f"an external parameter belongs to a torch.nn.Module, got {type(module).__name__}")
    if not isinstance(parameter, nn.Parameter):
        raise UsageError(
            f"got a {type(parameter).__name__} instead of a torch.nn.Parameter; pass the parameter itself, "
            f"for example model.embed.weight"
        )
