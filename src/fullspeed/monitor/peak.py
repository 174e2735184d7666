"""The arithmetic peak of known accelerators, for model-FLOPs utilisation."""

from __future__ import annotations

import torch

# Dense TFLOP/s of matrix units as the makers state them: (fp32, through TF32 where that exists; bf16 and fp16).
# The first name that is part of the device's own name counts.
_PEAK_TFLOPS = {
    "B200": (1100.0, 2250.0),
    "H200": (494.7, 989.4),
    "H100 PCIe": (378.0, 756.0),
    "H100": (494.7, 989.4),
    "A100": (156.0, 312.0),
    "L40S": (183.0, 362.0),
    "L4": (60.0, 121.0),
    "A10": (62.5, 125.0),
    "V100": (15.7, 125.0),
    "MI300X": (653.7, 1307.4),
    "MI250X": (95.7, 383.0),
}


def peak_flops(device: torch.device, dtype: torch.dtype) -> float | None:
    """FLOPs a second that the device can do in `dtype` at most; None where that is not known, as on a CPU."""
    if device.type == "cpu":
        return None
    name = str(torch.get_device_module(device).get_device_name(device))
    return peak_of(name, dtype)


def peak_of(device_name: str, dtype: torch.dtype) -> float | None:
    """The same for a device by its maker's name, such as "NVIDIA H100 80GB HBM3"."""
    column = {torch.float32: 0, torch.bfloat16: 1, torch.float16: 1}.get(dtype)
    known = next((peaks for name, peaks in _PEAK_TFLOPS.items() if name in device_name), None)
    return None if known is None or column is None else known[column] * 1e12
