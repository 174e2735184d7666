"""Parameters of every kind: frozen, tied, shared, empty, grouped, mixed dtypes; and what a sharded one answers."""

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


def _adamw_of_groups(params):
    return torch.optim.AdamW(params, lr=1e-2, weight_decay=0.1)


def _two_groups(module):
    weights = [param for param in module.parameters() if param.ndim > 1]
    rest = [param for param in module.parameters() if param.ndim <= 1]
    return [
        {"params": weights, "lr": 3e-2, "weight_decay": 0.5},
        {"params": [], "lr": 7.0},
        {"params": rest, "lr": 1e-3, "weight_decay": 0.0},
    ]


@ranks(2, 4)
def test_groups_with_their_own_settings(rank, world_size):
    """Also case E2: clipping uses one norm over both groups. The middle group is empty."""
    for stage in STAGES:
        config = zero_config(stage, accum=2, clip=0.05)
        pair = Pair(rank, world_size, deep_mlp, config, _adamw_of_groups, groups=_two_groups)
        assert [group["lr"] for group in pair.optimizer.param_groups] == [3e-2, 7.0, 1e-3]
        pair.train(4)
        assert min(pair.norms) > 0.05
        pair.check()


@ranks(2)
def test_d8_equal_groups_change_nothing(rank, world_size):
    """Two groups with the same settings train like one."""
    for stage in STAGES:
        models = []
        for groups in (None, lambda module: [{"params": [p]} for p in module.parameters()]):
            pair = Pair(rank, world_size, mlp, zero_config(stage, clip=0.05), adamw, groups=groups).train(3)
            pair.engine.destroy()
            models.append(pair.model)
        assert max(difference(*models).values()) < 1e-7


@ranks(2)
def test_group_settings_changed_between_steps(rank, world_size):
    """Schedulers and users write `optimizer.param_groups[i]["lr"]`: live at every stage."""
    for stage in STAGES:
        pair = Pair(rank, world_size, mlp, zero_config(stage), adamw)
        for lr in (0.1, 0.001, 0.03):
            for optimizer in (pair.optimizer, pair.reference_optimizer):
                for group in optimizer.param_groups:
                    group["lr"], group["weight_decay"] = lr, 10 * lr
            pair.train(1)
            assert pair.engine.get_lr() == [lr]
        pair.check()


class Tied(nn.Module):
    """One Parameter as embedding and head; an untied one stands before it."""

    def __init__(self) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.ones(6))
        self.embed = nn.Embedding(11, 6)
        self.layer = nn.Linear(6, 6)
        self.head = nn.Linear(6, 11, bias=False)
        self.head.weight = self.embed.weight

    def forward(self, x):
        return self.head(torch.tanh(self.layer(self.embed(x) * self.scale)))


def tied(seed=0):
    torch.manual_seed(seed)
    return Tied()


def indices(world_size, step, micro):
    generator = torch.Generator().manual_seed(1000 * step + micro)
    return list(torch.randint(0, 11, (world_size, 4, 3), generator=generator))


@ranks(2, 4)
def test_d10_tied_embedding_and_head(rank, world_size):
    for stage in STAGES:
        for accum in (1, 2):
            pair = Pair(rank, world_size, tied, zero_config(stage, accum=accum, clip=0.05), adamw, batches=indices)
            pair.train(3)
            assert pair.model.head.weight is pair.model.embed.weight
            assert [name for name, _ in pair.model.named_parameters()] == [
                name for name, _ in pair.reference.named_parameters()
            ]
            pair.check()
            assert pair.model.head.weight is pair.model.embed.weight


class FunctionalHead(nn.Module):
    """The root's forward reads a child's parameter itself."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(11, 6)
        self.layers = nn.ModuleList([nn.Linear(6, 6), nn.Linear(6, 6)])

    def forward(self, x):
        hidden = self.embed(x)
        for layer in self.layers:
            hidden = torch.tanh(layer(hidden))
        return nn.functional.linear(hidden, self.embed.weight)


def functional_head(seed=0):
    torch.manual_seed(seed)
    return FunctionalHead()


@ranks(2, 4)
def test_parameter_used_outside_its_module(rank, world_size):
    """`F.linear(x, self.embed.weight)` in the root's forward gathers the weight."""
    for stage in STAGES:
        for accum in (1, 2):
            pair = Pair(rank, world_size, functional_head, zero_config(stage, accum=accum), adamw, batches=indices)
            pair.train(4).check()


class OwnParameters(nn.Module):
    """Parameters in the root, in a ParameterList, and as the operand of plain operations."""

    def __init__(self) -> None:
        super().__init__()
        self.shift = nn.Parameter(torch.randn(5))
        self.mixers = nn.ParameterList([nn.Parameter(torch.randn(5, 5)) for _ in range(2)])
        self.gain = nn.Parameter(torch.tensor(1.5))
        self.nothing = nn.Parameter(torch.empty(0, 3))
        self.outer = nn.Linear(5, 3)

    def forward(self, x):
        for mixer in self.mixers:
            x = torch.tanh(x @ mixer + self.shift)
        return self.outer(x * self.gain) + self.nothing.sum()


