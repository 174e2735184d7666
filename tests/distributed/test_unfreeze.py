"""Parameters that are frozen and trained in turn while the engine runs, compared with plain torch doing the same."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from fullspeed.base.errors import UsageError
from fullspeed.engine.initialize import initialize
from fullspeed.sharding.access import safe_get_full_fp32_param, safe_get_full_grad
from tests.models import Stack
from tests.parity.beside import Pair, adamw, sgd, square, zero_config
from tests.ranks import ranks

STAGES = (0, 1, 2, 3)


def _half_frozen(seed: int = 0) -> Stack:
    """Trained: the outer layer and half of the last block. A block is one unit, so its halves are two groups."""
    torch.manual_seed(seed)
    model = Stack()
    model.requires_grad_(False)
    model.outer.requires_grad_(True)
    model.blocks[2].up.requires_grad_(True)
    return model


def _trained(module: nn.Module) -> list[nn.Parameter]:
    return [param for param in module.parameters() if param.requires_grad]


def _pair(rank, world_size, config, optimizer=adamw, reference_optimizer=None):
    return Pair(
        rank, world_size, _half_frozen, config, optimizer, groups=_trained, reference_optimizer=reference_optimizer
    )


def _unfreeze_reference(pair: Pair, names: list[str], **options) -> None:
    params = [pair.reference.get_parameter(name) for name in names]
    for param in params:
        param.requires_grad_(True)
    pair.reference_optimizer.add_param_group({"params": params, **options})


FIRST = ["blocks.0.up.weight", "blocks.0.up.bias", "inner.weight"]
SECOND = ["blocks.0.down.weight", "blocks.1.norm.weight"]


@pytest.mark.parametrize("stage", STAGES)
@ranks(2)
def test_d12_unfreezing_equals_a_new_param_group_of_torch(rank, world_size, stage):
    """Twice, the second time the rest of a group of which a part is trained already; by names, then by parameters."""
    pair = _pair(rank, world_size, zero_config(stage, accum=2, clip=0.05)).train(2)
    before = pair.reference.blocks[0].up.weight.detach().clone()
    pair.engine.unfreeze((name for name in FIRST), lr=3e-2)
    _unfreeze_reference(pair, FIRST, lr=3e-2)
    pair.train(3)
    params = [pair.model.get_parameter(name) for name in SECOND]
    pair.optimizer.add_param_group({"params": params, "weight_decay": 0.3})
    _unfreeze_reference(pair, SECOND, weight_decay=0.3)
    pair.train(3)
    assert [len(params) for params in pair.optimizer.bit16_groups] == [4, 3, 2]
    assert pair.engine.get_lr() == [1e-2, 3e-2, 1e-2]
    frozen = {fqn for fqn, param in pair.model.named_parameters() if not param.requires_grad}
    assert frozen == {fqn for fqn, param in pair.reference.named_parameters() if not param.requires_grad}
    pair.check()
    assert not torch.equal(pair.model.blocks[0].up.weight, before)
    original = _half_frozen()
    assert all(torch.equal(pair.model.get_parameter(fqn), original.get_parameter(fqn)) for fqn in frozen)


@pytest.mark.parametrize("stage", STAGES)
@ranks(2)
def test_unfreezing_in_the_middle_of_an_accumulation(rank, world_size, stage):
    """Between two micro-batches of one update: the first one's gradients stay, the second adds to them."""
    pair = _pair(rank, world_size, zero_config(stage, accum=2), sgd).train(1)
    for micro in range(2):
        batches = pair.batches(world_size, pair.num_steps, micro)
        if micro:
            pair.engine.unfreeze(FIRST)
            _unfreeze_reference(pair, FIRST)
        pair.engine.backward(square(pair.engine, batches[rank]))
        pair.engine.step()
        pair.reference_backward(batches)
    pair.reference_step()
    pair.train(2).check()


