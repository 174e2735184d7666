"""Where scopes begin and end: hooks on units and on modules that own parameters, and how they go with torch.compile.

torch calls a module's own hooks before it hands the forward to the compiler. So the hooks of a compiled unit run as
ever, and what is compiled sees whole, ordinary parameters. Hooks of modules inside a compiled unit would break its
graph; they go, for the unit's own hooks cover all its parameters.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import Any, ParamSpec, TypeVar

import torch
from torch import nn

from fullspeed.sharding import external
from fullspeed.sharding.group import FlatGroup
from fullspeed.sharding.plan import scope_groups

P = ParamSpec("P")
R = TypeVar("R")

Enter = Callable[[Sequence[FlatGroup], nn.Module, Any], None]
Leave = Callable[[Sequence[FlatGroup], nn.Module, Any, Any], None]

_REASON = "FullSpeed's hooks communicate; compile with engine.compile(), which keeps them out of the graph"


def not_compiled(hook: Callable[P, R]) -> Callable[P, R]:
    """`hook`, out of the compiler's sight: compiled code that calls it ends its graph there and goes on after it."""
    wrapped: Callable[P, R] = torch.compiler.disable(hook, reason=_REASON)
    return wrapped


def uncompiled(method: Callable[P, R]) -> Callable[P, R]:
    """The same for a method of a class; the compiler is not imported before the first call."""
    disabled: list[Callable[P, R]] = []

    @functools.wraps(method)
    def call(*args: P.args, **kwargs: P.kwargs) -> R:
        if not disabled:
            disabled.append(not_compiled(method))
        return disabled[0](*args, **kwargs)

    return call


class Scopes:
    """The hooks on a model's modules that tell which groups are computed with.

    Args:
        root: the model; its hooks are there whatever it owns, for they are the borders of a forward.
        units: modules whose whole subtree is needed at once.
        groups: all groups; transient ones need scopes.
        enter: called before a scope with its groups, the module and its arguments.
        leave: called after it, with the output besides; also when the forward raised, with None.
    """

    def __init__(
        self, root: nn.Module, units: Sequence[nn.Module], groups: Sequence[FlatGroup], enter: Enter, leave: Leave
    ) -> None:
        self._root, self._units, self._groups = root, units, groups
        self._enter, self._leave = enter, leave
        self._scopes: dict[nn.Module, _Scope] = {}
        self._compiled: list[nn.Module] = []  # by `compile`, not by the user
        self._index_of = {param: group.index for group in groups for param in group.params}
        unit_set = set(units)
        self._owned = {module: scope_groups(module, self._index_of, unit_set) for module in root.modules()}
        for module in self._owned:
            self.follow_external(module)
        external.follow(self)
        already = _compiled_modules(root)
        for unit in units:
            if unit in already:
                self._unhook_inside(unit)

    def follow_external(self, module: nn.Module) -> None:
        """From its next call on, a module's scope has the groups it owns and those of its external parameters."""
        if module not in self._owned:
            return
        foreign = (self._index_of[param] for param in external.external_parameters(module) if param in self._index_of)
        needed = [self._groups[i] for i in sorted({*self._owned[module], *foreign})]
        needed = [group for group in needed if group.is_transient]
        if module not in self._scopes and (needed or module is self._root):
            self._scopes[module] = _Scope(module, self._enter, self._leave)
        if module in self._scopes:
            self._scopes[module].needed = needed

    @property
    def is_compiled(self) -> bool:
        """Whether `compile` was called."""
        return bool(self._compiled)

    def compile(self, backend: str | Callable[..., Any], options: dict[str, Any]) -> None:
        """Compile the units in place; those of one class and shape share one compilation.

        A single layer of torch.nn is one kernel already and stays as it is, unless there is nothing else.

        Args:
            backend: name or function, as for torch.compile.
            options: further arguments of torch.compile.
        """
        worthwhile = [unit for unit in self._units if any(True for _ in unit.children()) or not _is_of_torch(unit)]
        self._compiled = worthwhile or list(self._units)
        for unit in self._compiled:
            self._unhook_inside(unit)
            unit.compile(backend=backend, **options)

    def _unhook_inside(self, unit: nn.Module) -> None:
        self._owned[unit] = scope_groups(unit, self._index_of, [unit])  # units inside are not entered any more
        self.follow_external(unit)
        for inner in unit.modules():
            if inner is not unit and inner in self._owned:
                del self._owned[inner]
                if inner in self._scopes:
                    self._scopes.pop(inner).remove()

    def remove(self) -> None:
        """Take everything back that was done to the modules."""
        for scope in self._scopes.values():
            scope.remove()
        self._scopes, self._owned = {}, {}
        for unit in self._compiled:
            unit._compiled_call_impl = None
        self._compiled = []


class _Scope:
    """The hooks of one module. `needed` may change at any time, in the middle of the module's own call too."""

    def __init__(self, module: nn.Module, enter: Enter, leave: Leave) -> None:
        self.needed: Sequence[FlatGroup] = ()
        self._enter, self._leave = enter, leave
        self._entered: list[Sequence[FlatGroup]] = []  # what was needed when the calls under way began
        self._handles = [
            module.register_forward_pre_hook(_Hook(not_compiled(self._before)), prepend=True),
            module.register_forward_hook(_Hook(not_compiled(self._after)), always_call=True),
        ]

    def _before(self, module: nn.Module, args: Any) -> None:
        self._entered.append(self.needed)
        self._enter(self.needed, module, args)

    def _after(self, module: nn.Module, args: Any, output: Any) -> None:
        if self._entered:  # else the hooks were put on during this call
            self._leave(self._entered.pop(), module, args, output)

    def remove(self) -> None:
        """Take the hooks off."""
        for handle in self._handles:
            handle.remove()


class _Hook(functools.partial[None]):
    """A hook of one module and of no other: in a copy of the module, or a pickled one, is one that does nothing."""

    def __deepcopy__(self, memo: dict[int, Any]) -> _NoHook:
        return _NoHook()

    def __reduce__(self) -> tuple[type[_NoHook], tuple[()]]:
        return _NoHook, ()


class _NoHook:
    """What is left of a hook in a copy of its module."""

    def __call__(self, *args: Any) -> None:
        """Nothing."""


def _is_of_torch(module: nn.Module) -> bool:
    return type(module).__module__.startswith("torch.nn.")


def _compiled_modules(root: nn.Module) -> set[nn.Module]:
    """Modules of `root` the user compiled: by `module.compile()`, or by `torch.compile(module)`, which wraps it."""
    # Not at the top: the compiler takes longer to import than everything else here.
    from torch._dynamo import OptimizedModule

    found: set[nn.Module] = set()
    for module in root.modules():
        if isinstance(module, OptimizedModule):
            found.update((module, module._orig_mod))
        elif module._compiled_call_impl is not None:
            found.add(module)
    return found