def own_parameters(seed=0):
    torch.manual_seed(seed)
    return OwnParameters()


@ranks(2, 4)
def test_own_scalar_and_empty_parameters(rank, world_size):
    """A zero-element parameter, a 0-d one (which shards to one rank), and parameters of the root."""
    for stage in STAGES:
        pair = Pair(rank, world_size, own_parameters, zero_config(stage, accum=2, clip=0.05), adamw)
        assert pair.model.gain.shape == ()
        assert pair.model.nothing.shape == (0, 3)
        pair.train(3).check()
        assert pair.model.nothing.shape == (0, 3)


class Mixed(nn.Module):
    """fp32, bf16 and fp64 parameters in one model."""

    def __init__(self) -> None:
        super().__init__()
        self.middle = nn.Linear(5, 6)
        self.narrow = nn.Linear(6, 6).bfloat16()
        self.wide = nn.Linear(6, 3).double()

    def forward(self, x):
        x = torch.tanh(self.middle(x))
        return self.wide(self.narrow(x.bfloat16()).double())


def mixed(seed=0):
    torch.manual_seed(seed)
    return Mixed()


@ranks(2)
def test_mixed_dtypes(rank, world_size):
    """Each parameter keeps its dtype; bf16 gradients are averaged over ranks in bf16, hence the tolerance."""
    for stage in STAGES:
        pair = Pair(rank, world_size, mixed, zero_config(stage), lambda params: torch.optim.SGD(params, lr=1e-2))
        pair.tolerance = 2e-3
        pair.train(3)
        assert {param.dtype for param in pair.model.parameters()} == {torch.float32, torch.bfloat16, torch.float64}
        pair.check(4e-3)
        assert {param.dtype for param in pair.model.parameters()} == {torch.float32, torch.bfloat16, torch.float64}
        assert max(difference(pair.model, mixed()).values()) > 1e-2


