"""What `fullspeed report` says about a machine: versions, device, kernels, backends, cores, memory."""

from __future__ import annotations

import argparse
import importlib.util
import json
import os
import platform
from collections.abc import Sequence
from importlib.metadata import PackageNotFoundError, version

import torch

from fullspeed import __version__
from fullspeed.accelerator import Accelerator, get_accelerator
from fullspeed.comm.backends import available_backends
from fullspeed.kernels import native, quantize, registry, update

PACKAGES = (
    "torch", "pydantic", "numpy", "safetensors", "transformers", "accelerate", "triton", "tensorboard", "wandb",
    "comet-ml", "matplotlib",
)  # fmt: skip
OPERATIONS = (quantize, update)
"""Modules that define kernels: they have to be imported for the registry to know them."""


def describe(words: Sequence[str]) -> list[str]:
    """Lines of the report; one line of JSON with `--json`."""
    parser = argparse.ArgumentParser(prog="fullspeed report", description="What FullSpeed finds on this machine.")
    parser.add_argument("--json", action="store_true", help="print one JSON object")
    given = parser.parse_args(list(words))
    rows = collect()
    if given.json:
        return [json.dumps(dict(rows))]
    width = max(len(name) for name, _ in rows)
    return [f"{name:<{width}}  {value}" for name, value in rows]


def collect() -> list[tuple[str, str]]:
    """Rows of name and value, in the order they are shown."""
    accelerator = get_accelerator()
    rows = [("python", platform.python_version()), ("platform", platform.platform())]
    rows += [("fullspeed", __version__), *((name, _version(name)) for name in PACKAGES)]
    rows += [
        ("deepspeed module", _deepspeed_module()),
        ("accelerator", f"{accelerator.device_name()}, {accelerator.device_count()} here"),
        ("memory", f"{accelerator.available_memory() / 2**30:.1f} of {_total_gib(accelerator)} GiB free"),
        ("fast matmul", ", ".join(_fast_dtypes(accelerator))),
        ("default backend", accelerator.communication_backend_name()),
        ("backends", ", ".join(available_backends())),
        ("cores", f"{os.cpu_count()}, torch uses {torch.get_num_threads()}"),
    ]
    rows.append(("native library", native.describe()))
    choices = registry.choices(torch.device(accelerator.device_name()))
    rows += [(f"kernel {choice.op}", f"{choice.implementation} ({choice.reason})") for choice in choices]
    return rows


def _version(package: str) -> str:
    try:
        return version(package)
    except PackageNotFoundError:
        return "not installed"


def _deepspeed_module() -> str:
    """What `import deepspeed` would find: scripts and integrations written for DeepSpeed ask for that name."""
    found = importlib.util.find_spec("deepspeed")
    return "none" if found is None else f"{found.origin or 'a namespace'}, version {_version('deepspeed')}"


def _total_gib(accelerator: Accelerator) -> str:
    return f"{accelerator.total_memory() / 2**30:.1f}"


def _fast_dtypes(accelerator: Accelerator) -> list[str]:
    dtypes = (torch.float32, torch.bfloat16, torch.float16)
    return [str(dtype).removeprefix("torch.") for dtype in dtypes if accelerator.has_native_matmul(dtype)]
