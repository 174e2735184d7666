"""Builds the native library where there is a C++ compiler; without one the package is complete, and slower.

The library is plain C++ behind C functions that ctypes calls. It includes neither Python's nor torch's headers, so one
wheel, `py3-none-PLATFORM`, serves every Python and every torch. pyproject.toml holds everything else.
"""

from __future__ import annotations

import pathlib
import platform
import sys
from concurrent.futures import ThreadPoolExecutor
from typing import Any, NamedTuple

from setuptools import Extension, setup
from setuptools.command.bdist_wheel import bdist_wheel
from setuptools.command.build_ext import build_ext
from setuptools.errors import PlatformError

SOURCES = pathlib.Path("csrc")
COMMON = (
    "-std=c++17", "-O2", "-ftree-vectorize", "-fPIC", "-fvisibility=hidden", "-Wall", "-Wextra", "-Wno-unknown-pragmas",
)  # fmt: skip
ARITHMETIC = ("-fno-math-errno", "-fno-trapping-math", "-ffp-contract=off")
PER_SET = ("update.cpp", "quantize.cpp")  # compiled for each instruction set
X86_SETS = {"avx2": "x86-64-v3", "avx512": "x86-64-v4"}
IS_MAC = sys.platform == "darwin"


class Unit(NamedTuple):
    """One compilation; sources that are compiled several times need a name for each."""

    source: str
    name: str
    flags: tuple[str, ...]


def units() -> list[Unit]:
    """What the library is made of, slowest to compile first."""
    sets = X86_SETS if platform.machine().lower() in ("x86_64", "amd64") else {"baseline": None}
    arithmetic = [
        Unit(source, name, (*ARITHMETIC, f"-DINSTRUCTION_SET={name}", *([f"-march={arch}"] if arch else [])))
        for source in PER_SET
        for name, arch in sets.items()
    ]
    skipped = set(PER_SET) if sys.platform == "linux" else {*PER_SET, "file_io.cpp", "io_uring.cpp"}
    others = sorted(path.name for path in SOURCES.glob("*.cpp") if path.name not in skipped)
    openmp = () if IS_MAC else ("-fopenmp",)
    return arithmetic + [Unit(source, "common", openmp) for source in others]


class BuildNative(build_ext):
    """Compiles and links the library; a failure is reported, and passed over because the extension is optional."""

    def get_ext_filename(self, fullname: str) -> str:
        """The library's name is the same for every Python."""
        return f"{fullname.replace('.', '/')}.so"

    def build_extension(self, ext: Extension) -> None:
        """Compile all units at once, and link them."""
        if self.compiler.compiler_type != "unix":
            raise PlatformError(f"the native library needs gcc or clang, not {self.compiler.compiler_type}")
        with ThreadPoolExecutor() as pool:
            objects = list(pool.map(self._compile, units()))
        flags = [] if IS_MAC else ["-fopenmp", "-pthread", "-static-libstdc++", "-static-libgcc", "-s"]
        target = self.get_ext_fullpath(ext.name)
        self.compiler.link_shared_object(objects, target, extra_postargs=flags, target_lang="c++")

    def _compile(self, unit: Unit) -> Any:
        folder = str(pathlib.Path(self.build_temp, unit.name))
        source = str(SOURCES / unit.source)
        (made,) = self.compiler.compile([source], output_dir=folder, extra_postargs=[*COMMON, *unit.flags])
        return made


class PlainWheel(bdist_wheel):
    """Tags the wheel for the platform alone."""

    def get_tag(self) -> tuple[str, str, str]:
        """Any Python 3, no Python ABI."""
        return "py3", "none", super().get_tag()[2]


setup(
    ext_modules=[
        Extension(
            "fullspeed.kernels._native",
            sources=sorted(map(str, SOURCES.glob("*.cpp"))),
            depends=sorted(map(str, SOURCES.glob("*.h"))),
            optional=True,
        )
    ],
    cmdclass={"build_ext": BuildNative, "bdist_wheel": PlainWheel},
)
