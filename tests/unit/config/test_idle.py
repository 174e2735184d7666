"""Settings that are called idle really are read nowhere."""

from __future__ import annotations

import re
from pathlib import Path

import fullspeed
from fullspeed.config import load_config
from fullspeed.config.idle import UNREAD, idle_settings
from fullspeed.config.supported import value_at

SOURCE = Path(fullspeed.__file__).parent


def test_no_code_reads_what_is_called_unread() -> None:
    names_alone = {"config", "compat"}  # which lists DeepSpeed's modules, some called as a section
    files = [file for file in SOURCE.rglob("*.py") if not names_alone & set(file.parts) and file.name != "accessors.py"]
    assert len(files) > 50
    text = "\n".join(file.read_text() for file in files)
    read = [path for path in UNREAD if re.search(rf"[\w)]\.{path.rsplit('.', 1)[-1]}\b", text)]
    assert read == []
    for path in UNREAD:
        value_at(load_config({}), path)


def test_only_what_was_written_is_named() -> None:
    assert idle_settings(load_config({})) == []
    assert idle_settings(load_config({"zero_optimization": {"stage": 3, "stage3_max_live_parameters": 9}})) == []
    written = load_config(
        {"disable_allgather": False, "timers": {"throughput": {"enabled": False, "synchronized": True}}}
    )
    assert [idle.path for idle in idle_settings(written)] == ["disable_allgather", "timers.throughput.synchronized"]
