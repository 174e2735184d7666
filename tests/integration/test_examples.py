"""Examples run as their READMEs say."""

from __future__ import annotations

import pathlib
import re
import subprocess
import sys

from safetensors.torch import load_file

EXAMPLES = pathlib.Path(__file__).parents[2] / "examples"


def run_example(name: str, *words: str) -> str:
    """What an example on two ranks prints."""
    command = [sys.executable, "-m", "fullspeed.cli.main", "--num_gpus", "2", str(EXAMPLES / name), *words]
    done = subprocess.run(command, capture_output=True, text=True, timeout=240, check=False)
    assert done.returncode == 0, f"{name}:\n{done.stdout}\n{done.stderr}"
    return done.stdout


def test_a_model_is_built_loaded_trained_edited_and_saved_in_shards(tmp_path: pathlib.Path) -> None:
    said = run_example("zero_init.py", "--steps", "2", "--output-dir", str(tmp_path))
    assert re.search(r"this rank holds [\d,]+ = 0\.500 of them", said)
    assert re.search(r"^step 2: loss \d", said, re.M)
    rows = re.findall(r"^ +(\w+) +([\d.]+) +formula +([\d.]+)$", said, re.M)
    assert [kind for kind, _, _ in rows] == ["params", "grads", "master", "optimizer"]
    for kind, held, formula in rows:
        assert abs(float(held) - float(formula)) <= 0.01 * float(formula), kind
    assert "the largest element of the row is 0.0 in the master" in said
    before, after = (load_file(tmp_path / kind / "model.safetensors") for kind in ("pretrained", "trained"))
    assert before["embedding.weight"][0].any()
    assert not after["embedding.weight"][0].any()
    assert not before["blocks.0.mlp.0.weight"].equal(after["blocks.0.mlp.0.weight"].float())
