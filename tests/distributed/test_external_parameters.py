"""Parameters used by modules that do not own them: registered or not, returned from a forward, whole or in part."""

from __future__ import annotations

import functools

import pytest
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

from fullspeed.base.errors import UsageError
from fullspeed.engine.initialize import initialize
from fullspeed.sharding.external import register_external_parameter, unregister_external_parameter
from tests.parity.beside import Pair, adamw, square, zero_config
from tests.ranks import ranks

STAGES = (1, 3)


class Decoder(nn.Module):
    """Owns nothing; multiplies by a weight it is told of, outside torch's registration."""

    def __init__(self, embed: nn.Embedding) -> None:
        super().__init__()
        self.borrowed = [embed]  # a list hides it from torch: no second registration

    def forward(self, x):
        return nn.functional.linear(torch.tanh(x), self.borrowed[0].weight)


class TiedByFunction(nn.Module):
    def __init__(self, *, is_registered: bool) -> None:
        super().__init__()
        self.embed = nn.Embedding(11, 6)
        self.layers = nn.ModuleList([nn.Linear(6, 6), nn.Linear(6, 6)])
        self.decoder = Decoder(self.embed)
        if is_registered:
            register_external_parameter(self.decoder, self.embed.weight)

    def forward(self, x):
        hidden = self.embed(x)
        for layer in self.layers:
            hidden = torch.tanh(layer(hidden))
        return self.decoder(hidden)


def tied(seed=0, is_registered=True):
    torch.manual_seed(seed)
    return TiedByFunction(is_registered=is_registered)


def indices(world_size, step, micro):
    generator = torch.Generator().manual_seed(1000 * step + micro)
    return list(torch.randint(0, 11, (world_size, 4, 3), generator=generator))


@ranks(2, 4)
def test_tied_decoder_with_and_without_registration(rank, world_size):
    for stage in STAGES:
        for is_registered in (True, False):
            make = functools.partial(tied, is_registered=is_registered)
            pair = Pair(rank, world_size, make, zero_config(stage, accum=2), adamw, batches=indices)
            pair.train(2).check()


def _wholeness_around(module, param_group):
    """Whether the group is whole as the module's forward begins, and after the call."""
    seen = []
    module.register_forward_pre_hook(lambda *_: seen.append(param_group.is_whole))
    module.register_forward_hook(lambda *_: seen.append(param_group.is_whole))
    return seen


@ranks(2)
def test_registration_gathers_at_the_door_and_frees_behind_it(rank, world_size):
    """Without it the weight is gathered at its use and stays to the end of the forward."""
    for is_registered in (True, False):
        engine, *_ = initialize(model=tied(0, is_registered), optimizer=adamw, config=zero_config(3))
        model = engine.module
        group, _ = engine.runtime.slot_of[model.embed.weight]
        seen = _wholeness_around(model.decoder, group)
        with torch.no_grad():
            engine(indices(2, 0, 0)[rank])
        assert seen == ([True, False] if is_registered else [False, True])
        engine.destroy()


@ranks(2)
def test_registered_after_initialize_and_taken_back(rank, world_size):
    """Between calls, and in the middle of the module's own forward; values stay the reference's throughout."""
    pair = Pair(rank, world_size, functools.partial(tied, is_registered=False), zero_config(3), adamw, batches=indices)
    model = pair.model
    group, _ = pair.engine.runtime.slot_of[model.embed.weight]
    seen = _wholeness_around(model.decoder, group)
    pair.train(1)
    assert seen[0] is False
    register_external_parameter(model.decoder, model.embed.weight)
    pair.train(2)
    assert seen[2] is seen[4] is True
    unregister_external_parameter(model.decoder, model.embed.weight)
    pair.train(1)
    assert seen[6] is False

    plain = model.decoder.forward

    def forward(x):
        register_external_parameter(model.decoder, model.embed.weight)
        return plain(x)

    model.decoder.forward = forward
    pair.train(2)
    assert seen[8] is False
    assert seen[10] is True
    assert group.users == 0
    pair.check()


@ranks(2)
def test_a_registered_module_called_alone(rank, world_size):
    """A decoder without parameters of its own has a scope once one is registered with it; before, it has none."""
    engine, *_ = initialize(model=tied(0, is_registered=False), optimizer=adamw, config=zero_config(3))
    decoder, weight = engine.module.decoder, engine.module.embed.weight
    with pytest.raises(UsageError, match=r"embed\.weight"):
        decoder(torch.ones(2, 6))
    register_external_parameter(decoder, weight)
    expected = nn.functional.linear(torch.tanh(torch.ones(2, 6)), tied(0).embed.weight)
    torch.testing.assert_close(decoder(torch.ones(2, 6)), expected)
    engine.destroy()
    register_external_parameter(engine.module.layers[0], weight)  # nobody follows any more
    torch.testing.assert_close(decoder(torch.ones(2, 6)), expected)


@ranks(2)
def test_a_frozen_external_parameter(rank, world_size):
    def make(seed):
        model = tied(seed)
        model.embed.weight.requires_grad_(False)
        return model

    for stage in STAGES:
        pair = Pair(rank, world_size, make, zero_config(stage), adamw, batches=indices,
                    groups=lambda module: [p for p in module.parameters() if p.requires_grad])  # fmt: skip
        pair.train(2).check()


class Returns(nn.Linear):
    """A linear layer that hands its own parameters to its caller, as `how` makes them of the layer."""

    def __init__(self, how) -> None:
        super().__init__(6, 6)
        self.how = how

    def forward(self, x):
        return super().forward(x), self.how(self)


