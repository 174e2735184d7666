"""`zero.load_weights`: files straight into shards, each rank reading its own part."""

import json
import pathlib
from typing import Any
from unittest import mock

import pytest
import torch
from safetensors.torch import save_file
from torch import nn

from fullspeed import zero
from fullspeed.base.errors import CheckpointError, UsageError
from fullspeed.checkpoint.model_files import ModelFiles
from fullspeed.checkpoint.tensor_file import TensorFile
from fullspeed.engine.initialize import initialize
from tests.models import LLAMA, mlp, tiny_llama
from tests.parity.beside import difference, sgd, zero_config
from tests.ranks import ranks

PRELOAD = (LLAMA,)

HOME = ["held", "meta", "plain", "stage 0", "stage 2", "stage 3", "stage 3 bf16"]


def empty(home: str, make: Any) -> tuple[nn.Module, Any]:
    """A model with other values than those to be loaded."""
    if home == "meta":
        with torch.device("meta"):
            return make(7), None
    model = make(7)
    if home == "held":
        zero.Init(module=model)
    if home in ("held", "plain"):
        return model, None
    half = {"bf16": {"enabled": True}} if home.endswith("bf16") else {}
    return model, initialize(model=model, optimizer=sgd, config=zero_config(int(home.split()[1])) | half)[0]


@ranks(2)
@pytest.mark.parametrize("home", HOME)
def test_values_arrive_and_parameters_stay(rank: int, world_size: int, home: str, tmp_path: pathlib.Path) -> None:
    reference = mlp(0)
    path = tmp_path / f"{rank}.safetensors"
    save_file(reference.state_dict(), path)
    model, engine = empty(home, mlp)
    ids = [id(param) for param in model.parameters()]
    assert zero.load_weights(engine or model, path) == ([], [])
    assert [id(param) for param in model.parameters()] == ids
    if engine is not None:
        for param, other in zip(model.parameters(), reference.parameters(), strict=True):
            assert torch.equal(zero.safe_get_full_fp32_param(param), other)  # masters are exact
        return
    with zero.GatheredParameters(model.parameters()):
        assert max(difference(model, reference).values()) == 0.0


