"""The module named `deepspeed`: its names, what each of them is, and how it is found."""

from __future__ import annotations

import importlib
import pathlib
import subprocess
import sys

import pytest

from fullspeed.base.errors import UsageError
from fullspeed.compat import FOLDER, docs
from fullspeed.compat.names import ALIASES, MODULES, REMEDIES, VERSION, Ours, Waiting
from fullspeed.compat.waiting import make_stand_in

ROOT = pathlib.Path(__file__).parents[3]
SRC = str(ROOT / "src")


def python(code: str, *paths: str | pathlib.Path) -> subprocess.CompletedProcess[str]:
    """Run code in a new Python that finds modules in `paths` and in ours."""
    environment = {"PYTHONPATH": ":".join(map(str, (*paths, SRC))), "OMP_NUM_THREADS": "1"}
    return subprocess.run(
        [sys.executable, "-c", code], env=environment, capture_output=True, text=True, timeout=120, check=False
    )


def said(code: str, *paths: str | pathlib.Path) -> str:
    done = python(code, *paths)
    assert done.returncode == 0, done.stderr
    return done.stdout.strip()


@pytest.mark.parametrize("module", MODULES)
def test_every_name_that_works_is_there(module):
    for name, target in MODULES[module].items():
        if isinstance(target, Ours):
            assert hasattr(importlib.import_module(target.module), target.attribute), name


def test_names_that_wait_say_for_what_and_what_to_do():
    waiting = [target.feature for names in MODULES.values() for target in names.values() if isinstance(target, Waiting)]
    assert waiting
    assert set(waiting) == set(REMEDIES)
    stand_in = make_stand_in("deepspeed.pipe", "PipelineModule", "pipeline parallelism")
    with pytest.raises(UsageError, match=r"deepspeed\.pipe\.PipelineModule .* pipeline parallelism; train with ZeRO"):
        stand_in(layers=[])
    with pytest.raises(UsageError, match="pipeline parallelism"):
        stand_in.from_layers  # noqa: B018
    assert not isinstance(object(), stand_in)
    assert not hasattr(stand_in, "__wrapped__")  # what inspect asks

    class Mine(stand_in):
        pass

    with pytest.raises(UsageError, match="PipelineModule"):
        Mine()


def test_the_list_of_names_is_current():
    assert docs.PATH.read_text() == docs.render()


def test_both_packages_named_deepspeed_are_the_same_file():
    assert (ROOT / "compat/src/deepspeed/__init__.py").read_text() == (FOLDER / "deepspeed/__init__.py").read_text()


LOOK = """
import importlib.util, importlib.metadata as metadata, sys
{activate}
assert importlib.util.find_spec("deepspeed") is not None
import deepspeed
assert "torch" not in sys.modules, "importing it is to be cheap"
assert deepspeed.runtime.lr_schedules.VALID_LR_SCHEDULES[0] == "LRRangeTest"  # nothing but deepspeed was imported
assert deepspeed.utils.groups and deepspeed.ops.adam.FusedAdam
import deepspeed.zero, deepspeed.comm as dist, deepspeed.runtime.zero.partition_parameters as pp
from deepspeed.runtime import zero
assert deepspeed.zero is zero and pp.Init is zero.Init is deepspeed.zero.Init and deepspeed.dist is dist
from fullspeed import Engine, initialize
assert deepspeed.initialize is initialize and deepspeed.DeepSpeedEngine is Engine
zero.Init = "another"  # integrations replace names
assert deepspeed.zero.Init == "another"
assert "initialize" in dir(deepspeed) and "runtime" in dir(deepspeed)
try: deepspeed.nothing
except AttributeError as error: print(error)
print(metadata.version("deepspeed"), deepspeed.__version__, metadata.metadata("deepspeed")["Name"])
"""
SEEN = f"module 'deepspeed' has no attribute 'nothing'\n{VERSION}+fullspeed {VERSION}+fullspeed deepspeed"


def test_a_program_can_make_it_importable():
    assert said(LOOK.format(activate="import fullspeed.compat; fullspeed.compat.activate()")) == SEEN


def test_processes_started_with_the_folder_in_their_path_find_it():
    code = """
import subprocess, sys
from fullspeed.compat import activate_children
activate_children(); activate_children()
print(subprocess.run([sys.executable, "-c", sys.argv[1]], capture_output=True, text=True, check=True).stdout.strip())
import os; assert os.environ["PYTHONPATH"].count("dropin") == 1
"""
    done = subprocess.run(
        [sys.executable, "-c", code, LOOK.format(activate="")],
        env={"PYTHONPATH": SRC},
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout.strip() == SEEN


def test_it_never_takes_the_place_of_another_one_unasked(tmp_path):
    (tmp_path / "deepspeed").mkdir()
    (tmp_path / "deepspeed" / "__init__.py").write_text("real = True\n")
    refused = python("from fullspeed.compat import activate; activate()", tmp_path)
    assert "another deepspeed is installed at" in refused.stderr
    assert "over_installed=True" in refused.stderr
    late = python("import deepspeed; from fullspeed.compat import activate; activate(over_installed=True)", tmp_path)
    assert "imported already" in late.stderr
    asked = "from fullspeed.compat import activate; activate(over_installed=True); import deepspeed"
    assert said(asked + "; print(deepspeed.__version__)", tmp_path) == f"{VERSION}+fullspeed"


def test_a_folder_of_that_name_is_no_other_one(tmp_path):
    (tmp_path / "deepspeed").mkdir()
    code = (
        "from fullspeed.compat import activate; activate(); activate(); import deepspeed; print(deepspeed.__version__)"
    )
    assert said(code, tmp_path) == f"{VERSION}+fullspeed"


def test_aliases_lead_to_modules():
    assert set(ALIASES.values()) <= set(MODULES)
    assert not set(ALIASES) & set(MODULES)
