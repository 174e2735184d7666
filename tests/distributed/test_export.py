"""Plain weights come out of a running engine as `from_pretrained` loads them, and training notices nothing."""

from __future__ import annotations

import json
import pathlib
from typing import Any

import pytest
import torch
from torch import nn

from fullspeed import zero
from fullspeed.base.errors import CheckpointError
from fullspeed.checkpoint.model_files import ModelFiles
from fullspeed.comm import get_rank
from fullspeed.engine import export
from fullspeed.engine.initialize import initialize
from tests.models import stack, tiny_llama
from tests.parity.beside import zero_config
from tests.ranks import ranks

ROWS = torch.arange(24).reshape(2, 12) % 61


def make(model: nn.Module, stage: int, precision: str = "fp32") -> Any:
    config = zero_config(stage, accum=2)
    config["optimizer"] = {"type": "AdamW", "params": {"lr": 1e-2}}
    if precision != "fp32":
        config[precision] = {"enabled": True}
    return initialize(model=model, config=config)[0]


def train_llama(engine: Any, micro_steps: int) -> list[float]:
    losses = []
    for _ in range(micro_steps):
        loss = engine(input_ids=ROWS, labels=ROWS).loss
        engine.backward(loss)
        engine.step()
        losses.append(loss.item())
    return losses


@pytest.mark.parametrize("stage", [1, 3])
@ranks(2)
def test_from_pretrained_loads_a_tied_llama_bit_by_bit(rank, world_size, stage, tmp_path):
    """Exported between two micro-batches of one update."""
    from transformers import LlamaForCausalLM

    model = tiny_llama(1, is_tied=True)
    model.config.save_pretrained(tmp_path)
    engine, alone = make(model, stage, "bf16"), make(tiny_llama(1, is_tied=True), stage, "bf16")
    assert train_llama(engine, 3) == train_llama(alone, 3)
    files = zero.save_weights(engine, tmp_path, max_shard_size="10KB")
    assert len(files) > 2
    weights = engine.module_state_dict()
    loaded, report = LlamaForCausalLM.from_pretrained(tmp_path, dtype=torch.bfloat16, output_loading_info=True)
    assert not report["missing_keys"]
    assert not report["unexpected_keys"]
    assert loaded.lm_head.weight is loaded.model.embed_tokens.weight
    assert set(loaded.state_dict()) == set(weights)
    assert all(torch.equal(value, weights[fqn]) for fqn, value in loaded.state_dict().items())
    assert train_llama(engine, 3) == train_llama(alone, 3)


@ranks(2)
def test_masters_are_written_where_fp32_is_asked_for(rank, world_size, tmp_path):
    for stage in (0, 1, 3):
        engine = make(stack(0), stage, "bf16")
        for _ in range(2):
            engine.backward(engine(torch.ones(2, 5, dtype=torch.bfloat16)).float().square().mean())
            engine.step()
        zero.save_weights(engine, tmp_path, dtype=torch.float32, file_format="pickled")
        found = torch.load(tmp_path / "pytorch_model.bin")
        assert list(found)
        for fqn, param in engine.module.named_parameters():
            master = zero.safe_get_full_fp32_param(param)
            assert torch.equal(found[fqn], master)
            if param.dim() > 1:
                assert not torch.equal(master, master.bfloat16().float())


@ranks(2)
def test_h12_frozen_parameters_are_fp32_where_fp32_is_asked_for(rank, world_size, tmp_path):
    for stage in (0, 3):
        model = stack(0)
        model.inner.weight.requires_grad_(False)
        engine = make(model, stage, "bf16")
        zero.save_weights(engine, tmp_path, dtype=torch.float32, file_format="pickled")
        found = torch.load(tmp_path / "pytorch_model.bin")
        assert {value.dtype for value in found.values()} == {torch.float32}
        assert torch.equal(found["inner.weight"], stack(0).inner.weight.bfloat16().float())


@ranks(2)
def test_adapters_alone_under_names_of_ones_own(rank, world_size, tmp_path):
    model = stack(0)
    for fqn, param in model.named_parameters():
        param.requires_grad_("down" in fqn)
    engine = make(model, 3)
    zero.save_weights(engine, tmp_path, trainable_only=True, rename=lambda fqn: fqn.replace("blocks", "layers"))
    assert set(ModelFiles(tmp_path).shapes) == {
        f"layers.{n}.down.{what}" for n in range(3) for what in ("weight", "bias")
    }
    zero.save_weights(engine, tmp_path, rename=lambda fqn: fqn if fqn.startswith("outer") else None)
    assert set(ModelFiles(tmp_path).shapes) == {"outer.weight", "outer.bias"}
    with pytest.raises(CheckpointError, match="several parameters the name same"):
        zero.save_weights(engine, tmp_path, rename=lambda _: "same")


@ranks(2)
def test_memory_is_one_file_and_one_group(rank, world_size, tmp_path):
    """Rank 0 holds the tensors of the file being written, rank 1 none."""
    engine = make(stack(0), 3)
    kept: list[int] = []
    largest: list[int] = []
    write_file = export.WeightWriter._write_file
    add = export.WeightWriter.add

    def counted(writer: Any, name: str, tensor: torch.Tensor) -> None:
        add(writer, name, tensor)
        kept.append(sum(value.nbytes for value in writer._tensors.values()))

    def noted(writer: Any) -> None:
        largest.append(sum(value.nbytes for value in writer._tensors.values()))
        write_file(writer)

    export.WeightWriter.add, export.WeightWriter._write_file = counted, noted  # type: ignore[method-assign]
    zero.save_weights(engine, tmp_path, max_shard_size=600)
    total = sum(param.numel() * 4 for param in stack(0).parameters())
    if get_rank() == 0:
        assert sum(largest) == total
        assert max(largest) <= 600 < total / 2
    else:
        assert not kept
        assert not largest


@ranks(2)
def test_a_full_disk_is_an_error_everywhere_and_training_goes_on(rank, world_size, tmp_path):
    engine = make(stack(0), 3)
    blocked = pathlib.Path(tmp_path) / "file"
    blocked.write_text("not a folder")
    with pytest.raises(CheckpointError, match="file"):
        zero.save_weights(engine, blocked)
    zero.save_weights(engine, tmp_path, max_shard_size=600)
    assert json.loads((tmp_path / "model.safetensors.index.json").read_text())["metadata"]["total_size"] > 600
