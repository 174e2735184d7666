"""A conversion appears whole or not at all, whenever it is killed, and takes nothing that is not its own."""

from __future__ import annotations

import pathlib
import shutil

import pytest
import torch

from fullspeed.base.errors import CheckpointError
from fullspeed.checkpoint import durable
from fullspeed.checkpoint.convert import get_fp32_state_dict_from_zero_checkpoint
from fullspeed.checkpoint.deepspeed.write import Target
from fullspeed.checkpoint.relayout import convert_to_deepspeed, convert_to_fullspeed, convert_to_universal
from tests.data.deepspeed_checkpoints import recipe
from tests.unit.checkpoint.test_folder import run_and_die

RECORDED = pathlib.Path(recipe.__file__).parent
OLD, NEW = RECORDED / "z1_fp32_w2", RECORDED / "z2_fp16_w2"


def to_deepspeed(source: pathlib.Path, folder: pathlib.Path) -> None:
    target = Target(1, 2, shards_params=False, shards_optimizer=True, config={})
    convert_to_deepspeed(source, folder, target, "global_step2")


def to_universal(source: pathlib.Path, folder: pathlib.Path) -> None:
    convert_to_universal(source, folder / "global_step2")


def holds(folder: pathlib.Path, source: pathlib.Path) -> bool:
    found, wanted = (get_fp32_state_dict_from_zero_checkpoint(each) for each in (folder, source))
    return found.keys() == wanted.keys() and all(torch.equal(found[name], wanted[name]) for name in wanted)


@pytest.mark.parametrize(("convert", "stride"), [(to_deepspeed, 3), (to_universal, 11)])
def test_killed_at_any_moment_the_old_or_the_new_one_is_there(tmp_path, convert, stride):
    assert not holds(OLD, NEW)
    seen, step, is_done = set(), 0, False
    convert(OLD, tmp_path / "before")
    while not is_done:
        folder = tmp_path / str(step)
        shutil.copytree(tmp_path / "before", folder)
        is_done = run_and_die(lambda folder=folder: convert(NEW, folder), step)
        is_new = holds(folder, NEW)
        assert is_new or (holds(folder, OLD) and not is_done)
        seen.add(is_new)
        convert(NEW, folder)  # what is left behind is in nobody's way
        assert holds(folder, NEW)
        assert not list(folder.glob(".*"))
        step += stride
    assert seen == {False, True}
    assert step > 3 * stride, "hardly anything was interrupted"


@pytest.mark.parametrize("exchanges", [True, False])
def test_a_folder_takes_the_place_of_another(tmp_path, monkeypatch, exchanges):
    if not exchanges:
        monkeypatch.setattr(durable, "_exchange", lambda one, other: False)
    fresh, final = tmp_path / ".a.partial", tmp_path / "a"
    for text in ("one", "two"):
        fresh.mkdir()
        (fresh / text).write_text(text)
        durable.replace_folder(fresh, final)
        assert [path.name for path in final.iterdir()] == [text]
        assert [path.name for path in tmp_path.iterdir()] == ["a"]


def test_two_names_change_places_in_one_step_here(tmp_path):
    for name in ("a", "b"):
        (tmp_path / name).mkdir()
        (tmp_path / name / name).touch()
    assert durable._exchange(tmp_path / "a", tmp_path / "b")
    assert (tmp_path / "a" / "b").exists()
    assert not durable._exchange(tmp_path / "a", tmp_path / "missing")


@pytest.mark.parametrize("convert", [to_deepspeed, to_universal])
def test_a_folder_of_something_else_is_left_alone(tmp_path, convert):
    ours = convert_to_fullspeed(OLD, tmp_path / "ours", "global_step2")
    with pytest.raises(CheckpointError, match="is no checkpoint in this layout"):
        convert(tmp_path / "ours", tmp_path / "ours")
    assert (ours / "manifest.json").exists()
    assert holds(tmp_path / "ours", OLD)
