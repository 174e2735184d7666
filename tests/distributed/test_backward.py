"""Graphs of every shape: several losses, kept graphs, modules run twice, engines joined by one loss."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from fullspeed.base.errors import UsageError
from fullspeed.engine.initialize import initialize
from tests.models import Stack, deep_mlp, mlp, stack
from tests.parity.beside import Pair, adamw, difference, sgd, square, vectors, zero_config
from tests.ranks import ranks

STAGES = (0, 1, 2, 3)


@ranks(2, 4)
def test_c6_retain_graph_then_a_second_loss(rank, world_size):
    """One forward, two losses: `backward(l1, retain_graph=True)`, `backward(l2)`, one step."""
    for stage in STAGES:
        pair = Pair(rank, world_size, deep_mlp, zero_config(stage), adamw)
        for _ in range(3):
            batches = vectors(world_size, pair.num_steps, 0)
            out = pair.engine(batches[rank])
            pair.engine.backward(out.square().mean(), retain_graph=True)
            pair.engine.backward((out - 1).abs().mean())
            pair.engine.step()
            pair.reference_backward(batches, lambda module, x: module(x).square().mean() + (module(x) - 1).abs().mean())
            pair.reference_step()
        pair.check()


@ranks(2)
def test_same_graph_twice(rank, world_size):
    """The same loss backwards twice counts twice."""
    for stage in STAGES:
        pair = Pair(rank, world_size, mlp, zero_config(stage), sgd)
        for _ in range(2):
            batches = vectors(world_size, pair.num_steps, 0)
            loss = square(pair.engine, batches[rank])
            pair.engine.backward(loss, retain_graph=True)
            pair.engine.backward(loss)
            pair.engine.step()
            pair.reference_backward(batches, lambda module, x: 2 * square(module, x))
            pair.reference_step()
        pair.check()


@ranks(2)
def test_backward_with_a_gradient(rank, world_size):
    """`out.backward(gradient=g)` and `engine.backward(out, gradient=g)`, twice each."""
    weights = torch.randn(4, 3, generator=torch.Generator().manual_seed(5))
    for stage in STAGES:
        for is_plain in (False, True):
            pair = Pair(rank, world_size, mlp, zero_config(stage, accum=2), adamw)
            for _ in range(2):
                for micro in range(2):
                    batches = vectors(world_size, pair.num_steps, micro)
                    out = pair.engine(batches[rank])
                    if is_plain:
                        out.backward(gradient=weights)
                    else:
                        pair.engine.backward(out, gradient=weights)
                    pair.engine.step()
                    pair.reference_backward(batches, lambda module, x: (module(x) * weights).sum())
                pair.reference_step()
            pair.check()


class TwoHeads(nn.Module):
    """Several outputs in a mapping with a tuple; a user may backward any subset of them."""

    def __init__(self) -> None:
        super().__init__()
        self.body = nn.Linear(5, 7)
        self.heads = nn.ModuleList([nn.Linear(7, 2), nn.Linear(7, 3)])

    def forward(self, x):
        hidden = torch.tanh(self.body(x))
        return {"a": self.heads[0](hidden), "rest": (self.heads[1](hidden), {"hidden": hidden})}


def two_heads(seed=0):
    torch.manual_seed(seed)
    return TwoHeads()


@ranks(2)
def test_losses_of_single_heads(rank, world_size):
    """One head in one step, the other in the next, both, and the hidden state only."""
    parts = (
        lambda out: out["a"].square().mean(),
        lambda out: out["rest"][0].square().mean(),
        lambda out: out["a"].square().mean() + out["rest"][0].square().mean(),
        lambda out: out["rest"][1]["hidden"].square().mean(),
    )
    for stage in STAGES:
        pair = Pair(rank, world_size, two_heads, zero_config(stage), adamw)
        for step in range(6):
            part = parts[step % 4]
            batches = vectors(world_size, step, 0)
            pair.engine.backward(part(pair.engine(batches[rank])))
            pair.engine.step()
            pair.reference_backward(batches, lambda module, x, part=part: part(module(x)))
            pair.reference_step()
        pair.check()


@ranks(2)
def test_two_forwards_then_their_backwards(rank, world_size):
    """Forward, forward, backward of the first, backward of the second; and in the other order."""
    for stage in STAGES:
        pair = Pair(rank, world_size, deep_mlp, zero_config(stage), adamw)
        for order in ((0, 1), (1, 0)):
            both = [vectors(world_size, pair.num_steps, micro) for micro in (0, 1)]
            losses = [square(pair.engine, batches[rank]) for batches in both]
            for index in order:
                pair.engine.backward(losses[index])
            pair.engine.step()
            for batches in both:
                pair.reference_backward(batches)
            pair.reference_step()
        pair.check()


@ranks(2)
def test_sum_of_two_forwards(rank, world_size):
    """One loss over two forwards, as contrastive training has it."""

    def contrast(module, x):
        return (module(x) - module(x.flip(0))).square().mean() + module(x).mean()

    for stage in STAGES:
        pair = Pair(rank, world_size, stack, zero_config(stage, accum=2), adamw, loss=contrast)
        pair.train(3).check()


class AppliesTwice(nn.Module):
    """An encoder that runs twice in one forward, and a module that stands in two places."""

    def __init__(self) -> None:
        super().__init__()
        shared = nn.Linear(6, 6)
        self.inner = nn.Linear(5, 6)
        self.layers = nn.ModuleList([shared, nn.LayerNorm(6), shared])
        self.encoder = nn.Linear(6, 6)
        self.outer = nn.Linear(6, 3)

    def forward(self, x):
        x = torch.tanh(self.inner(x))
        for layer in self.layers:
            x = torch.tanh(layer(x))
        return self.outer(self.encoder(torch.tanh(self.encoder(x))))


def applies_twice(seed=0):
    torch.manual_seed(seed)
    return AppliesTwice()


@ranks(2)
def test_c3_encoder_applied_twice(rank, world_size):
    """Within one forward, and again directly through submodules (an auxiliary loss outside the engine)."""

    def with_auxiliary(module, x):
        inner = module.module if hasattr(module, "runtime") else module
        auxiliary = inner.encoder(torch.tanh(inner.inner(x)))
        return square(module, x) + 0.5 * auxiliary.square().mean()

    for stage in STAGES:
        for accum in (1, 2):
            for overlap in (False, True):
                config = zero_config(stage, accum=accum, overlap_comm=overlap)
                Pair(rank, world_size, applies_twice, config, adamw, loss=with_auxiliary).train(2).check()


@ranks(2)
def test_submodule_forward_alone(rank, world_size):
    """A loss from submodules called outside the engine's forward."""

    def from_parts(module, x):
        inner = module.module if hasattr(module, "runtime") else module
        return (inner[2](torch.tanh(inner[0](x))) - 0.5).square().mean()

    for stage in STAGES:
        Pair(rank, world_size, mlp, zero_config(stage, accum=2), adamw, loss=from_parts).train(3).check()


