"""What `fullspeed report` says about a machine: versions, device, backends, cores, memory."""

from __future__ import annotations

import os
import platform
from importlib.metadata import PackageNotFoundError, version

import torch

from fullspeed import __version__
from fullspeed.accelerator import Accelerator, get_accelerator
from fullspeed.comm.backends import available_backends

PACKAGES = ("torch", "pydantic", "numpy", "safetensors", "transformers", "accelerate", "triton")


def collect() -> list[tuple[str, str]]:
    """Rows of name and value, in the order they are shown."""
    accelerator = get_accelerator()
    rows = [("python", platform.python_version()), ("platform", platform.platform())]
    rows += [("fullspeed", __version__), *((name, _version(name)) for name in PACKAGES)]
    rows += [
        ("accelerator", f"{accelerator.device_name()}, {accelerator.device_count()} here"),
        ("memory", f"{accelerator.available_memory() / 2**30:.1f} of {_total_gib(accelerator)} GiB free"),
        ("fast matmul", ", ".join(_fast_dtypes(accelerator))),
        ("default backend", accelerator.communication_backend_name()),
        ("backends", ", ".join(available_backends())),
        ("cores", f"{os.cpu_count()}, torch uses {torch.get_num_threads()}"),
    ]
    return rows


def _version(package: str) -> str:
    try:
        return version(package)
    except PackageNotFoundError:
        return "not installed"


def _total_gib(accelerator: Accelerator) -> str:
    return f"{accelerator.total_memory() / 2**30:.1f}"


def _fast_dtypes(accelerator: Accelerator) -> list[str]:
    dtypes = (torch.float32, torch.bfloat16, torch.float16)
    return [str(dtype).removeprefix("torch.") for dtype in dtypes if accelerator.has_native_matmul(dtype)]
