"""Frozen bases with adapters under every stage: trained as in one process, in shards, and whole when they are saved."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

from fullspeed.base.errors import UsageError
from fullspeed.comm import all_reduce
from fullspeed.engine.initialize import initialize
from fullspeed.linear import LoRAConfig, LoRAOptimizedLinear, OptimizedLinear, QuantizationConfig, merged_state_dict
from tests.parity.beside import adamw, square, vectors, zero_config
from tests.ranks import ranks

CODES = QuantizationConfig(q_bits=8, group_size=32)
STEPS = 3


class Adapted(nn.Module):
    """Optimized layers between ordinary ones; takes (B, 5), returns (B, 3)."""

    def __init__(self, lora: LoRAConfig | None, quant: QuantizationConfig | None, dtype: torch.dtype) -> None:
        super().__init__()
        more: Any = {"lora_config": lora, "quantization_config": quant, "dtype": dtype}
        self.inner = nn.Linear(5, 13)
        self.blocks = nn.ModuleList(OptimizedLinear(13, 13, **more) for _ in range(2))
        self.outer = OptimizedLinear(13, 3, **more)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.inner(x)
        for block in self.blocks:
            x = torch.tanh(block(x))
        return self.outer(x)


def make_model(shards: int = 1, quant: QuantizationConfig | None = None, dtype: torch.dtype = torch.float32) -> Adapted:
    torch.manual_seed(0)
    return Adapted(LoRAConfig(lora_r=2, lora_alpha=8.0, base_weight_sharding=shards), quant, dtype)


def train_alone(model: nn.Module, world_size: int) -> list[float]:
    """One torch process, the batches of all ranks together; its mean losses."""
    optimizer = adamw([param for param in model.parameters() if param.requires_grad])
    losses = []
    for step in range(STEPS):
        found = [square(model, batch) for batch in vectors(world_size, step, 0)]
        loss = torch.stack(found).mean()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    return losses


def train(engine: Any, rank: int, world_size: int) -> list[float]:
    """This rank's losses."""
    losses = []
    for step in range(STEPS):
        loss = square(engine, vectors(world_size, step, 0)[rank])
        engine.backward(loss)
        engine.step()
        losses.append(loss.item())
    return losses


@pytest.mark.parametrize("quant", [None, CODES], ids=["numbers", "codes"])
@ranks(2)
def test_every_stage_trains_the_adapters_as_one_process_does(rank, world_size, quant):
    alone = make_model(quant=quant)
    expected = train_alone(alone, world_size)
    first = make_model(quant=quant).state_dict()
    for stage, shards in ((0, 2), (1, 2), (2, 1), (3, 1)):
        engine, *_ = initialize(model=make_model(shards, quant), optimizer=adamw, config=zero_config(stage))
        is_sharded = shards == 2 or stage == 3
        for layer in (*engine.module.blocks, engine.module.outer):
            group, _ = engine.runtime.slot_of[layer.weight]
            assert not group.is_trainable
            assert group.store.numel() * (world_size if is_sharded else 1) == group.numel
        losses = torch.tensor(train(engine, rank, world_size))
        all_reduce(losses)
        torch.testing.assert_close(losses / world_size, torch.tensor(expected), rtol=1e-5, atol=1e-6)
        found = engine.module_state_dict()
        for name, param in alone.named_parameters():
            torch.testing.assert_close(found[name], param.detach(), rtol=1e-4, atol=1e-5)
            assert torch.equal(found[name], first[name]) is not param.requires_grad
        engine.destroy()


@ranks(2)
def test_a_checkpoint_and_the_merged_weights_hold_what_was_trained(rank, world_size, tmp_path):
    engine, *_ = initialize(model=make_model(2, CODES), optimizer=adamw, config=zero_config(1))
    train(engine, rank, world_size)
    engine.save_checkpoint(str(tmp_path))
    merged = merged_state_dict(engine.module)
    other, *_ = initialize(model=make_model(1, CODES), optimizer=adamw, config=zero_config(3))
    other.load_checkpoint(str(tmp_path))
    plain = Adapted(None, None, torch.float32)
    plain.load_state_dict(merged)
    assert type(plain.outer) is nn.Linear
    assert not torch.equal(merged["outer.weight"], make_model(1, CODES).outer.full_weight())
    x = vectors(world_size, 7, 0)[0]
    with torch.no_grad():
        torch.testing.assert_close(engine(x), plain(x), rtol=1e-5, atol=1e-5)
        torch.testing.assert_close(other(x), engine(x), rtol=0, atol=0)
    assert train(other, rank, world_size) == pytest.approx(train(engine, rank, world_size), rel=1e-6)


@ranks(2)
def test_bf16_training_adapts_codes_in_shards(rank, world_size):
    model = make_model(2, CODES, torch.bfloat16)
    model.inner.to(torch.bfloat16)
    engine, *_ = initialize(model=model, optimizer=adamw, config=zero_config(2) | {"bf16": {"enabled": True}})
    losses = [sum(train(engine, rank, world_size)) for _ in range(8)]
    assert losses[-1] < 0.7 * losses[0]
    assert engine.module.outer.weight.dtype == torch.uint8


@ranks(2)
def test_a_number_of_shards_that_is_not_the_ranks_is_refused(rank, world_size):
    with pytest.raises(
        UsageError, match=r"blocks\.0: base_weight_sharding is 3, and 2 ranks hold the shards; set it to 2"
    ):
        initialize(model=make_model(3), optimizer=adamw, config=zero_config(1))
    assert isinstance(make_model(3).outer, LoRAOptimizedLinear)
