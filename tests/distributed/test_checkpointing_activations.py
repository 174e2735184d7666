"""Activation checkpointing by torch.utils.checkpoint: recomputed forwards see whole parameters, gradients are right."""

from __future__ import annotations

import pytest
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint, checkpoint_sequential

from tests.models import Block, Stack
from tests.parity.beside import Pair, adamw, square, vectors, zero_config
from tests.ranks import ranks

STAGES = (0, 1, 2, 3)


class Checkpointed(Stack):
    """Each block under a checkpoint, all of them under one, or only a part of each."""

    def __init__(self, *, reentrant: bool, around: str) -> None:
        super().__init__()
        self.reentrant, self.around = reentrant, around

    def forward(self, x):
        x = self.inner(x)
        if self.around == "all":
            x = checkpoint(self._run_all, x, use_reentrant=self.reentrant)
        elif self.around == "pairs":
            x = checkpoint_sequential(list(self.blocks), 2, x, use_reentrant=self.reentrant)
        else:
            for block in self.blocks:
                x = self._run(block, x)
        return self.outer(x)

    def _run_all(self, x):
        for block in self.blocks:
            x = block(x)
        return x

    def _run(self, block, x):
        if self.around == "each":
            return checkpoint(block, x, use_reentrant=self.reentrant)
        if self.around == "nested":
            return checkpoint(
                lambda y: checkpoint(block, y, use_reentrant=self.reentrant), x, use_reentrant=self.reentrant
            )
        hidden = torch.tanh(checkpoint(lambda y: block.up(block.norm(y)), x, use_reentrant=self.reentrant))
        return x + block.down(hidden)


def _make(reentrant, around):
    def make(seed=0):
        torch.manual_seed(seed)
        return Checkpointed(reentrant=reentrant, around=around)

    return make


@pytest.mark.parametrize("stage", STAGES)
@ranks(2)
def test_checkpoints_around_blocks_and_parts(rank, world_size, stage):
    for reentrant in (False, True):
        for around in ("each", "all", "pairs", "nested", "part"):
            for accum in (1, 2):
                if accum == 2 and around not in ("each", "all"):
                    continue
                pair = Pair(rank, world_size, _make(reentrant, around), zero_config(stage, accum=accum), adamw)
                pair.train(3)
                if stage == 3:
                    assert not any(group.is_whole for group in pair.engine.runtime.groups)
                pair.check()


@ranks(4)
def test_checkpoints_on_four_ranks(rank, world_size):
    for reentrant in (False, True):
        for prefetch in (0, 10**6):
            config = zero_config(3, accum=2, clip=0.05, stage3_prefetch_bucket_size=prefetch)
            Pair(rank, world_size, _make(reentrant, "each"), config, adamw).train(3).check()


@ranks(2)
def test_c7_reentrant_checkpoint_and_a_given_gradient(rank, world_size):
    """`out.backward(gradient=g)` through a reentrant checkpoint, several iterations."""
    weights = torch.randn(4, 3, generator=torch.Generator().manual_seed(5))
    for stage in STAGES:
        pair = Pair(rank, world_size, _make(True, "each"), zero_config(stage), adamw)
        for step in range(3):
            batches = vectors(world_size, step, 0)
            pair.engine(batches[rank]).backward(gradient=weights)
            pair.engine.step()
            pair.reference_backward(batches, lambda module, x: (module(x) * weights).sum())
            pair.reference_step()
        pair.check()


def _with_frozen_norms(reentrant):
    def make(seed=0):
        model = _make(reentrant, "each")(seed)
        for block in model.blocks:
            block.norm.requires_grad_(False)
        return model

    return make


@ranks(2)
def test_d2_frozen_layer_norms_under_checkpoints(rank, world_size):
    """Recomputation sees the frozen parameters whole, too."""
    for stage in STAGES:
        for reentrant in (False, True):
            for accum in (1, 2):
                pair = Pair(
                    rank,
                    world_size,
                    _with_frozen_norms(reentrant),
                    zero_config(stage, accum=accum),
                    adamw,
                    groups=lambda module: [p for p in module.parameters() if p.requires_grad],
                )
                pair.train(3)
                norm = pair.model.blocks[0].norm
                assert norm.weight.shape == (6,)
                pair.check()


class Frozen(nn.Module):
    """A frozen, checkpointed block between trainable layers: its parameters get no gradients to release it."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Linear(5, 6)
        self.blocks = nn.ModuleList(Block(6).requires_grad_(False) for _ in range(4))
        self.outer = nn.Linear(6, 3)

    def forward(self, x):
        x = self.inner(x)
        for block in self.blocks:
            x = checkpoint(block, x, use_reentrant=False)
        return self.outer(x)


def _frozen(seed=0):
    torch.manual_seed(seed)
    return Frozen()


@ranks(2)
def test_frozen_blocks_are_released(rank, world_size):
    for stage in STAGES:
        config = zero_config(stage, accum=2, stage3_max_live_parameters=0)
        pair = Pair(
            rank,
            world_size,
            _frozen,
            config,
            adamw,
            groups=lambda module: [p for p in module.parameters() if p.requires_grad],
        )
        pair.train(3)
        if stage == 3:
            total = sum(group.numel for group in pair.engine.runtime.groups)
            assert pair.engine.runtime.gatherer.peak_live_numel < total
        pair.check()


@ranks(2)
def test_checkpoint_outside_the_engine(rank, world_size):
    """The user checkpoints the engine's whole forward."""

    def outside(module, x):
        return (checkpoint(module, x, use_reentrant=False) - 0.5).square().mean()

    def make(seed=0):
        torch.manual_seed(seed)
        return Stack()

    for stage in STAGES:
        Pair(rank, world_size, make, zero_config(stage, accum=2), adamw, loss=outside).train(3).check()


@ranks(2)
def test_graph_kept_through_checkpoints(rank, world_size):
    for stage in STAGES:
        pair = Pair(rank, world_size, _make(False, "each"), zero_config(stage), adamw)
        for _ in range(2):
            batches = vectors(world_size, pair.num_steps, 0)
            loss = square(pair.engine, batches[rank])
            pair.engine.backward(loss, retain_graph=True)
            pair.engine.backward(loss)
            pair.engine.step()
            pair.reference_backward(batches, lambda module, x: 2 * square(module, x))
            pair.reference_step()
        pair.check()
