"""Uses of modules in orders and ways that change from step to step, sharded over ranks, beside plain torch."""

from __future__ import annotations

import random

import pytest
import torch
from torch import nn

from fullspeed.base.errors import UsageError
from fullspeed.engine.initialize import initialize
from tests.models import LLAMA, Block, Stack, stack, tiny_llama
from tests.parity.beside import Pair, adamw, difference, sgd, square, zero_config
from tests.ranks import ranks

PRELOAD = (LLAMA,)


class Reordered(Stack):
    """A stack whose blocks run in the order it is told."""

    order = (0, 1, 2)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.inner(x)
        for index in self.order:
            x = self.blocks[index](x)
        return self.outer(x)


def reordered(seed: int = 0) -> Reordered:
    torch.manual_seed(seed)
    return Reordered()


def _evaluate(pair: Pair, step: int) -> None:
    x = pair.batches(pair.world_size, step, 9)[pair.rank]
    pair.engine.eval()
    with torch.no_grad():
        assert torch.allclose(pair.engine(x), pair.reference(x), atol=1e-6)
    pair.engine.train()


@ranks(2, 4)
def test_i9_two_orders_in_turn(rank, world_size):
    """The training order forward, the evaluation order backward, with prefetch and reuse on and off."""
    for zero in ({}, {"stage3_max_reuse_distance": 10**6, "stage3_prefetch_bucket_size": 10**6}):
        pair = Pair(rank, world_size, reordered, zero_config(3, **zero), adamw)
        assert len(pair.engine.runtime.groups) == 5
        for step in range(4):
            pair.update()
            pair.model.order = pair.reference.order = (2, 1, 0)
            _evaluate(pair, step)
            pair.model.order = pair.reference.order = (0, 1, 2)
        pair.check()


@ranks(2)
def test_another_order_every_step(rank, world_size):
    """Blocks are repeated and left out; the same on all ranks, then on each rank its own."""
    pair = Pair(rank, world_size, reordered, zero_config(3), adamw)
    generator = random.Random(0)
    for step in range(8):
        orders = [tuple(generator.choices(range(3), k=generator.randint(1, 4))) for _ in range(world_size)]
        if step < 4:
            orders = [orders[0]] * world_size
        batches = pair.batches(world_size, step, 0)
        pair.model.order = orders[rank]
        pair.engine.backward(square(pair.engine, batches[rank]))
        pair.engine.step()
        for order, batch in zip(orders, batches, strict=True):
            pair.reference.order = order
            (square(pair.reference, batch) / world_size).backward()
        pair.reference_step()
    pair.check()


@ranks(2)
def test_a_forward_without_gradients_between_forward_and_backward(rank, world_size):
    """Its gathers and frees leave the graph alone; so does a submodule called by itself and `engine.module(...)`."""
    pair = Pair(rank, world_size, stack, zero_config(3), adamw)
    for step in range(3):
        batches = pair.batches(world_size, step, 0)
        loss = square(pair.engine.module, batches[rank])
        with torch.no_grad():
            other = pair.batches(world_size, step, 1)[rank]
            assert torch.allclose(pair.engine(other), pair.reference(other), atol=1e-6)
            assert torch.allclose(pair.model.inner(other), pair.reference.inner(other), atol=1e-6)
            hidden = pair.reference.inner(other)
            assert torch.allclose(pair.model.blocks[1].up(hidden), pair.reference.blocks[1].up(hidden), atol=1e-6)
        pair.engine.backward(loss)
        pair.engine.step()
        pair.reference_backward(batches)
        pair.reference_step()
    pair.check()


@ranks(2)
def test_training_through_submodules_called_by_themselves(rank, world_size):
    """No forward of the whole: encoder and head are called in turn, as in actor-critic scripts."""

    def loss(module, batch):
        hidden = module.blocks[2](module.blocks[0](module.inner(batch)))
        return (module.outer(hidden) - 0.5).square().mean()

    pair = Pair(rank, world_size, stack, zero_config(3), adamw)
    for step in range(3):
        batches = pair.batches(world_size, step, 0)
        pair.engine.backward(loss(pair.engine.module, batches[rank]))
        pair.engine.step()
        pair.reference_backward(batches, loss)
        pair.reference_step()
    pair.check()


