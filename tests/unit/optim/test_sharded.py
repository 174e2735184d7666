"""LAMB and Muon on shards cut anywhere equal the same optimizer on whole parameters."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn

from fullspeed.optim.lamb import Lamb
from fullspeed.optim.muon import MuonWithAuxAdam
from fullspeed.optim.shards import ShardAware
from tests.unit.optim.fake_ranks import FakeRanks, FakeShards, shard_groups

SHAPES = [(6, 10), (7,), (9, 4), (3, 5, 4), (8, 2, 3, 3), (1,), (5, 5)]


def lamb(groups):
    return Lamb([{**group, "weight_decay": 0.1 * at} for at, group in enumerate(groups)], lr=0.05)


def muon(groups):
    return MuonWithAuxAdam(groups)


def whole_groups(seed=0):
    generator = torch.Generator().manual_seed(seed)
    params = [nn.Parameter(torch.randn(shape, generator=generator)) for shape in SHAPES]
    matrices = [param for param in params if param.ndim > 1]
    others = [param for param in params if param.ndim == 1]
    return [
        {"params": matrices[:3], "use_muon": True, "weight_decay": 0.1},
        {"params": others, "use_muon": False, "lr": 0.01},
        {"params": matrices[3:], "use_muon": True, "ns_method": "standard", "momentum": 0.9},
    ]


def params_of(groups):
    return [param for group in groups for param in group["params"]]


def even_cuts(shapes, world):
    """Cuts of one flat buffer of all parameters into equal shards, as the runtime makes them."""
    total = sum(shape.numel() for shape in shapes)
    edges = [round(total * rank / world) for rank in range(world + 1)]
    cuts, start = [], 0
    for shape in shapes:
        numel = shape.numel()
        cuts.append([min(max(edge - start, 0), numel) for edge in edges])
        start += numel
    return cuts


def gradients(step, shapes):
    generator = torch.Generator().manual_seed(100 + step)
    return [torch.randn(shape, generator=generator) for shape in shapes]


def compare(make, world, cuts, active_per_call):
    """Step whole and sharded side by side; `active_per_call`: the parameters with gradients of each call."""
    whole = whole_groups()
    wholes = params_of(whole)
    shapes = [param.shape for param in wholes]
    reference = make(whole)
    ranks = FakeRanks(world)

    views = [FakeShards(ranks, rank, shapes, cuts) for rank in range(world)]
    sharded = [shard_groups(whole_groups(), view) for view in views]
    optimizers = [make(groups) for groups, _ in sharded]
    for optimizer, view in zip(optimizers, views, strict=True):
        optimizer.bind_shards(view)

    for call, active in enumerate(active_per_call):
        grads = gradients(call, shapes)

        def step(rank, grads=grads, active=active):
            for index, piece in sharded[rank][1].items():
                start, stop = views[rank].slice_of(index)
                piece.grad = grads[index].flatten()[start:stop].clone() if index in active else None
            optimizers[rank].step()

        ranks.run(step)
        for index, param in enumerate(wholes):
            param.grad = grads[index] if index in active else None
        reference.step()
        for index, param in enumerate(wholes):
            pieces = [pairs[index].detach() for _, pairs in sharded if index in pairs]
            torch.testing.assert_close(torch.cat(pieces), param.detach().flatten(), rtol=1e-6, atol=1e-6)
    assert all(calls == ranks.calls[0] for calls in ranks.calls)
    return ranks.calls[0]


EVERY = set(range(len(SHAPES)))


@pytest.mark.parametrize("make", [lamb, muon])
@pytest.mark.parametrize("world", [1, 2, 3])
def test_even_shards(make, world):
    shapes = [param.shape for param in params_of(whole_groups())]
    cuts = even_cuts(shapes, world)
    if world > 1:  # not vacuous: some matrix straddles two ranks, and some rank owns nothing of some parameter
        assert any(len({*cut}) > 2 for cut in cuts)
        assert any(cut[0] == cut[1] for cut in cuts)
    compare(make, world, cuts, [EVERY] * 4)


@pytest.mark.parametrize("make", [lamb, muon])
def test_sub_groups_and_idle_ranks(make):
    shapes = [param.shape for param in params_of(whole_groups())]
    calls = compare(make, 3, even_cuts(shapes, 3), [{0}, {1, 2}, {3, 4, 5, 6}, set(), {6}, EVERY])
    if make is lamb:
        assert [call[0] for call in calls] == ["all_reduce"] * 6
        assert {call[1] for call in calls} == {2 * len(SHAPES)}


@settings(max_examples=15, deadline=None)
@given(st.data())
def test_any_cut(data):
    make, world = data.draw(st.sampled_from([lamb, muon])), data.draw(st.integers(2, 3))
    shapes = [param.shape for param in params_of(whole_groups())]
    cuts = []
    for shape in shapes:
        inner = data.draw(st.lists(st.integers(0, shape.numel()), min_size=world - 1, max_size=world - 1))
        cuts.append([0, *sorted(inner), shape.numel()])
    calls = data.draw(st.lists(st.sets(st.integers(0, len(SHAPES) - 1)), min_size=1, max_size=3))
    compare(make, world, cuts, calls)


def test_muon_gathers_in_batches(monkeypatch):
    monkeypatch.setattr("fullspeed.optim.muon._GATHER_NUMEL", 100)
    shapes = [param.shape for param in params_of(whole_groups())]
    calls = compare(muon, 2, even_cuts(shapes, 2), [EVERY])
    matrices = [index for index, shape in enumerate(shapes) if len(shape) > 1]
    gathers = [call[1] for call in calls if call[0] == "gather"]
    assert [index for batch in gathers for index in batch] == matrices
    assert len(gathers) > 1
    assert all(len(batch) == 1 or sum(shapes[index].numel() for index in batch) <= 100 for batch in gathers)


def test_a_rank_may_own_nothing_at_all():
    shapes = [param.shape for param in params_of(whole_groups())]
    for make in (lamb, muon):
        compare(make, 2, [[0, shape.numel(), shape.numel()] for shape in shapes], [EVERY, {0}])


def test_both_are_shard_aware():
    assert isinstance(lamb(whole_groups()), ShardAware)
    assert isinstance(muon(whole_groups()), ShardAware)
    assert not isinstance(torch.optim.Adam([nn.Parameter(torch.zeros(1))]), ShardAware)