@ranks(2)
def test_frozen_members_of_the_optimizer_are_trained_in_their_own_param_group(rank, world_size):
    """The optimizer was given all parameters, as scripts do; torch trains each as soon as it requires gradients."""
    for stage in STAGES:
        pair = Pair(
            rank, world_size, _half_frozen, zero_config(stage), adamw, groups=lambda module: list(module.parameters())
        ).train(2)
        with pytest.raises(UsageError, match="are in param group 0 since initialize"):
            pair.engine.unfreeze(FIRST, lr=1.0)
        with pytest.raises(UsageError, match="in a param group already"):
            pair.optimizer.add_param_group({"params": [pair.model.inner.weight]})
        pair.engine.unfreeze(FIRST)
        for name in FIRST:
            pair.reference.get_parameter(name).requires_grad_(True)
        pair.train(3)
        assert len(pair.optimizer.param_groups) == 1
        pair.check()


@ranks(2)
def test_frozen_again_and_trained_again(rank, world_size):
    """What was unfrozen is a parameter like any other: frozen it stays, and its momentum waits for it."""
    for stage in STAGES:
        pair = _pair(rank, world_size, zero_config(stage), sgd).train(1)
        pair.engine.unfreeze(FIRST)
        _unfreeze_reference(pair, FIRST)
        pair.train(2)
        for model in (pair.model, pair.reference):
            model.inner.weight.requires_grad_(False)
        kept = pair.reference.inner.weight.detach().clone()
        pair.train(2)
        assert torch.equal(pair.reference.inner.weight, kept)
        pair.engine.unfreeze([pair.model.inner.weight])
        pair.reference.inner.weight.requires_grad_(True)
        pair.train(2)
        assert not torch.equal(pair.reference.inner.weight, kept)
        pair.check()


@ranks(2)
def test_bf16_masters_start_from_the_resident_values(rank, world_size):
    """All stages step alike, and further than bf16 can show."""
    results = []
    for stage in STAGES:
        config = zero_config(stage) | {"bf16": {"enabled": True}}
        pair = _pair(rank, world_size, config)
        param = pair.model.inner.weight
        assert safe_get_full_fp32_param(param) is None
        pair.engine.unfreeze(["inner.weight"])
        start = safe_get_full_fp32_param(param)
        assert torch.equal(start, _half_frozen().inner.weight.bfloat16().float())
        for step in range(3):
            pair.engine.backward(square(pair.engine, pair.batches(world_size, step, 0)[rank].bfloat16()).float())
            assert safe_get_full_grad(param).abs().max() > 0
            pair.engine.step()
        master = safe_get_full_fp32_param(param)
        assert not torch.equal(master, start)
        assert not torch.equal(master, master.bfloat16().float()), "the master has no more digits than bf16"
        results.append(master)
        pair.engine.destroy()
        assert torch.equal(param.detach(), master.bfloat16())
    assert all((other - results[0]).abs().max() <= 2e-4 for other in results[1:])


@pytest.mark.parametrize("precision", ["fp32", "bf16"])
@ranks(2)
def test_a_checkpoint_of_an_unfrozen_engine_is_resumed(rank, world_size, precision, tmp_path):
    """Into an engine that unfroze the same; another is told where the param groups differ."""
    for stage in (0, 3):
        config = zero_config(stage) | ({"bf16": {"enabled": True}} if precision == "bf16" else {})

        def make(config=config):
            model = _half_frozen()
            return initialize(model=model, optimizer=adamw, model_parameters=_trained(model), config=config)[0]

        def train(engine, first, last):
            for step in range(first, last):
                torch.manual_seed(10 * step + rank)
                x = torch.randn(4, 5).to(engine.get_data_types()[0])
                engine.backward(square(engine, x).float())
                engine.step()

        straight = make()
        train(straight, 0, 1)
        straight.unfreeze(FIRST, lr=3e-2)
        train(straight, 1, 3)
        straight.save_checkpoint(tmp_path / str(stage))
        train(straight, 3, 5)
        resumed = make()
        with pytest.raises(Exception, match="has 2 param groups, this engine's optimizer 1"):
            resumed.load_checkpoint(tmp_path / str(stage))
        resumed.unfreeze(FIRST)
        resumed.load_checkpoint(tmp_path / str(stage))
        assert resumed.get_lr() == [1e-2, 3e-2]
        train(resumed, 3, 5)
        for engine in (straight, resumed):
            engine.destroy()
        ours, theirs = resumed.module.state_dict(), straight.module.state_dict()
        assert all(torch.equal(ours[fqn], theirs[fqn]) for fqn in theirs)
        assert not torch.equal(ours["inner.weight"], _half_frozen().inner.weight.to(ours["inner.weight"].dtype))


