"""Stand-ins for names whose feature is not built: they can be imported and asked for, not used."""

from __future__ import annotations

from typing import Any, NoReturn

from fullspeed.base.errors import UsageError
from fullspeed.compat.names import REMEDIES


class _Refusing(type):
    """A class that cannot be called, and whose attributes cannot be read, without saying why."""

    feature: str
    full_name: str

    def __call__(cls, *args: Any, **kwargs: Any) -> NoReturn:
        raise cls._refusal()

    def __getattr__(cls, name: str) -> NoReturn:
        if name.startswith("__"):  # Python's own questions, such as those of inspect and pickle
            raise AttributeError(name)
        raise cls._refusal()

    def _refusal(cls) -> UsageError:
        return UsageError(
            f"{cls.full_name} is not available in this version of FullSpeed, it needs {cls.feature}; "
            f"{REMEDIES[cls.feature]}"
        )


def make_stand_in(module: str, name: str, feature: str) -> type:
    """A class under that name. No object is an instance of it; calling it or a subclass raises UsageError."""
    members = {"__module__": module, "feature": feature, "full_name": f"{module}.{name}"}
    return _Refusing(name, (), members)
