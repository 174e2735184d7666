"""Which accelerator this process uses: the one set, the one in `DS_ACCELERATOR`, or the one torch finds."""

from __future__ import annotations

import torch

from fullspeed.accelerator.base import Accelerator
from fullspeed.accelerator.cpu import CpuAccelerator
from fullspeed.accelerator.device import DeviceAccelerator
from fullspeed.base import env
from fullspeed.base.errors import UsageError

SUPPORTED = ("cuda", "cpu", "xpu", "npu", "mps", "hpu", "mlu", "sdaa", "supa")

_current: Accelerator | None = None


def get_accelerator() -> Accelerator:
    """The accelerator of this process, chosen at the first call and the same ever after.

    Raises UsageError when `DS_ACCELERATOR` names a device that does not exist here.
    """
    global _current
    if _current is None:
        _current = _choose(env.get("DS_ACCELERATOR"))
    return _current


def set_accelerator(accelerator: Accelerator) -> None:
    """Use `accelerator` from now on, whatever the environment says."""
    global _current
    _current = accelerator


def is_current_accelerator_supported() -> bool:
    """Whether the chosen accelerator is one that FullSpeed knows by name."""
    return get_accelerator().device_type in SUPPORTED


def _choose(wanted: str | None) -> Accelerator:
    """The accelerator named `wanted`; without a name torch's own, else the CPU."""
    found = _find_device_type()
    if wanted is None:
        return CpuAccelerator() if found is None else DeviceAccelerator(found)
    if wanted not in SUPPORTED:
        raise UsageError(f"DS_ACCELERATOR is {wanted!r}; choose one of {', '.join(SUPPORTED)}")
    if wanted == "cpu":
        return CpuAccelerator()
    if wanted != found:
        present = "only the CPU" if found is None else f"{found} and the CPU"
        raise UsageError(
            f"DS_ACCELERATOR is {wanted!r}, but this torch ({torch.__version__}) finds {present} here; "
            f"unset it, or install a torch build and driver for {wanted}"
        )
    return DeviceAccelerator(found)


def _find_device_type() -> str | None:
    """Type of the accelerator that is present, None on a CPU-only machine. Initialises no device."""
    device = torch.accelerator.current_accelerator(check_available=True)
    return None if device is None else device.type
