"""Activation checkpointing and offload over ranks: shards of saved inputs, and engines at every ZeRO stage."""

from __future__ import annotations

import gc
from types import SimpleNamespace

import pytest
import torch
from torch import nn

from fullspeed import checkpointing
from fullspeed.activation.measure import SavedBytes
from fullspeed.activation.rng import get_rng_tracker
from fullspeed.comm import CommRecorder, get_world_group, new_group, observing
from fullspeed.engine.initialize import initialize
from tests.models import LLAMA, Block, Stack, tiny_llama
from tests.parity.beside import Pair, adamw, causal, tokens, zero_config
from tests.ranks import ranks

PRELOAD = (LLAMA,)

STAGES = (0, 1, 2, 3)
SETTINGS = {
    "sharded": {"partition_activations": True},
    "sharded on the host": {"partition_activations": True, "cpu_checkpointing": True},
    "sharded in a buffer": {
        "partition_activations": True,
        "contiguous_memory_optimization": True,
        "number_checkpoints": 3,
    },
}


def _mpu(tp_group, dp_group=None):
    return SimpleNamespace(get_model_parallel_group=lambda: tp_group, get_data_parallel_group=lambda: dp_group)


def _blocks() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(*(Block(6) for _ in range(3)))


class Checkpointed(nn.Module):
    """A model of blocks, each a checkpointed call."""

    def __init__(self, model: nn.Module, use_reentrant: bool) -> None:
        super().__init__()
        self.model, self.use_reentrant = model, use_reentrant

    def forward(self, x):
        for block in self.model:
            x = checkpointing.checkpoint(block, x, use_reentrant=self.use_reentrant)
        return x


def _same_on_all_ranks(shape) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(7)).requires_grad_()


