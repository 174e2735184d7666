"""Modules the user declares leaves: stage 3 gathers the whole subtree of one together, blocks of experts for example.

A leaf is entered once and everything in it is there, whichever of its modules a rank uses. The mark belongs to the
module object: a deep copy of it is not marked.
"""

from __future__ import annotations

import difflib
import weakref
from collections.abc import Callable, Sequence

from torch import nn

from fullspeed.base.errors import UsageError
from fullspeed.sharding import placeholder

_marked: weakref.WeakSet[nn.Module] = weakref.WeakSet()


def set_z3_leaf_modules(
    model: nn.Module, leaf_module_classes: type | str | Sequence[type | str], raise_if_not_found: bool = True
) -> list[nn.Module]:
    """Mark every module of `model` that is an instance of one of the classes. Before `initialize`.

    Args:
        model: the model, itself included in the search.
        leaf_module_classes: classes, class names, or dotted class paths; one of them, or a sequence.
        raise_if_not_found: an error where no module is of any of them.

    Returns:
        The modules marked, in registration order.

    Raises:
        UsageError: nothing found, or an engine owns the model already.
    """
    return _mark(model, _of_classes(model, leaf_module_classes, is_required=raise_if_not_found), flag=True)


def unset_z3_leaf_modules(
    model: nn.Module, leaf_module_classes: type | str | Sequence[type | str], raise_if_not_found: bool = True
) -> list[nn.Module]:
    """Undo `set_z3_leaf_modules` for these classes, with the same arguments, result and errors."""
    return _mark(model, _of_classes(model, leaf_module_classes, is_required=raise_if_not_found), flag=False)


def set_z3_leaf_modules_by_name(
    model: nn.Module, module_names: str | Sequence[str], raise_if_not_found: bool = True
) -> list[nn.Module]:
    """Mark the modules with these fully qualified names; UsageError names those that do not exist."""
    found = _of_names(model, module_names, str.__eq__, "is named", is_required=raise_if_not_found)
    return _mark(model, found, flag=True)


def set_z3_leaf_modules_by_suffix(
    model: nn.Module, module_name_suffixes: str | Sequence[str], raise_if_not_found: bool = True
) -> list[nn.Module]:
    """Mark the modules whose fully qualified names end so; UsageError names endings that no module has."""
    found = _of_names(
        model, module_name_suffixes, str.endswith, "has a name that ends in", is_required=raise_if_not_found
    )
    return _mark(model, found, flag=True)


def get_z3_leaf_modules(model: nn.Module) -> list[nn.Module]:
    """The marked modules of `model`, in registration order."""
    return [module for module in model.modules() if module in _marked]


def set_z3_leaf_module(model: nn.Module, flag: bool) -> None:
    """Mark one module, or with `flag` False take its mark away. Before `initialize`."""
    _mark(model, [model], flag=flag)


def z3_leaf_module(model: nn.Module) -> bool:
    """Whether this module is marked."""
    return model in _marked


def z3_leaf_parameter(model_parameter: nn.Parameter) -> bool:
    """Whether the parameter lies in a marked module."""
    return any(param is model_parameter for leaf in _marked for param in leaf.parameters())


def _mark(model: nn.Module, modules: list[nn.Module], *, flag: bool) -> list[nn.Module]:
    if any(placeholder.is_adopted(param) for param in model.parameters()):
        raise UsageError(
            "leaf modules decide how parameters are grouped, and an engine has grouped these already; set or unset "
            "them before initialize"
        )
    for module in modules:
        if flag:
            _marked.add(module)
        else:
            _marked.discard(module)
    return modules


def class_paths(kind: type) -> set[str]:
    """The texts that name a class: its own name, its dotted path, and for torch's modules `torch.nn.Linear`, say."""
    paths = {kind.__name__, f"{kind.__module__}.{kind.__qualname__}"}
    return paths | {f"torch.nn.{kind.__qualname__}"} if kind.__module__.startswith("torch.nn.") else paths


def _of_classes(model: nn.Module, classes: type | str | Sequence[type | str], *, is_required: bool) -> list[nn.Module]:
    wanted = [classes] if isinstance(classes, type | str) else list(classes)
    for other in wanted:
        if not isinstance(other, type | str):
            raise UsageError(f"leaf module class is {other!r}; give a class, its name or its dotted path")
    kinds = tuple(kind for kind in wanted if isinstance(kind, type))
    texts = {text for text in wanted if isinstance(text, str)}
    found = [
        module
        for module in model.modules()
        if isinstance(module, kinds) or not texts.isdisjoint(class_paths(type(module)))
    ]
    if is_required and not found:
        names = [*(kind.__name__ for kind in kinds), *sorted(texts)]
        present = [type(module).__name__ for module in model.modules()]
        raise UsageError(f"no module of the model is a {' or '.join(names)}; {_nearest(names, present)}")
    return found


def _of_names(
    model: nn.Module,
    texts: str | Sequence[str],
    matches: Callable[[str, str], bool],
    relation: str,
    *,
    is_required: bool,
) -> list[nn.Module]:
    wanted = [texts] if isinstance(texts, str) else list(texts)
    modules = dict(model.named_modules())
    missing = [text for text in wanted if not any(matches(name, text) for name in modules)]
    if is_required and missing:
        absent = " or ".join(repr(text) for text in missing)
        raise UsageError(f"no module of the model {relation} {absent}; {_nearest(missing, list(modules)[1:])}")
    return [module for name, module in modules.items() if any(matches(name, text) for text in wanted)]


def _nearest(wanted: Sequence[str], present: Sequence[str]) -> str:
    """What the user may have meant: the most similar of what is present, or else the first of it."""
    distinct = list(dict.fromkeys(present))
    similar = [name for text in wanted for name in difflib.get_close_matches(text, distinct)]
    return f"did you mean {' or '.join(dict.fromkeys(similar))}?" if similar else f"it has {', '.join(distinct[:20])}"