@ranks(2)
def test_two_engines_joined_by_one_loss(rank, world_size):
    """A GAN's generator step: the loss passes through the discriminator into the generator; both may step."""
    for stages in ((0, 0), (1, 3), (2, 2), (3, 3), (3, 0)):
        models = [_generator(seed=rank), _critic(seed=rank)]
        references = [_generator(seed=0), _critic(seed=0)]
        engines = [
            initialize(model=model, optimizer=adamw, config=zero_config(stage))[0]
            for model, stage in zip(models, stages, strict=True)
        ]
        optimizers = [adamw(reference.parameters()) for reference in references]
        for step in range(4):
            batches = vectors(world_size, step, 0)
            loss = engines[1](engines[0](batches[rank])).square().mean()
            is_plain = step % 2 == 0
            if is_plain:
                loss.backward()
            else:
                engines[0].backward(loss)
            for reference_batch in batches:
                (references[1](references[0](reference_batch)).square().mean() / world_size).backward()
            chosen = (0,) if step == 1 else (0, 1)
            for index in chosen:
                engines[index].step()
                optimizers[index].step()
            for index in (0, 1):
                engines[index].zero_grad()
                optimizers[index].zero_grad()
        for engine, model, reference in zip(engines, models, references, strict=True):
            engine.destroy()
            assert max(difference(model, reference).values()) < 1e-6, stages


def _generator(seed):
    torch.manual_seed(seed)
    return nn.Sequential(nn.Linear(5, 6), nn.Tanh(), nn.Linear(6, 4))


def _critic(seed):
    torch.manual_seed(seed + 100 if seed == 0 else seed)
    return nn.Sequential(nn.Linear(4, 7), nn.Tanh(), nn.Linear(7, 1))


