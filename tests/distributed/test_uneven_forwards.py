"""Ranks that run different numbers of forwards of a sharded model: nobody hangs, nobody needs a flag."""

import contextlib
import time
from unittest import mock

import pytest
import torch

from fullspeed import zero
from fullspeed.base.errors import CommError
from fullspeed.comm import agreement, all_gather_object, barrier, shared_transport
from fullspeed.engine import restore
from fullspeed.engine.initialize import initialize
from fullspeed.sharding import attendant
from tests.models import LLAMA, stack, tiny_llama
from tests.parity.beside import sgd, zero_config
from tests.ranks import ranks

PRELOAD = (LLAMA,)


@pytest.fixture(params=["shared memory", "messages"])
def wires(request: pytest.FixtureRequest) -> str:
    return str(request.param)


def without_shared_memory(wires: str) -> contextlib.ExitStack:
    """Ranks of this test exchange messages although they could share memory."""
    patches = contextlib.ExitStack()
    if wires == "messages":
        for module in (shared_transport, agreement):
            patches.enter_context(mock.patch.object(module, "can_share", return_value=False))
    return patches


@ranks(2, 4)
def test_loops_of_different_lengths_then_a_barrier(rank: int, world_size: int, wires: str) -> None:  # I10
    with without_shared_memory(wires):
        engine, *_ = initialize(model=stack(rank), optimizer=sgd, config=zero_config(3))
    x = torch.ones(2, 5) * (rank + 1)
    expected = stack(0)(x)
    with torch.no_grad():
        for _ in range(3 + 2 * rank):
            assert torch.allclose(engine(x), expected, atol=1e-6)
    barrier()  # of the caller: the engine knows nothing of it
    engine.backward(engine(x).sum())
    engine.step()
    engine.destroy()


@ranks(2)
def test_generation_of_different_lengths(rank: int, world_size: int) -> None:
    model, reference = tiny_llama(rank), tiny_llama(0)
    engine, *_ = initialize(model=model, optimizer=sgd, config=zero_config(3))
    tokens = torch.arange(5)[None] + rank
    settings = {"max_new_tokens": 3 + 4 * rank, "do_sample": False, "pad_token_id": 0, "eos_token_id": None}
    assert torch.equal(engine.generate(tokens, **settings), reference.generate(tokens, **settings))
    assert all_gather_object(rank) == [0, 1]
    engine.destroy()


@ranks(2)
def test_an_evaluation_engine_and_one_rank_without_any_forward(rank: int, world_size: int) -> None:
    engine, *_ = initialize(model=stack(rank), config=zero_config(3))
    with torch.no_grad():
        engine(torch.ones(2, 5))
        if rank == 1:
            time.sleep(0.1)
            engine(torch.ones(2, 5))
    barrier()
    engine.destroy()


@ranks(2)
def test_coming_back_takes_part_again(rank: int, world_size: int) -> None:
    engine, *_ = initialize(model=stack(rank), optimizer=sgd, config=zero_config(3))
    x = torch.ones(2, 5)
    for round_ in range(3):
        with torch.no_grad():
            for _ in range(1 + (rank + round_) % 2):
                engine(x)
            time.sleep(0.08 * rank)
        engine.backward(engine(x).square().mean())
        engine.step()
    expected = stack(0)
    optimizer = sgd(expected.parameters())
    for _ in range(3):
        expected(x).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()
    with torch.no_grad():
        assert torch.allclose(engine(x), expected(x), atol=1e-6)
    engine.destroy()


@ranks(2)
@pytest.mark.parametrize("way", ["state dict", "files"])
def test_a_rank_that_is_loading_does_not_serve_what_it_is_about_to_replace(
    rank: int, world_size: int, way: str
) -> None:
    engine, *_ = initialize(model=stack(rank), optimizer=sgd, config=zero_config(3))
    other = stack(7)
    x = torch.ones(2, 5)
    with torch.no_grad():
        engine(x)
        write = restore.write_group
        slowly = mock.Mock(side_effect=lambda *args: (time.sleep(0.1 * rank), write(*args)))
        with mock.patch.object(restore, "write_group", slowly):
            if way == "files":
                zero.load_weights(engine, other.state_dict())
            else:
                engine.load_module_state_dict(other.state_dict())
        assert torch.allclose(engine(x), other(x), atol=1e-6)
    assert slowly.call_count > 1
    engine.destroy()


def test_an_attendant_serves_only_while_the_rank_is_away() -> None:
    served: list[int] = []
    waiting = attendant.Attendant(lambda: True, lambda: served.append(1), lambda: None)
    assert not waiting.attend()
    waiting._away.set()  # without its thread
    assert waiting.attend()
    assert served == [1]
    waiting.come_back()
    assert not waiting.attend()


def test_a_fault_while_serving_is_raised_when_the_rank_comes_back() -> None:
    def fail() -> None:
        raise CommError("rank 1 died")

    waiting = attendant.Attendant(lambda: True, fail, lambda: None)
    waiting._away.set()
    assert waiting.attend()
    with pytest.raises(CommError, match="rank 1 died"):
        waiting.come_back()
    waiting.come_back()  # once