class UsesReturned(nn.Module):
    def __init__(self, how) -> None:
        super().__init__()
        self.inner = nn.Linear(5, 6)
        self.returns = Returns(how)
        self.outer = nn.Linear(6, 3)

    def forward(self, x):
        hidden, (weight, bias) = self.returns(torch.tanh(self.inner(x)))
        return self.outer(torch.tanh(hidden) @ weight + bias)


WAYS = {
    "themselves": lambda linear: (linear.weight, linear.bias),
    "transposed": lambda linear: (linear.weight.t(), linear.bias.view(1, 6)),
    "a copy": lambda linear: (linear.weight * 2.0, linear.bias.clone()),
    "detached": lambda linear: (linear.weight.detach(), linear.bias),
}


def uses_returned(seed=0, way="themselves"):
    torch.manual_seed(seed)
    return UsesReturned(WAYS[way])


@ranks(2)
def test_parameters_returned_from_a_forward(rank, world_size):
    """The parent computes with what the child returned: the parameters, views of them, values made of them."""
    for stage in STAGES:
        for way in WAYS:
            make = functools.partial(uses_returned, way=way)
            Pair(rank, world_size, make, zero_config(stage, accum=2), adamw).train(2).check()


@ranks(2)
def test_returning_a_parameter_leaves_no_hooks_behind(rank, world_size):
    """Hooks for an output's gradient die with the output; a parameter lives on and must not collect them."""
    pair = Pair(rank, world_size, uses_returned, zero_config(3), adamw)
    before = len(pair.model.returns.weight._backward_hooks)
    pair.train(3)
    assert len(pair.model.returns.weight._backward_hooks) == before
    pair.check()


@ranks(2)
def test_a_returned_parameter_without_gradients(rank, world_size):
    """Under no_grad as well, views included."""
    for way in WAYS:
        engine, *_ = initialize(model=uses_returned(0, way), optimizer=adamw, config=zero_config(3))
        with torch.no_grad():
            torch.testing.assert_close(engine(torch.ones(2, 5)), uses_returned(0, way)(torch.ones(2, 5)))
        assert engine.memory_bytes()["live"] == 0
        engine.destroy()


class HandsOut(nn.Module):
    """The model itself returns something of its weight, to be used when nothing is whole any more."""

    def __init__(self, how) -> None:
        super().__init__()
        self.linear, self.how = nn.Linear(5, 3), how

    def forward(self, x):
        return self.linear(x), self.how(self.linear.weight)


@ranks(2)
def test_a_view_that_outlives_the_forward_is_refused(rank, world_size):
    """Its memory is freed when the forward ends: an error that names the parameter, not garbage."""
    for how in (lambda weight: weight.t(), lambda weight: {"rows": [weight[1:]]}):
        engine, *_ = initialize(model=HandsOut(how), optimizer=adamw, config=zero_config(3))
        with pytest.raises(UsageError, match=r"view of parameter linear\.weight.*clone"):
            engine(torch.ones(2, 5))
        assert engine.memory_bytes()["live"] == 0
        engine.module.how = lambda weight: weight.t().clone()
        output, copied = engine(torch.ones(2, 5))
        engine.backward((output * copied.sum()).square().mean())
        engine.step()
        engine.destroy()


@ranks(2)
def test_the_model_may_return_its_parameter(rank, world_size):
    """It is the parameter itself, sharded like all of them: an error only for who reads it."""
    engine, *_ = initialize(model=HandsOut(lambda weight: weight), optimizer=adamw, config=zero_config(3))
    output, weight = engine(torch.ones(2, 5))
    assert weight is engine.module.linear.weight
    with pytest.raises(UsageError, match=r"linear\.weight is sharded"):
        weight.sum()
    engine.backward(output.square().mean())
    engine.step()
    engine.destroy()


@ranks(2)
def test_two_registrations_of_one_module(rank, world_size):
    """Both parameters are whole inside; square of the loss keeps every gradient alive."""

    def make(seed):
        torch.manual_seed(seed)
        model = nn.Sequential(nn.Linear(5, 4), nn.Linear(4, 4), nn.Identity())
        first, second = model[0], model[1]
        model[2].forward = lambda x: nn.functional.linear(x + second.bias, first.weight.t()) * second.weight.sum()
        register_external_parameter(model[2], first.weight)
        register_external_parameter(model[2], second.weight)
        return model

    for stage in STAGES:
        Pair(rank, world_size, make, zero_config(stage), adamw, loss=square).train(2).check()


class Recomputed(UsesReturned):
    """The part that computes with what the child returned is recomputed in backward."""

    use_reentrant = False

    def part(self, x):
        hidden, (weight, bias) = self.returns(x)
        return torch.tanh(hidden) @ weight + bias

    def forward(self, x):
        hidden = torch.tanh(self.inner(x))
        return self.outer(checkpoint(self.part, hidden, use_reentrant=self.use_reentrant))


@ranks(2)
def test_returned_views_in_a_recompute(rank, world_size):
    """There the child is the outermost module that is called, and its views are the checkpointed function's."""

    def make(seed, use_reentrant):
        torch.manual_seed(seed)
        model = Recomputed(WAYS["transposed"])
        model.use_reentrant = use_reentrant
        return model

    for use_reentrant in (False, True):
        make_one = functools.partial(make, use_reentrant=use_reentrant)
        Pair(rank, world_size, make_one, zero_config(3, accum=2), adamw).train(2).check()
