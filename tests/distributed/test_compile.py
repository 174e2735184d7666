"""torch.compile and sharding: the same numbers as plain, uncompiled torch, with our hooks outside of the graphs."""

from __future__ import annotations

import pytest
import torch

from fullspeed.base.errors import UsageError
from fullspeed.comm import CommRecorder, observing
from fullspeed.engine.initialize import initialize
from tests.models import Stack, mlp, stack
from tests.parity.beside import Pair, adamw, square, zero_config
from tests.ranks import ranks

PRELOAD = ("torch._dynamo.backends.debugging", "torch._inductor.compile_fx")
STAGES = (0, 1, 2, 3)
BACKEND = "aot_eager"  # everything of torch.compile but the generated code


def _start_over() -> None:
    """Forget all compiled code, as in a new process."""
    from torch._dynamo import reset
    from torch._dynamo.utils import counters

    reset()
    counters.clear()


def _statistics() -> tuple[int, int]:
    """(compiled graphs, graph breaks) since `_start_over`."""
    from torch._dynamo.utils import counters

    return counters["stats"]["unique_graphs"], sum(counters["graph_break"].values())


@ranks(2, timeout_s=300)
def test_compiled_units_train_as_ever(rank, world_size):
    """Three blocks of one class are one graph, compiled once for all steps; freed parameters are gathered again."""
    for stage in STAGES:
        _start_over()
        pair = Pair(rank, world_size, stack, zero_config(stage, accum=2, clip=0.05), adamw)
        assert not pair.engine.is_compiled
        pair.engine.compile(backend=BACKEND, compile_kwargs={"fullgraph": True})
        assert pair.engine.is_compiled
        recorder = CommRecorder()
        with observing(recorder):
            pair.train(1)
        if stage == 3:
            groups = pair.engine.runtime.groups
            assert len(groups) == 5
            # Of each of two passes: all groups forward, all but the last again backward, for it was just used.
            assert recorder.counts()["all_gather"] >= 2 * (2 * len(groups) - 1)
            assert all(group.full.untyped_storage().nbytes() == 0 for group in groups)
        pair.train(2)
        assert _statistics() == (1, 0)
        pair.check()
        assert all(block._compiled_call_impl is None for block in pair.model.blocks)


def _compile_in_place(model: Stack) -> None:
    for block in model.blocks:
        block.compile(backend=BACKEND, fullgraph=True)


def _wrap(model: Stack) -> None:
    for index, block in enumerate(model.blocks):
        model.blocks[index] = torch.compile(block, backend=BACKEND, fullgraph=True)


@ranks(2, timeout_s=300)
def test_blocks_compiled_before_initialize(rank, world_size):
    """They stay compiled, without graph breaks, although they are sharded; under names of their own when wrapped."""
    for compile_blocks in (_compile_in_place, _wrap):
        _start_over()
        model, reference = stack(rank), stack()
        compile_blocks(model)
        engine, *_ = initialize(model=model, optimizer=adamw, config=zero_config(3))
        optimizer = adamw(reference.parameters())
        for step in range(3):
            x = torch.randn(world_size, 4, 5, generator=torch.Generator().manual_seed(step))
            engine.backward(square(engine, x[rank]))
            engine.step()
            square(reference, x.flatten(0, 1)).backward()
            optimizer.step()
            optimizer.zero_grad()
        engine.destroy()
        assert _statistics() == (1, 0)
        pairs = zip(model.parameters(), reference.parameters(), strict=True)
        assert max((mine - theirs).abs().max().item() for mine, theirs in pairs) <= 1e-6


@ranks(2, timeout_s=300)
def test_a_compiled_training_step(rank, world_size):
    """Forward, backward and step in one compiled function: graphs end where ranks communicate, numbers stay."""
    pair = Pair(rank, world_size, lambda seed: _blocks(2), zero_config(3), adamw)

    @torch.compile(backend=BACKEND)
    def train_step(batch, is_plain):
        loss = square(pair.engine, batch)
        if is_plain:
            loss.backward()
        else:
            pair.engine.backward(loss)
        pair.engine.step()

    for step in range(4):
        batches = pair.batches(world_size, step, 0)
        train_step(batches[rank], step >= 2)
        pair.reference_backward(batches)
        pair.reference_step()
    num_graphs, num_breaks = _statistics()
    assert num_graphs > 1
    assert num_breaks > 0
    pair.check()


@ranks(1, timeout_s=300)
def test_generated_code(rank, world_size):
    """Torch's default backend; the widest world that compiles in reasonable time on a small machine is one rank."""
    pair = Pair(rank, world_size, lambda seed: _blocks(1), zero_config(3), adamw)
    pair.engine.compile()
    pair.train(2)
    assert _statistics() == (1, 0)
    pair.check()


def _blocks(num_blocks: int) -> Stack:
    torch.manual_seed(0)
    return Stack(num_blocks=num_blocks)


@ranks(1)
def test_what_compile_refuses(rank, world_size):
    engine, *_ = initialize(model=mlp(), optimizer=adamw, config=zero_config(0))
    with pytest.raises(UsageError, match="no compiler passes to schedule"):
        engine.compile(schedule=[(0, [])])
    with pytest.raises(UsageError, match="compiled_autograd_enabled"):
        engine.compile(compiled_autograd_enabled=True)
    assert not engine.is_compiled
