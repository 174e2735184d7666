"""Plain weights come in files of limited size, each written when it is complete, with an index of all."""

from __future__ import annotations

import itertools
import json

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from safetensors import safe_open
from safetensors.torch import load_file

from fullspeed.base.errors import UsageError
from fullspeed.checkpoint.export import WeightSpec, WeightWriter
from fullspeed.checkpoint.export_plan import parse_size, plan_shards
from fullspeed.checkpoint.model_files import ModelFiles
from tests.unit.checkpoint.test_folder import run_and_die

TENSORS = {name: torch.randn(size) for name, size in (("a", 3), ("b", 2), ("c", 9), ("d", 1))}


def write(folder, max_shard_size, file_format="safetensors", dtype=torch.float32):
    specs = [WeightSpec(name, tuple(tensor.shape), dtype) for name, tensor in TENSORS.items()]
    writer = WeightWriter(folder, specs, max_shard_size, file_format)
    for name, tensor in TENSORS.items():
        writer.add(name, tensor)
    return writer.finish()


@given(st.lists(st.integers(0, 12), max_size=9), st.integers(1, 20))
def test_files_are_full_but_not_too_full(sizes, limit):
    named = [(str(index), size) for index, size in enumerate(sizes)]
    shards = plan_shards(named, limit)
    assert [name for shard in shards for name in shard] == [name for name, _ in named]
    totals = [[sizes[int(name)] for name in shard] for shard in shards]
    assert all(sum(total) <= limit or len(total) == 1 for total in totals)
    assert all(sum(first) + second[0] > limit for first, second in itertools.pairwise(totals))


@pytest.mark.parametrize(("text", "nbytes"), [("5GB", 5 * 10**9), ("1.5KiB", 1536), (7, 7), ("200 mb", 2 * 10**8)])
def test_sizes(text, nbytes):
    assert parse_size(text) == nbytes


@pytest.mark.parametrize("text", ["", "five", "3XB", "0", "-1GB"])
def test_what_is_no_size(text):
    with pytest.raises(UsageError, match="is no size of a file"):
        parse_size(text)


@pytest.mark.parametrize(("file_format", "stem"), [("safetensors", "model"), ("pickled", "pytorch_model")])
def test_what_is_written_is_read(tmp_path, file_format, stem):
    files = write(tmp_path, 20, file_format)
    assert len(files) == 3
    suffix = files[0].suffix
    assert [file.name for file in files] == [f"{stem}-0000{n}-of-00003{suffix}" for n in (1, 2, 3)]
    index = json.loads((tmp_path / f"{stem}{suffix}.index.json").read_text())
    assert index["metadata"] == {"total_size": 15 * 4}
    assert index["weight_map"]["c"] == files[1].name
    read = ModelFiles(tmp_path)
    assert all(torch.equal(read.elements(name, 0, tensor.numel()), tensor) for name, tensor in TENSORS.items())


def test_a_smaller_export_takes_the_place_of_a_larger_one(tmp_path):
    (tmp_path / "model-card.safetensors").touch()
    write(tmp_path, 20)
    (whole,) = write(tmp_path, "5GB", dtype=torch.bfloat16)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["model-card.safetensors", "model.safetensors"]
    with safe_open(whole, "pt") as file:
        assert file.metadata() == {"format": "pt"}
        assert torch.equal(file.get_tensor("c"), TENSORS["c"].bfloat16())


def test_a_file_is_written_when_its_last_tensor_comes_and_named_at_the_end(tmp_path):
    specs = [WeightSpec(name, tuple(tensor.shape), tensor.dtype) for name, tensor in TENSORS.items()]
    writer = WeightWriter(tmp_path, specs, 20)
    writer.add("a", TENSORS["a"])
    assert not list(tmp_path.iterdir())
    writer.add("b", TENSORS["b"])
    assert [path.name for path in tmp_path.iterdir()] == [".model-00001-of-00003.safetensors.partial"]


def test_an_export_that_was_killed_leaves_the_earlier_one_and_its_own_rest_goes_with_the_next(tmp_path):
    write(tmp_path, 20)
    specs = [WeightSpec(name, tuple(tensor.shape), tensor.dtype) for name, tensor in TENSORS.items()]
    killed = WeightWriter(tmp_path, specs, 20)
    for name in ("a", "b", "c"):
        killed.add(name, torch.zeros_like(TENSORS[name]))
    read = ModelFiles(tmp_path)
    assert all(torch.equal(read.elements(name, 0, tensor.numel()), tensor) for name, tensor in TENSORS.items())
    write(tmp_path, "5GB")
    assert [path.name for path in tmp_path.iterdir()] == ["model.safetensors"]


def test_an_export_killed_between_names_has_no_index(tmp_path):
    """Two exports of one shape: their files must not be taken for one."""
    step, is_done = 0, False
    while not is_done:
        folder = tmp_path / str(step)
        write(folder, 20)
        is_done = run_and_die(lambda folder=folder: write(folder, 20, dtype=torch.int32), step)
        if (folder / "model.safetensors.index.json").exists():
            files = [load_file(path) for path in folder.glob("model-*.safetensors")]
            assert len({tensor.dtype for tensors in files for tensor in tensors.values()}) == 1
        step += 1
    assert step > 6, "hardly anything was interrupted"


def test_an_export_of_nothing_is_an_empty_file(tmp_path):
    (file,) = WeightWriter(tmp_path, []).finish()
    assert ModelFiles(file).shapes == {}
