"""Any elements can be read, however they were cut; what is damaged is named."""

from __future__ import annotations

import itertools
import zlib

import pytest
import torch

from fullspeed.base.errors import CheckpointError
from fullspeed.checkpoint.durable import write_file
from fullspeed.checkpoint.folder import PendingCheckpoint
from fullspeed.checkpoint.manifest import BUFFER, OPTIMIZER, PARAM, Chunk, Manifest
from fullspeed.checkpoint.reader import CheckpointReader
from fullspeed.checkpoint.tensor_file import write_tensors
from tests.unit.checkpoint import mini


@pytest.mark.parametrize("cuts", [(0, 20), (0, 7, 20), (0, 1, 2, 19, 20)])
def test_every_range_of_every_cut(tmp_path, cuts):
    mini.save(tmp_path, "t", 3, cuts)
    reader = CheckpointReader(tmp_path, "t", 0)
    for start, stop in itertools.combinations(range(21), 2):
        assert torch.equal(reader.elements(PARAM, "w", start, stop), mini.values(3)[start:stop])
    assert reader.elements(PARAM, "w", 4, 4).numel() == 0
    reader.close()


def test_elements_nobody_saved_are_an_error(tmp_path):
    mini.save(tmp_path, "t", 3, (5, 12))
    reader = CheckpointReader(tmp_path, "t", 0)
    with pytest.raises(CheckpointError, match="no param of w for elements 0 to 5"):
        reader.elements(PARAM, "w", 0, 12)
    with pytest.raises(CheckpointError, match="no param of v"):
        reader.elements(PARAM, "v", 0, 1)


def test_a_rank_prefers_its_own_copy_and_falls_back_to_the_first(tmp_path):
    pending = PendingCheckpoint.prepare(tmp_path, "t")
    chunks, files = [], {}
    for rank in (0, 2):
        name = f"rank_{rank}"
        made = [
            Chunk("mean", BUFFER, (2,), 0, 2, "F32", False, True, rank, name),
            Chunk("w", OPTIMIZER + "step", (), 0, 1, "F32", False, True, rank, name),
        ]
        tensors = {made[0].key: torch.full((2,), float(rank)), made[1].key: torch.tensor(float(rank))}
        files[name] = write_tensors(pending.data / name, tensors)
        chunks += made
    pending.commit(Manifest(3, 1, None, pending.data_name, chunks=tuple(chunks), files=files, aliases={"v": "w"}))
    for rank, expected in ((0, 0.0), (1, 0.0), (2, 2.0)):
        reader = CheckpointReader(tmp_path, "t", rank)
        assert reader.whole(BUFFER, "mean").tolist() == [expected] * 2
        assert reader.whole(OPTIMIZER + "step", "v").item() == expected
        assert reader.optimizer_kinds("v") == [OPTIMIZER + "step"]


def test_an_unknown_tag_lists_those_there_are(tmp_path):
    mini.save(tmp_path, "one", 1)
    mini.save(tmp_path, "two", 1)
    with pytest.raises(CheckpointError, match=r"no checkpoint 'three'.*has one, two"):
        CheckpointReader(tmp_path, "three", 0)
    with pytest.raises(CheckpointError, match="has no checkpoint"):
        CheckpointReader(tmp_path / "nowhere", "three", 0)


def test_every_damaged_byte_is_noticed_and_its_file_named(tmp_path):
    mini.save(tmp_path, "t", 1)
    for path in sorted((tmp_path / "t" / "data-0").iterdir()):
        data = path.read_bytes()
        for at in (0, len(data) // 2, len(data) - 1):
            path.write_bytes(data[:at] + bytes([data[at] ^ 1]) + data[at + 1 :])
            with pytest.raises(CheckpointError, match=rf"{path.name} is corrupted"):
                CheckpointReader(tmp_path, "t", 0).verify(1)
        path.write_bytes(data[:-1])
        with pytest.raises(CheckpointError, match=rf"{path.name} is torn: it has {len(data) - 1} bytes"):
            CheckpointReader(tmp_path, "t", 0).verify(1)
        path.unlink()
        with pytest.raises(CheckpointError, match=rf"{path.name} is missing"):
            CheckpointReader(tmp_path, "t", 0).verify(1)
        path.write_bytes(data)
    assert mini.load(tmp_path, "t") == 1


def test_ranks_share_the_checking(tmp_path):
    mini.save(tmp_path, "t", 1)
    path = tmp_path / "t" / "data-0" / "rank_00001.safetensors"
    path.write_bytes(path.read_bytes()[:-1] + b"\xff")
    found = []
    for rank in range(3):
        try:
            CheckpointReader(tmp_path, "t", rank).verify(3)
        except CheckpointError:
            found.append(rank)
    assert len(found) == 1


def test_the_checksum_is_crc_32(tmp_path):
    assert write_file(tmp_path / "f", [b"ab", b"c"]) == (3, zlib.crc32(b"abc"))