@ranks(2)
def test_schedules_and_new_param_groups(rank, world_size):
    """A schedule was made for the groups there were: a new one is refused until it goes; joining one always works."""
    config = zero_config(3) | {"scheduler": {"type": "WarmupLR", "params": {"warmup_num_steps": 4}}}
    pair = _pair(rank, world_size, config, sgd)
    with pytest.raises(UsageError, match="WarmupLR steers the param groups it was made for"):
        pair.engine.unfreeze(FIRST)
    with pytest.raises(UsageError, match="WarmupLR steers the param groups it was made for"):
        pair.optimizer.add_param_group({"params": [pair.model.inner.weight]})
    assert not pair.model.inner.weight.requires_grad
    pair.engine.unfreeze(FIRST, into=0)
    assert [len(params) for params in pair.optimizer.bit16_groups] == [7]
    for step in range(3):
        pair.engine.backward(square(pair.engine, pair.batches(world_size, step, 0)[rank]))
        pair.engine.step()
    pair.engine.lr_scheduler = None
    pair.engine.unfreeze(SECOND, lr=0.5)
    pair.engine.lr_scheduler = torch.optim.lr_scheduler.LambdaLR(pair.optimizer, lambda step: 1 / (1 + step))
    pair.engine.backward(square(pair.engine, pair.batches(world_size, 3, 0)[rank]))
    pair.engine.step()
    assert pair.engine.get_lr()[1] == 0.25
    pair.engine.destroy()
    assert not torch.equal(pair.model.inner.weight, _half_frozen().inner.weight)


@ranks(2)
def test_an_optimizer_that_needs_whole_matrices_takes_further_ones(rank, world_size):
    """Muon: matrices of the new group lie in shards, too."""

    def muon(params):
        from fullspeed.optim.muon import MuonWithAuxAdam

        return MuonWithAuxAdam([{"params": list(params), "use_muon": False}])

    for stage in (0, 3):
        pair = _pair(rank, world_size, zero_config(stage), muon).train(1)
        pair.tolerance = 1e-4
        pair.engine.unfreeze(["blocks.0.up.weight", "inner.weight"], use_muon=True)
        _unfreeze_reference(pair, ["blocks.0.up.weight", "inner.weight"], use_muon=True)
        pair.train(2)
        pair.check(1e-4)
        assert not torch.equal(pair.model.inner.weight, _half_frozen().inner.weight)


@ranks(2)
def test_what_unfreeze_refuses(rank, world_size):
    """Everything stays as it was, and training goes on."""
    pair = _pair(rank, world_size, zero_config(3)).train(1)
    refusals = {
        "no parameter named nobody": lambda: pair.engine.unfreeze(["nobody"]),
        "not in the model at initialize": lambda: pair.engine.unfreeze([nn.Parameter(torch.zeros(1))]),
        "into is 1, the optimizer has param groups 0 to 0": lambda: pair.engine.unfreeze(FIRST, into=1),
        "leave out lr or into": lambda: pair.engine.unfreeze(FIRST, into=0, lr=1.0),
        "ranks unfreeze different parameters": lambda: pair.engine.unfreeze([FIRST[rank]]),
    }
    for text, refused in refusals.items():
        with pytest.raises(UsageError, match=text):
            refused()
    pair.train(2).check()
    adagrad = _pair(rank, world_size, zero_config(3), lambda params: torch.optim.Adagrad(params, lr=0.1))
    with pytest.raises(UsageError, match="Adagrad makes the state of its parameters when it is built"):
        adagrad.engine.unfreeze(FIRST)
    adagrad.train(1).check()
