"""The manifest says what was saved, and notices when it was changed."""

from __future__ import annotations

import json

import pytest

from fullspeed.base.errors import CheckpointError
from fullspeed.checkpoint.manifest import Chunk, FileRecord, Manifest, ParamRecord

MANIFEST = Manifest(
    world_size=2,
    stage=3,
    optimizer="AdamW",
    data="data-0",
    params=(ParamRecord("a.w", (3, 5), "bfloat16", True, True), ParamRecord("s", (), "float32", False, False)),
    aliases={"b.w": "a.w"},
    buffers={"norm.mean": (4,), "count": ()},
    counters={"global_steps": 7},
    chunks=(Chunk("a.w", "optimizer/exp_avg", (3, 5), 2, 9, "F32", True, False, 1, "rank_00001.safetensors"),),
    files={"rank_00001.safetensors": FileRecord(100, 12345)},
)


def test_round_trip():
    text = MANIFEST.to_json()
    assert Manifest.from_json(text, "m") == MANIFEST
    assert Manifest.from_json(text, "m").to_json() == text


def test_keys_of_chunks_are_unique_and_readable():
    assert MANIFEST.chunks[0].key == "optimizer/exp_avg:a.w[2:9]"


@pytest.mark.parametrize("cut", [0, 1, 10, 300, 800])
def test_a_torn_manifest_is_named(cut):
    with pytest.raises(CheckpointError, match=r"dir/manifest\.json"):
        Manifest.from_json(MANIFEST.to_json()[:cut], "dir/manifest.json")


def test_an_edited_manifest_is_noticed():
    text = MANIFEST.to_json().replace('"global_steps": 7', '"global_steps": 8')
    with pytest.raises(CheckpointError, match="checksum"):
        Manifest.from_json(text, "m")


@pytest.mark.parametrize("text", ["[]", "{}", '{"format": "other"}'])
def test_a_foreign_file_is_no_manifest(text):
    with pytest.raises(CheckpointError, match="not the manifest of a FullSpeed checkpoint"):
        Manifest.from_json(text, "m")


def test_another_version_is_refused_by_number():
    whole = {**json.loads(MANIFEST.to_json()), "version": 99}
    with pytest.raises(CheckpointError, match="version 99, this release reads version 1"):
        Manifest.from_json(json.dumps(whole), "m")
