"""Settings every test shares: one CPU thread per process, no launcher's identity leaking in."""

from __future__ import annotations

import os
import pathlib

import pytest
from hypothesis import HealthCheck, settings

SOURCES = pathlib.Path(__file__).parents[1] / "src"
IDENTITY = (
    "RANK",
    "WORLD_SIZE",
    "LOCAL_RANK",
    "LOCAL_SIZE",
    "LOCAL_WORLD_SIZE",
    "MASTER_ADDR",
    "MASTER_PORT",
)

os.environ.setdefault("OMP_NUM_THREADS", "1")
# Child processes find the package as this process does, installed or not.
os.environ["PYTHONPATH"] = os.pathsep.join(filter(None, [str(SOURCES), os.environ.get("PYTHONPATH")]))

# Busy machines are slow, which is no fault of the code. Same examples every run: a red run can be repeated.
settings.register_profile("fullspeed", deadline=None, derandomize=True, suppress_health_check=[HealthCheck.too_slow])
settings.load_profile("fullspeed")


def pytest_collection_finish(session: pytest.Session) -> None:
    """Let the server that ranks are forked from import what the test files to run say with `PRELOAD`."""
    modules = {item.module for item in session.items if isinstance(item, pytest.Function)}
    names = {name for module in modules for name in getattr(module, "PRELOAD", ())}
    os.environ["TESTS_PRELOAD"] = " ".join(sorted(names))


@pytest.fixture(autouse=True)
def _no_foreign_identity(monkeypatch: pytest.MonkeyPatch) -> None:
    """Tests decide who they are; a pytest started inside a job must not inherit that job's rank."""
    for name in IDENTITY:
        monkeypatch.delenv(name, raising=False)