class _Tied(nn.Module):
    """Attached late: computes with a parameter the engine manages, and with one of its own."""

    def __init__(self, shared: nn.Parameter) -> None:
        super().__init__()
        self.shared = shared
        self.scale = nn.Parameter(torch.tensor(2.0))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x @ self.shared.T * self.scale


class Extended(Stack):
    """Calls what is attached as `late`, if anything is."""

    def __init__(self) -> None:
        super().__init__()
        self.late: nn.Module | None = None

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.inner(x)
        for block in self.blocks:
            x = block(x)
        return self.outer(x) if self.late is None else self.late(x)


def extended(seed: int = 0) -> Extended:
    torch.manual_seed(seed)
    return Extended()


@ranks(2)
def test_modules_attached_and_removed_after_initialize(rank, world_size):
    """A managed parameter trains through a late module. The module's own parameters are the caller's, as in torch:
    they get gradients of this rank and no optimizer steps them. A removed block is simply not used."""
    for stage in (2, 3):
        pair = Pair(rank, world_size, extended, zero_config(stage), sgd).train(1)
        for model in (pair.model, pair.reference):
            model.late = _Tied(model.outer.weight)
        pair.reference.late.scale.requires_grad_(False)  # no part of the norm that the engine's is compared with
        pair.train(2)
        own = pair.model.late.scale
        assert own.item() == 2.0
        assert own.grad is not None
        with pytest.raises(UsageError, match="was not in the model at initialize"):
            pair.engine.unfreeze([own])
        for model in (pair.model, pair.reference):
            model.late = None
            del model.blocks[1]
        pair.train(2)
        late_blocks = [Block(6), Block(6)]
        late_blocks[1].load_state_dict(late_blocks[0].state_dict())
        for model, block in zip((pair.model, pair.reference), late_blocks, strict=True):
            model.blocks.append(block.requires_grad_(False))
        pair.train(1).check()


@ranks(2)
def test_a_forward_that_raises_is_tried_again(rank, world_size):
    """The error comes from within a block, out of all scopes; nothing stays gathered, and the next try is right."""
    pair = Pair(rank, world_size, stack, zero_config(3), adamw)
    for step in range(3):
        batches = pair.batches(world_size, step, 0)
        with pytest.raises(RuntimeError, match=r"Given normalized_shape"):
            pair.engine.module.blocks[1](torch.zeros(4, 99))
        with pytest.raises(RuntimeError, match="shapes cannot be multiplied"):
            pair.engine(torch.zeros(4, 99))
        assert all(not group.users for group in pair.engine.runtime.groups)
        pair.engine.backward(square(pair.engine, batches[rank]))
        pair.engine.step()
        pair.reference_backward(batches)
        pair.reference_step()
    pair.check()


@ranks(2)
def test_hooks_of_the_user(rank, world_size):
    """Forward hooks see whole parameters and may change outputs; hooks on gradients see and change them."""
    pair = Pair(rank, world_size, stack, zero_config(3), adamw)
    seen: list[float] = []

    def before(module, args):
        seen.append(module.up.weight.detach().sum().item())

    def after(module, args, output):
        return output * module.up.bias.mean() if torch.is_grad_enabled() else output

    for model in (pair.model, pair.reference):
        model.blocks[0].register_forward_pre_hook(before)
        model.blocks[1].register_forward_hook(after)
        model.blocks[2].down.bias.register_hook(lambda grad: grad * 3)
        model.inner.register_full_backward_hook(lambda module, inputs, outputs: None)
    pair.train(3)
    assert len(seen) == 3 * (1 + world_size)
    assert all(abs(seen[3 * i] - seen[3 * i + 1]) < 1e-5 for i in range(3)), "the hook saw other values than torch's"
    pair.check()


