"""The native library: whether it is there, and its functions as ctypes sees them; csrc/fullspeed.h declares the same.

`setup.py` builds it where there is a C++ compiler. Calls release the interpreter's lock while they run.
"""

from __future__ import annotations

import ctypes
import functools
import pathlib
import sys
from typing import NamedTuple

import torch

ABI_VERSION = 4
"""Of the interface below; a library with another one was built from other sources."""
PATH = pathlib.Path(__file__).with_name("_native.so")

DTYPES = {torch.float32: 1, torch.bfloat16: 2, torch.float16: 3}
"""The library's numbers of dtypes; 0 stands for no tensor."""


class TensorStruct(ctypes.Structure):
    """One tensor to update: `Tensor` of the library."""

    _fields_ = (
        ("param", ctypes.c_void_p), ("grad", ctypes.c_void_p), ("first", ctypes.c_void_p),
        ("second", ctypes.c_void_p), ("copy", ctypes.c_void_p), ("numel", ctypes.c_int64),
        ("step_size", ctypes.c_float), ("root_correction", ctypes.c_float),
    )  # fmt: skip


class UpdateStruct(ctypes.Structure):
    """How tensors are updated: `Update` of the library."""

    _fields_ = (
        ("rule", ctypes.c_int32), ("param", ctypes.c_int32), ("grad", ctypes.c_int32), ("state", ctypes.c_int32),
        ("copy", ctypes.c_int32), ("beta1", ctypes.c_float), ("beta2", ctypes.c_float), ("rest1", ctypes.c_float),
        ("rest2", ctypes.c_float), ("eps", ctypes.c_float), ("penalty", ctypes.c_float), ("shrink", ctypes.c_float),
    )  # fmt: skip


class BlocksStruct(ctypes.Structure):
    """How a row of values is quantised: `Blocks` of the library."""

    _fields_ = (
        ("values", ctypes.c_int32), ("bits", ctypes.c_int32), ("block", ctypes.c_int64), ("numel", ctypes.c_int64),
    )  # fmt: skip


class MessageStruct(ctypes.Structure):
    """The parts of one quantised row: `Message` of the library."""

    _fields_ = (("codes", ctypes.c_void_p), ("scales", ctypes.c_void_p))


class Native(NamedTuple):
    """The library, and what it can use of this processor."""

    functions: ctypes.CDLL
    instruction_sets: tuple[str, ...]  # best last; empty on an x86 processor without AVX2

    @property
    def best_set(self) -> int:
        """Number of the instruction set to use."""
        return len(self.instruction_sets) - 1


@functools.cache
def load() -> Native | str:
    """The library, or why there is none."""
    if not PATH.exists():
        return "not built: install FullSpeed where there is a C++ compiler"
    try:
        # After torch, so that both use the one OpenMP that torch brings, and its threads.
        functions = ctypes.CDLL(str(PATH))
    except OSError as error:
        return f"cannot be loaded: {error}"
    if functions.fs_abi_version() != ABI_VERSION:
        return "was built from other sources: install FullSpeed again"
    functions.fs_instruction_set.restype = ctypes.c_char_p
    functions.fs_update.argtypes = (
        ctypes.POINTER(UpdateStruct), ctypes.POINTER(TensorStruct), ctypes.c_int64, ctypes.c_int32, ctypes.c_int32,
    )  # fmt: skip
    blocks, address, int32 = ctypes.POINTER(BlocksStruct), ctypes.c_void_p, ctypes.c_int32
    functions.fs_quantize.argtypes = (blocks, address, address, address, int32, int32)
    functions.fs_dequantize_sum.argtypes = (
        blocks, ctypes.POINTER(MessageStruct), ctypes.c_int64, address, int32, int32,
    )  # fmt: skip
    functions.fs_copy_past_caches.restype = None
    functions.fs_copy_past_caches.argtypes = (address, address, ctypes.c_int64)
    if sys.platform == "linux":
        _declare_file_io(functions)
    names = (functions.fs_instruction_set(index) for index in range(functions.fs_num_instruction_sets()))
    return Native(functions, tuple(name.decode() for name in names))


def _declare_file_io(functions: ctypes.CDLL) -> None:
    handle, int32, int64 = ctypes.c_void_p, ctypes.c_int32, ctypes.c_int64
    functions.fs_io_create.restype = handle
    functions.fs_io_create.argtypes = (int32, int32, int64, ctypes.POINTER(int32))
    functions.fs_io_destroy.argtypes = (handle,)
    functions.fs_io_submit.restype = int64
    functions.fs_io_submit.argtypes = (handle, int32, int32, ctypes.c_void_p, int64, int64)
    functions.fs_io_wait.restype = int32
    functions.fs_io_wait.argtypes = (handle, int64)


def require() -> Native:
    """The library, for code that runs only where there is one."""
    native = load()
    assert isinstance(native, Native), native
    return native


def needs_native(device: torch.device) -> str:
    """The obstacle of native arithmetic: a CPU tensor, the library, and an instruction set it has code for."""
    if device.type != "cpu":
        return f"works on CPU tensors, not on {device.type}"
    native = load()
    if isinstance(native, str):
        return f"the native library {native}"
    return "" if native.instruction_sets else "the native library needs AVX2, which this processor lacks"


def describe() -> str:
    """One line about the library, for reports."""
    native = load()
    if isinstance(native, str):
        return native
    return f"loaded, instruction sets {', '.join(native.instruction_sets) or 'none'}"