@ranks(2, 4)
def test_each_rank_reads_its_own_part(rank: int, world_size: int, tmp_path: pathlib.Path) -> None:  # I11
    path = tmp_path / f"{rank}.safetensors"
    save_file({"weight": torch.randn(64, 33)}, path)
    with zero.Init():
        layer = nn.Linear(33, 64, bias=False)
    with mock.patch.object(TensorFile, "elements", autospec=True, side_effect=TensorFile.elements) as reading:
        zero.load_weights(layer, path)
    read = [stop - start for _, _, start, stop in (call.args for call in reading.call_args_list)]
    group_share = -(-64 * 33 // world_size // 16) * 16
    assert 0 < sum(read) <= group_share


@ranks(2)
@pytest.mark.parametrize("kind", ["safetensors", "index", "bin", "bin index", "state dict", "files"])
def test_sources(rank: int, world_size: int, kind: str, tmp_path: pathlib.Path) -> None:
    reference, folder = mlp(0), tmp_path / str(rank)
    folder.mkdir()
    state = reference.state_dict()
    halves = {"a": dict(list(state.items())[:2]), "b": dict(list(state.items())[2:])}
    source: Any = folder
    if kind == "safetensors":
        save_file(state, folder / "model.safetensors")
    elif kind == "bin":
        torch.save(state, folder / "pytorch_model.bin")
    elif kind == "state dict":
        source = state
    else:
        suffix = "bin" if kind == "bin index" else "safetensors"
        for name, half in halves.items():
            if suffix == "bin":
                torch.save(half, folder / f"{name}.bin")
            else:
                save_file(half, folder / f"{name}.safetensors")
        if kind == "files":
            source = [folder / "a.safetensors", folder / "b.safetensors"]
        else:
            index = {"weight_map": {key: f"{name}.{suffix}" for name, half in halves.items() for key in half}}
            base = "pytorch_model.bin" if suffix == "bin" else "model.safetensors"
            (folder / f"{base}.index.json").write_text(json.dumps(index))
    model, _ = empty("held", mlp)
    zero.load_weights(model, source)
    with zero.GatheredParameters(model.parameters()):
        assert max(difference(model, reference).values()) == 0.0


@ranks(2)
@pytest.mark.parametrize("given", ["model.embed_tokens.weight", "lm_head.weight"])
def test_tied_weights_under_either_name(rank: int, world_size: int, given: str, tmp_path: pathlib.Path) -> None:
    reference = tiny_llama(0, is_tied=True)
    state = {
        name: value for name, value in reference.state_dict().items() if "embed" not in name and "head" not in name
    }
    state[given] = reference.lm_head.weight.detach()
    path = tmp_path / f"{rank}.safetensors"
    save_file(state, path)
    model, _ = empty("held", lambda seed: tiny_llama(seed, is_tied=True))
    zero.load_weights(model, path)
    tokens = torch.arange(9)[None]
    with torch.no_grad():
        assert torch.equal(model(input_ids=tokens).logits, reference(input_ids=tokens).logits)


@ranks(2)
def test_what_does_not_fit_is_an_error_on_every_rank(rank: int, world_size: int, tmp_path: pathlib.Path) -> None:
    state = mlp(0).state_dict()
    model, _ = empty("held", mlp)
    with pytest.raises(CheckpointError, match=r"missing there: 0\.bias"):
        zero.load_weights(model, {name: value for name, value in state.items() if name != "0.bias"})
    with pytest.raises(CheckpointError, match="unexpected there: extra"):
        zero.load_weights(model, {**state, "extra": torch.ones(2)})
    with pytest.raises(CheckpointError, match=r"0\.weight has shape \(2, 2\)"):
        zero.load_weights(model, {**state, "0.weight": torch.ones(2, 2)}, strict=False)
    found = zero.load_weights(model, {"0.weight": state["0.weight"], "extra": torch.ones(2)}, strict=False)
    assert found.missing == ["0.bias", "2.weight", "2.bias"]
    assert found.unexpected == ["extra"]
    with pytest.raises(CheckpointError, match="rank 1"):  # only there
        zero.load_weights(model, tmp_path / "nowhere" if rank else state)


@ranks(1)
def test_damaged_files(rank: int, world_size: int, tmp_path: pathlib.Path) -> None:
    whole = tmp_path / "whole.safetensors"
    save_file({"a": torch.ones(100)}, whole)
    cut = tmp_path / "cut.safetensors"
    cut.write_bytes(whole.read_bytes()[:-8])
    with pytest.raises(CheckpointError, match="cut short"):
        ModelFiles(cut)
    garbage = tmp_path / "garbage.safetensors"
    garbage.write_bytes(b"no tensors here at all")
    with pytest.raises(CheckpointError, match="garbage"):
        ModelFiles(garbage)
    with pytest.raises(CheckpointError, match="holds no weights"):
        ModelFiles(tmp_path)
    (tmp_path / "model.safetensors.index.json").write_text('{"weight_map": {"a": "gone.safetensors"}}')
    with pytest.raises(CheckpointError, match=r"gone\.safetensors"):
        ModelFiles(tmp_path)


@ranks(2)
def test_a_checkpoint_is_a_source_too(rank: int, world_size: int, tmp_path: pathlib.Path) -> None:
    """Of a model on the meta device: its weights first, then `initialize`, then the rest of the checkpoint."""
    config = zero_config(3) | {"bf16": {"enabled": True}}
    engine = initialize(model=mlp(0), optimizer=sgd, config=config)[0]
    engine.backward(engine(torch.ones(4, 5).bfloat16()).float().sum())
    engine.step()
    engine.save_checkpoint(tmp_path / "c", "t", client_state={"epoch": 1})
    masters = [zero.safe_get_full_fp32_param(param) for param in engine.module.parameters()]
    for source in (tmp_path / "c", tmp_path / "c" / "t"):
        with torch.device("meta"):
            model = mlp(7)
        assert zero.load_weights(model, source) == ([], [])
        with zero.GatheredParameters(model.parameters()):
            assert all(torch.equal(param, wanted) for param, wanted in zip(model.parameters(), masters, strict=True))
    other = initialize(model=model, optimizer=sgd, config=config)[0]
    assert other.load_checkpoint(tmp_path / "c")[1] == {"epoch": 1}
    assert other.global_steps == 1
    found = [zero.safe_get_full_fp32_param(param) for param in other.module.parameters()]
    assert all(torch.equal(one, wanted) for one, wanted in zip(found, masters, strict=True))
    with pytest.raises(CheckpointError, match=r"4\.weight has shape|missing there"):
        zero.load_weights(nn.Linear(5, 5), tmp_path / "c")


@ranks(1)
def test_meta_parameters_and_buffers_are_refused_at_initialize(rank: int, world_size: int) -> None:
    with torch.device("meta"):
        model = mlp(0)
        normed = nn.BatchNorm1d(3)
    with pytest.raises(UsageError, match=r"0\.weight is on the meta device.*load_weights"):
        initialize(model=model, optimizer=sgd, config=zero_config(3))
    with pytest.raises(UsageError, match="running_mean is on the meta device"):
        initialize(model=normed, optimizer=sgd, config=zero_config(3))