class WithEmbedding(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(11, 6, sparse=True)
        self.outer = nn.Linear(6, 3)

    def forward(self, x):
        return self.outer(self.embed(x))


def with_embedding(seed=0):
    torch.manual_seed(seed)
    return WithEmbedding()


def dense_embedding(seed=0):
    module = with_embedding(seed)
    module.embed.sparse = False
    return module


@ranks(2)
def test_sparse_embedding(rank, world_size):
    """Sparse gradients train like dense ones; rows that one rank never saw get the other's gradient."""
    for stage in STAGES:
        pair = Pair(rank, world_size, with_embedding, zero_config(stage, accum=2), sgd, batches=indices)
        pair.reference.embed.sparse = False
        pair.train(3).check()


# ------------------------------------------------------------------------------------------------ frozen


def _frozen_first(seed=0):
    model = deep_mlp(seed)
    model[0].weight.requires_grad_(False)
    model[3].requires_grad_(False)
    return model


def _trainable(module):
    return [param for param in module.parameters() if param.requires_grad]


@ranks(2, 4)
def test_d11_frozen_parameters(rank, world_size):
    """Frozen before initialize: one weight of a layer, and a whole layer. They stay, to the bit."""
    for stage in STAGES:
        for groups in (None, _trainable):
            config = zero_config(stage, accum=2, clip=0.05)
            pair = Pair(rank, world_size, _frozen_first, config, adamw, groups=groups).train(3)
            pair.check()
            original = _frozen_first()
            assert torch.equal(pair.model[0].weight, original[0].weight)
            assert torch.equal(pair.model[3].weight, original[3].weight)
            assert not torch.equal(pair.model[0].bias, original[0].bias)
            assert [p.requires_grad for p in pair.model.parameters()] == [
                p.requires_grad for p in original.parameters()
            ]


@ranks(2)
def test_d11_frozen_after_initialize(rank, world_size):
    """`requires_grad_(False)` between steps: the parameter gets no gradient and torch's optimizer leaves it."""
    for stage in STAGES:
        pair = Pair(rank, world_size, deep_mlp, zero_config(stage), adamw).train(2)
        for model in (pair.model, pair.reference):
            model[3].requires_grad_(False)
        pair.train(2)
        for model in (pair.model, pair.reference):
            model[3].requires_grad_(True)
        pair.train(2).check()


@ranks(2)
def test_unfreezing_what_was_frozen_at_initialize_is_refused(rank, world_size):
    for stage in STAGES:
        pair = Pair(rank, world_size, _frozen_first, zero_config(stage), adamw, groups=_trainable).train(1)
        pair.model[3].requires_grad_(True)
        pair.engine.backward(square(pair.engine, torch.randn(4, 5)))
        with pytest.raises(UsageError, match=r"3\.weight was frozen at initialize"):
            pair.engine.step()
        pair.model[3].requires_grad_(False)


@ranks(2)
def test_all_frozen_blocks(rank, world_size):
    """LoRA-like: everything frozen but the last layer; and a frozen middle that gradients pass through."""

    def only_outer(seed=0):
        model = stack(seed)
        model.requires_grad_(False)
        model.outer.requires_grad_(True)
        return model

    def frozen_middle(seed=0):
        model = stack(seed)
        model.blocks.requires_grad_(False)
        return model

    for stage in STAGES:
        for make in (only_outer, frozen_middle):
            pair = Pair(rank, world_size, make, zero_config(stage, accum=2), adamw, groups=_trainable)
            pair.train(3)
            if stage == 3:
                assert not any(group.is_whole for group in pair.engine.runtime.groups)
            pair.check()


# ----------------------------------------------------------------------------------- sharded parameters


@ranks(2)
def test_a_sharded_parameter_outside_forward(rank, world_size):
    """It says what it is, costs nothing, and refuses to compute with values that are not here."""
    engine, *_ = initialize(model=mlp(), optimizer=sgd, config=zero_config(3))
    weight = engine.module[0].weight
    assert isinstance(weight, nn.Parameter)
    assert weight.shape == (7, 5)
    assert weight.numel() == 35
    assert weight.dtype == torch.float32
    assert "shards" in repr(weight)
    with torch._C.DisableTorchFunctionSubclass():
        assert weight.untyped_storage().nbytes() == 0
    assert [name for name, _ in engine.named_parameters()] == [f"module.{name}" for name, _ in mlp().named_parameters()]
    reads = (
        lambda: weight.sum(),
        lambda: weight + 1,
        lambda: weight[0],
        lambda: weight.tolist(),
        lambda: torch.stack([weight, weight]),
        lambda: weight.detach().cpu().numpy(),
        lambda: nn.functional.linear(torch.ones(1, 5), weight),
        lambda: weight.data.add_(1),
        lambda: nn.init.constant_(weight, 3.0),
        lambda: weight.clone(),
        lambda: torch.save(weight, "/dev/null"),
    )
    for read in reads:
        with pytest.raises(UsageError, match=r"parameter 0\.weight\b.* is sharded"):
            read()
    engine.destroy()
    assert torch.equal(engine.module[0].weight, mlp()[0].weight)


@ranks(2)
def test_parameters_keep_identity_and_order(rank, world_size):
    for stage in STAGES:
        model = stack()
        before = [(name, id(param), param.shape) for name, param in model.named_parameters()]
        engine, *_ = initialize(model=model, optimizer=sgd, config=zero_config(stage))
        engine.backward(square(engine, torch.randn(4, 5)))
        engine.step()
        assert [(name, id(param), param.shape) for name, param in model.named_parameters()] == before
        engine.destroy()
        assert [(name, id(param), param.shape) for name, param in model.named_parameters()] == before
        assert all(type(param) is nn.Parameter for param in model.parameters())


@ranks(2)
def test_buffers_follow_rank_0_and_stay(rank, world_size):
    """Batch-norm statistics: broadcast at the start, then each rank's own."""
    for stage in STAGES:
        torch.manual_seed(rank)
        model = nn.Sequential(nn.Linear(5, 4), nn.BatchNorm1d(4), nn.Linear(4, 3))
        model[1].running_mean.fill_(rank + 1.0)
        engine, *_ = initialize(model=model, optimizer=sgd, config=zero_config(stage))
        assert torch.equal(model[1].running_mean, torch.ones(4))
        engine.backward(square(engine, vectors(world_size, 0, 0)[rank]))
        engine.step()
        assert not torch.equal(model[1].running_mean, torch.ones(4))
        engine.destroy()


@ranks(2)
def test_wrong_optimizers_are_refused(rank, world_size):
    model, other = mlp(), mlp()
    with pytest.raises(UsageError, match="no parameter of the model"):
        initialize(model=model, optimizer=sgd(other.parameters()), config=zero_config(1))


@ranks(2)
def test_two_parameters_over_one_memory_are_refused(rank, world_size):
    model = mlp()
    model[2].weight = nn.Parameter(model[0].weight.data[:3].clone())
    model[2].weight.data = model[0].weight.data.view(-1)[:21].view(3, 7)
    with pytest.raises(UsageError, match="same memory"):
        initialize(model=model, optimizer=sgd, config=zero_config(2))


@ranks(2)
def test_stack_subclass_without_parameters_of_its_own(rank, world_size):
    """Non-persistent small groups and large ones beside each other at stage 3."""
    config = zero_config(3, accum=2, stage3_param_persistence_threshold=60)
    pair = Pair(rank, world_size, stack, config, adamw)
    assert isinstance(pair.model, Stack)
    kinds = {group.placement.params for group in pair.engine.runtime.groups}
    assert kinds == {True, False}
    pair.train(4).check()
