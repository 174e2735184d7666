"""Tiles under stage 3: each is whole only while it computes, and training equals the untiled layer's."""

from __future__ import annotations

import torch
from torch import nn

from fullspeed.engine.initialize import initialize
from fullspeed.sharding.tiled_linear import TiledLinear
from tests.parity.beside import Pair, adamw, square, vectors, zero_config
from tests.ranks import ranks

DIM, SPLITS = 64, 4


class Block(nn.Module):
    """A block with one large layer."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(5)
        self.up = nn.Linear(5, DIM)
        self.large = nn.Linear(DIM, DIM)
        self.down = nn.Linear(DIM, 5)

    def forward(self, x):
        return x + self.down(torch.tanh(self.large(torch.tanh(self.up(self.norm(x))))))


def blocks(seed=0, *, is_tiled=True):
    torch.manual_seed(seed)
    model = nn.Sequential(Block(), Block())
    for block in model if is_tiled else ():
        block.large = TiledLinear(DIM, DIM, in_splits=SPLITS, out_splits=SPLITS, init_linear=block.large)
    return model


def steady_adamw(params):
    """With torch's eps of 1e-8 an element of nearly zero gradient moves by more than a rounding in any other order."""
    return torch.optim.AdamW(params, lr=1e-2, eps=1e-6, weight_decay=0.1)


@ranks(2, 4)
def test_training_with_tiles_equals_plain_torch(rank, world_size):
    for stage in (1, 3):
        Pair(rank, world_size, blocks, zero_config(stage, accum=2, clip=0.05), steady_adamw).train(3).check()


@ranks(2)
def test_a_tiled_model_trains_like_the_whole_one(rank, world_size):
    """The tiles' values after training are the parts of the whole layer's."""
    trained = []
    for is_tiled in (True, False):
        model = blocks(is_tiled=is_tiled)
        engine, *_ = initialize(model=model, optimizer=adamw, config=zero_config(3))
        for step in range(3):
            engine.backward(square(engine, vectors(world_size, step, 0)[rank]))
            engine.step()
        engine.destroy()
        trained.append(model)
    tiled, whole = trained
    for ours, theirs in zip(tiled, whole, strict=True):
        weight = torch.cat([torch.cat([tile.weight for tile in row], dim=1) for row in ours.large.tile_rows()])
        torch.testing.assert_close(weight, theirs.large.weight, atol=1e-6, rtol=0)


@ranks(2)
def test_one_tile_at_a_time_is_whole(rank, world_size):
    """Peak of live elements: the rest of a block and one tile, not the whole layer."""
    peaks = {}
    for is_tiled in (True, False):
        config = zero_config(3, stage3_max_live_parameters=0, stage3_prefetch_bucket_size=0)
        engine, *_ = initialize(model=blocks(is_tiled=is_tiled), optimizer=adamw, config=config)
        for _ in range(3):
            engine.backward(square(engine, torch.ones(2, 5)))
            engine.step()
        peaks[is_tiled] = engine.runtime.gatherer.peak_live_numel
        engine.destroy()
    tile = DIM * DIM // SPLITS**2
    rest = 5 * DIM + DIM + DIM * 5 + 5 + 10
    padding = 16 * 8
    assert peaks[False] >= DIM * DIM + rest
    assert tile <= peaks[True] - rest <= tile + DIM + padding


@ranks(2)
def test_a_lone_tiled_layer_peaks_at_one_tile(rank, world_size):
    """Nothing but the layer: memory-centric tiling's promise to the element."""
    torch.manual_seed(0)
    config = zero_config(3, stage3_max_live_parameters=0, stage3_prefetch_bucket_size=0)
    model = nn.Sequential(TiledLinear(DIM, DIM, bias=False, in_splits=SPLITS, out_splits=SPLITS))
    engine, *_ = initialize(model=model, optimizer=adamw, config=config)
    for _ in range(3):
        engine.backward(square(engine, torch.ones(2, DIM)))
        engine.step()
    assert len(engine.runtime.groups) == SPLITS**2
    assert engine.runtime.gatherer.peak_live_numel == DIM * DIM // SPLITS**2
    engine.destroy()