@ranks(2)
def test_functional_call(rank, world_size):
    """With tensors in the place of parameters; with the parameters themselves it is a forward like any other."""
    pair = Pair(rank, world_size, stack, zero_config(3), adamw).train(1)
    x = pair.batches(world_size, 5, 0)[rank]
    replaced = {fqn: torch.full_like(param, 0.1) for fqn, param in pair.reference.named_parameters()}
    with torch.no_grad():
        expected = torch.func.functional_call(pair.reference, replaced, (x,))
        assert torch.allclose(torch.func.functional_call(pair.engine.module, replaced, (x,)), expected, atol=1e-6)
    own = dict(pair.model.named_parameters())
    pair.engine.backward((torch.func.functional_call(pair.engine.module, own, (x,)) - 0.5).square().mean())
    pair.engine.step()
    batches = pair.batches(world_size, 5, 0)
    pair.reference_backward(batches)
    pair.reference_step()
    pair.check()


class _OnBackbone(nn.Module):
    """An adapter and a head of its own around a frozen backbone that is shared; gradients pass through all of it."""

    def __init__(self, backbone: nn.Module, seed: int) -> None:
        super().__init__()
        torch.manual_seed(seed)
        self.adapter = nn.Linear(5, 5)
        self.backbone = backbone
        self.head = nn.Linear(3, 3)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.head(self.backbone(self.adapter(x)))


def _two_models() -> list[nn.Module]:
    backbone = stack().requires_grad_(False)
    return [_OnBackbone(backbone, seed) for seed in (1, 2)]


@pytest.mark.parametrize("stage", [0, 2, 3])
@ranks(2)
def test_two_engines_over_one_frozen_backbone(rank, world_size, stage):
    """The backbone belongs to the engine that was built first; the other computes with it all the same."""
    models, references = _two_models(), _two_models()
    engines = [initialize(model=model, optimizer=adamw, config=zero_config(stage))[0] for model in models]
    optimizers = [adamw([*model.adapter.parameters(), *model.head.parameters()]) for model in references]
    for step in range(2):
        x = torch.randn(world_size, 4, 5, generator=torch.Generator().manual_seed(step))
        for engine, reference, optimizer in zip(engines, references, optimizers, strict=True):
            engine.backward(square(engine, x[rank]))
            engine.step()
            square(reference, x.flatten(0, 1)).backward()
            optimizer.step()
            optimizer.zero_grad()
    for engine in reversed(engines):
        engine.destroy()
    for model, reference in zip(models, references, strict=True):
        assert max(difference(model, reference).values()) <= 1e-6


@ranks(2)
def test_an_evaluating_engine_beside_a_training_one(rank, world_size):
    """A reference model, as preference training has: sharded, without optimizer, used in the other's step."""
    pair = Pair(rank, world_size, stack, zero_config(3), adamw)
    frozen, _, _, _ = initialize(model=stack(7).eval().requires_grad_(False), config=zero_config(3))
    plain = stack(7)
    for step in range(3):
        batches = pair.batches(world_size, step, 0)

        def loss(module, batch):
            other = frozen if module is pair.engine else plain
            with torch.no_grad():
                target = other(batch)
            return (module(batch) - target).square().mean()

        pair.engine.backward(loss(pair.engine, batches[rank]))
        pair.engine.step()
        pair.reference_backward(batches, loss)
        pair.reference_step()
    pair.check()
    frozen.destroy()


@ranks(2, timeout_s=300)
def test_generation_with_a_cache(rank, world_size):
    """Token by token under stage 3, in evaluation mode, between updates; ranks generate different lengths."""
    pytest.importorskip("transformers")
    model, reference = tiny_llama(rank), tiny_llama()
    engine, *_ = initialize(model=model, optimizer=sgd, config=zero_config(3))
    optimizer = sgd(reference.parameters())
    for step in range(2):
        engine.eval()
        options = {"max_new_tokens": 2 + 2 * rank, "do_sample": False, "use_cache": True}
        prompt = torch.tensor([[1, 2 + rank, 3]])
        with torch.no_grad():
            mine = engine.module.generate(prompt, **options)
            assert torch.equal(mine, reference.generate(prompt, **options))
        engine.train()
        tokens = torch.randint(0, 61, (world_size, 2, 6), generator=torch.Generator().manual_seed(step))
        engine.backward(engine(input_ids=tokens[rank], labels=tokens[rank]).loss)
        engine.step()
        whole = tokens.flatten(0, 1)
        reference(input_ids=whole, labels=whole).loss.backward()
        optimizer.step()
        optimizer.zero_grad()
    engine.destroy()
    assert max(difference(model, reference).values()) <= 1e-5
