"""The generated documentation is current, complete, and the package stays light."""

import json
import subprocess
import sys

import pytest

from fullspeed.config import docs
from fullspeed.config.hints import walk
from fullspeed.config.root import Config


def test_files_are_current():
    docs.main(["--check"])


def test_drift_is_found(tmp_path):
    docs.main(["--into", str(tmp_path)])
    docs.main(["--into", str(tmp_path), "--check"])
    (tmp_path / "config.md").write_text("old")
    with pytest.raises(SystemExit, match=r"config\.md is not current"):
        docs.main(["--into", str(tmp_path), "--check"])


def test_every_key_is_documented():
    text = docs.markdown()
    for _, model in walk(Config, ""):
        for key in model.model_fields:
            assert f"| `{key}` |" in text


def test_differences_are_documented():
    text = docs.markdown()
    for difference in docs.DEFAULT_DIFFERENCES:
        assert difference.why in text


def test_schema_knows_the_forms_the_loader_accepts():
    made = docs.schema()
    json.dumps(made)
    assert {"bfloat16", "msamp", "zero_optimization"} <= set(made["properties"])
    assert made["additionalProperties"] is False
    zero = made["$defs"]["ZeroOptimization"]["properties"]
    assert "prefetch_bucket_size" in zero
    assert zero["stage3_gather_fp16_weights_on_model_save"]["deprecated"]


def test_import_needs_no_torch():
    code = "import sys, fullspeed.config; print('torch' in sys.modules)"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "False"