@ranks(2)
def test_gradients_with_respect_to_inputs(rank, world_size):
    """`torch.autograd.grad` of the output for the input (adversarial training) beside the usual step."""
    for stage in STAGES:
        pair = Pair(rank, world_size, mlp, zero_config(stage), adamw)
        for _ in range(2):
            batches = vectors(world_size, pair.num_steps, 0)
            x, other = batches[rank].clone().requires_grad_(), batches[rank].clone().requires_grad_()
            (mine,) = torch.autograd.grad(square(pair.engine, x), x)
            (theirs,) = torch.autograd.grad(square(pair.reference, other), other)
            assert torch.allclose(mine, theirs, atol=1e-6)
            pair.update()
        pair.check()


@ranks(2)
def test_exception_in_forward_then_continue(rank, world_size):
    """A forward that raises half-way, on all ranks, leaves the engine usable."""

    class Tripping(Stack):
        trips = False

        def forward(self, x):
            x = self.inner(x)
            x = self.blocks[0](x)
            if self.trips:
                raise RuntimeError("tripped")
            return self.outer(self.blocks[2](self.blocks[1](x)))

    def tripping(seed):
        torch.manual_seed(seed)
        return Tripping()

    for stage in STAGES:
        pair = Pair(rank, world_size, tripping, zero_config(stage, accum=2), adamw).train(1)
        pair.model.trips = True
        with pytest.raises(RuntimeError, match="tripped"):
            square(pair.engine, torch.randn(4, 5))
        pair.model.trips = False
        pair.train(2)
        if stage == 3:
            assert not any(group.is_whole for group in pair.engine.runtime.groups)
        pair.check()


@ranks(2)
@pytest.mark.parametrize("raising", [(3, 3), (3, None), (None, 3), (1, 5), (5, 1)])
@pytest.mark.parametrize("is_first", [True, False], ids=["first", "later"])
def test_exception_in_backward_then_continue(rank, world_size, raising, is_first):
    """A hook raises in backward, on one rank or at different places; after zero_grad, all goes on as if it had not."""
    for stage in STAGES:
        pair = Pair(rank, world_size, deep_mlp, zero_config(stage), adamw).train(0 if is_first else 1)
        if raising[rank] is None:
            pair.engine.backward(square(pair.engine, torch.randn(4, 5)))
        else:
            hook = pair.model[raising[rank]].register_full_backward_hook(_raise)
            with pytest.raises(RuntimeError, match="broken"):
                pair.engine.backward(square(pair.engine, torch.randn(4, 5)))
            hook.remove()
        pair.engine.zero_grad()
        pair.train(2).check()


def _raise(*_):
    raise RuntimeError("broken")


@ranks(2)
def test_what_backward_refuses(rank, world_size):
    for stage in (0, 3):
        engine, *_ = initialize(model=mlp(), optimizer=sgd, config=zero_config(stage))
        with pytest.raises(UsageError, match="scalar"):
            engine.backward(engine(torch.randn(4, 5)))
        with torch.no_grad():
            loss = square(engine, torch.randn(4, 5))
        with pytest.raises(UsageError, match="graph"):
            engine.backward(loss)
        engine.destroy()
        evaluator, optimizer, *_ = initialize(model=mlp(), config=zero_config(stage))
        assert optimizer is None
        with pytest.raises(UsageError, match="optimizer"):
            evaluator.backward(square(evaluator, torch.randn(4, 5)))
        evaluator.destroy()


@ranks(2)
def test_backward_returns_the_averaged_loss(rank, world_size):
    engine, *_ = initialize(model=mlp(), optimizer=sgd, config=zero_config(1, accum=4))
    loss = square(engine, torch.ones(4, 5))
    assert engine.backward(loss).item() == pytest.approx(loss.item() / 4)
    loss = square(engine, torch.ones(4, 5))
    assert engine.backward(loss, scale_wrt_gas=False).item() == pytest.approx(loss.item())


@ranks(2)
def test_optimizer_alone(rank, world_size):
    """The returned optimizer used without `engine.step()`: backward, `optimizer.step()`, `optimizer.zero_grad()`."""
    for stage in STAGES:
        pair = Pair(rank, world_size, mlp, zero_config(stage, clip=0.05), adamw)
        for _ in range(3):
            batches = vectors(world_size, pair.num_steps, 0)
            square(pair.engine, batches[rank]).backward()
            pair.optimizer.step()
            pair.optimizer.zero_grad()
            pair.reference_backward(batches)
            pair.reference_step()
        pair.check()