@pytest.mark.parametrize("settings", SETTINGS)
@ranks(2, 4)
def test_saved_inputs_are_sharded_and_gathered(rank, world_size, settings):
    """Shapes that divide evenly over the ranks and that do not."""
    mpu = _mpu(get_world_group())
    for shape in ((8, 6), (3, 6), (1, 6)):
        plain, x = _blocks(), _same_on_all_ranks(shape)
        plain(x).square().sum().backward()
        expected = [x.grad, *(param.grad for param in plain.parameters())]
        for use_reentrant in (True, False):
            checkpointing.configure(mpu, {"activation_checkpointing": SETTINGS[settings]})
            model, mine = _blocks(), _same_on_all_ranks(shape)
            seen = CommRecorder()
            with observing(seen), SavedBytes() as left:
                output = Checkpointed(model, use_reentrant)(mine)
            share = -(-mine.numel() // world_size) * mine.itemsize
            on_host = "host" in settings
            assert seen.counts() == {}
            assert left.nbytes() == 0
            assert checkpointing.held_bytes() == ((0, 3 * share) if on_host else (3 * share, 0))
            with observing(seen):
                output.square().sum().backward()
            assert seen.counts() == {"all_gather": 3}
            assert seen.nbytes() == {"all_gather": 3 * share * world_size}
            for grad, other in zip([mine.grad, *(param.grad for param in model.parameters())], expected, strict=True):
                assert torch.allclose(grad, other, rtol=0, atol=1e-6)
            del output
            gc.collect()
            assert checkpointing.held_bytes() == (0, 0)


@ranks(2)
def test_ranks_of_an_mpu_draw_apart(rank, world_size):
    checkpointing.configure(_mpu(get_world_group()))
    checkpointing.model_parallel_cuda_manual_seed(50)
    with get_rng_tracker().fork():
        apart = torch.rand(3)
    assert torch.equal(apart, torch.rand(3, generator=torch.Generator().manual_seed(50 + 2718 + rank)))
    assert torch.equal(torch.rand(3), torch.rand(3, generator=torch.Generator().manual_seed(50)))


class Recomputing(Stack):
    """A stack whose blocks are checkpointed calls."""

    def __init__(self, *, use_reentrant: bool) -> None:
        super().__init__()
        self.use_reentrant = use_reentrant

    def forward(self, x):
        x = self.inner(x)
        for block in self.blocks:
            x = checkpointing.checkpoint(block, x, use_reentrant=self.use_reentrant)
        return self.outer(x)


def _recomputing(use_reentrant):
    def make(seed=0):
        torch.manual_seed(seed)
        return Recomputing(use_reentrant=use_reentrant)

    return make


def _stack(seed=0):
    torch.manual_seed(seed)
    return Stack()


@pytest.mark.parametrize("stage", STAGES)
@ranks(2)
def test_the_section_of_an_engine_counts(rank, world_size, stage):
    section = {"cpu_checkpointing": True}
    for use_reentrant in (True, False):
        checkpointing.unconfigure()
        config = {**zero_config(stage, accum=2), "activation_checkpointing": section}
        pair = Pair(rank, world_size, _recomputing(use_reentrant), config, adamw)
        assert checkpointing.is_configured()
        output = pair.engine(torch.randn(4, 5))
        assert checkpointing.held_bytes() == (0, 3 * 4 * 6 * 4)
        del output
        pair.train(3).check()


@ranks(2)
def test_what_was_configured_by_hand_outlives_initialize(rank, world_size):
    checkpointing.configure(None, checkpoint_in_cpu=True)
    config = {**zero_config(1), "activation_checkpointing": {"profile": True}}
    Pair(rank, world_size, _stack, config, adamw)
    assert checkpointing.current_settings().cpu_checkpointing
    assert not checkpointing.current_settings().profile


@pytest.mark.parametrize("stage", STAGES)
@ranks(4)
def test_shards_over_tensor_parallel_ranks_and_zero_over_data_parallel_ones(rank, world_size, stage):
    """Ranks 0, 1 and 2, 3 see the same data, as tensor-parallel ranks do."""
    tp_groups = [new_group([0, 1]), new_group([2, 3])]
    dp_groups = [new_group([0, 2]), new_group([1, 3])]
    tp, dp = rank // 2, rank % 2
    section = {"activation_checkpointing": {"partition_activations": True}}
    torch.manual_seed(0)
    model, reference = _recomputing(True)(), _recomputing(True)()
    engine, *_ = initialize(
        model=model,
        optimizer=adamw,
        config={**zero_config(stage), **section},
        mpu=_mpu(tp_groups[tp], dp_groups[dp]),
    )
    optimizer = adamw(reference.parameters())
    for step in range(3):
        batches = torch.randn(2, 4, 5, generator=torch.Generator().manual_seed(step))
        seen = CommRecorder()
        loss = engine(batches[tp]).square().mean()
        assert checkpointing.held_bytes().device == 3 * 4 * 6 * 4 // 2
        with observing(seen):
            engine.backward(loss)
        assert seen.counts()["all_gather"] >= 3
        engine.step()
        (sum(reference(batch).square().mean() for batch in batches) / 2).backward()
        optimizer.step()
        optimizer.zero_grad()
    engine.destroy()
    for param, other in zip(model.parameters(), reference.parameters(), strict=True):
        assert torch.allclose(param, other, rtol=0, atol=1e-6)


@pytest.mark.parametrize("stage", STAGES)
@ranks(2)
def test_chosen_modules_of_an_engine(rank, world_size, stage):
    """Chosen before `initialize` and after it."""
    for policy in ("full", "save_matmuls"):
        for every in (1, 2):
            pair = Pair(rank, world_size, _stack, zero_config(stage, accum=2), adamw)
            handle = checkpointing.checkpoint_modules(pair.model, Block, policy, every=every)
            assert len(handle.fqns) == len(range(0, 3, every))
            pair.train(3).check()

    def make(seed=0):
        model = _stack(seed)
        checkpointing.checkpoint_modules(model, Block)
        return model

    Pair(rank, world_size, make, zero_config(stage), adamw).train(2).check()


@pytest.mark.parametrize("stage", STAGES)
@ranks(2)
def test_offload_around_an_engine_and_inside_its_model(rank, world_size, stage):
    offload = checkpointing.offload_activations(min_bytes=1, keep_last=0, max_leaving=0)

    def outside(module, x):
        with offload:
            return (module(x) - 0.5).square().mean()

    pair = Pair(rank, world_size, _stack, zero_config(stage, accum=2), adamw, loss=outside)
    pair.train(3).check()
    assert offload.counts().fetched == offload.counts().offloaded > 100

    class Inside(Stack):
        def forward(self, x):
            with offload:
                return super().forward(x)

    def inside(seed=0):
        torch.manual_seed(seed)
        return Inside()

    before = offload.counts().offloaded
    Pair(rank, world_size, inside, zero_config(stage, accum=2), adamw).train(3).check()
    assert offload.counts().fetched == offload.counts().offloaded > before + 100
    assert offload.counts().host_bytes == 0


@pytest.mark.parametrize("use_reentrant", [True, False])
@ranks(2)
def test_hidden_states_of_a_hugging_face_model(rank, world_size, use_reentrant):
    offload = checkpointing.get_checkpoint_hidden_states_offloading_ctx_manager(
        min_offload_bytes=1, keep_last_count=0, max_fwd_stash_count=0
    )

    def make(seed=0):
        model = tiny_llama(seed, num_layers=3)
        model.gradient_checkpointing_enable({"use_reentrant": use_reentrant})
        return model.train()

    def loss(module, batch):
        with offload:
            return causal(module, batch)

    pair = Pair(rank, world_size, make, zero_config(3, micro=2), adamw, loss=loss, batches=tokens)
    pair.train(2)
    # Two steps of three layers, in the engine and (for both ranks' data) in its plain copy.
    assert offload.counts().offloaded == 2 * 3 * (1 + world_size)
    assert offload.counts().peak_host_bytes <= 3 * (1 + world_size) * 2 * 9 * 32 * 4
    pair.check(1e-5)
