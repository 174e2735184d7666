"""Optimizers and schedules over shards equal the same ones over whole parameters."""

from __future__ import annotations

import math
from functools import partial

import pytest
import torch
from torch import nn

from fullspeed.base.errors import ConfigError, UsageError
from fullspeed.engine.initialize import initialize
from fullspeed.optim.lamb import Lamb
from fullspeed.optim.lion import Lion
from fullspeed.optim.muon import MuonWithAuxAdam, flag_muon_params, muon_param_groups
from fullspeed.optim.newton_schulz import orthogonalize
from tests.models import deep_mlp, mlp
from tests.parity.beside import Pair, adamw, difference, sgd, square, vectors, zero_config
from tests.ranks import ranks

STAGES = (0, 1, 2, 3)


def _named(optimizer, **params):
    return {"optimizer": {"type": optimizer, "params": params}}


@ranks(2)
def test_a9_adam_is_adam_and_adamw_is_adamw(rank, world_size):
    """`Adam` with weight decay is torch.optim.Adam, with or without `torch_adam`; `AdamW` is torch.optim.AdamW."""
    settings = {"lr": 1e-2, "weight_decay": 0.5}
    cases = (
        ("Adam", {}, torch.optim.Adam),
        ("Adam", {"torch_adam": True}, torch.optim.Adam),
        ("Adam", {"adam_w_mode": True}, torch.optim.AdamW),
        ("AdamW", {}, torch.optim.AdamW),
        ("AdamW", {"torch_adam": True}, torch.optim.AdamW),
    )
    assert max(difference(_one_step(torch.optim.Adam), _one_step(torch.optim.AdamW)).values()) > 1e-3
    for stage in STAGES:
        for name, extra, kind in cases:
            config = zero_config(stage) | _named(name, **settings, **extra)
            reference = lambda params, kind=kind: kind(params, **settings)  # noqa: E731
            Pair(rank, world_size, mlp, config, None, reference_optimizer=reference).train(2).check()


def _one_step(kind):
    model = mlp()
    optimizer = kind(model.parameters(), lr=1e-2, weight_decay=0.5)
    square(model, vectors(1, 0, 0)[0]).backward()
    optimizer.step()
    return model


@ranks(2)
def test_named_optimizers(rank, world_size):
    """Those the configuration names, against torch's class of the same name or our own over whole parameters."""
    cases = (
        ("SGD", {"lr": 0.05, "momentum": 0.9, "nesterov": True}, torch.optim.SGD),
        ("Adagrad", {"lr": 0.05}, torch.optim.Adagrad),
        ("RMSprop", {"lr": 0.01}, torch.optim.RMSprop),
        ("Adamax", {"lr": 0.01}, torch.optim.Adamax),
        ("Lion", {"lr": 0.01, "weight_decay": 0.1}, Lion),
        ("Lamb", {"lr": 0.05, "weight_decay": 0.1}, Lamb),
    )
    for stage in STAGES:
        for name, settings, kind in cases:
            config = zero_config(stage, accum=2, clip=0.05) | _named(name, **settings)
            reference = lambda params, kind=kind, settings=settings: kind(params, **settings)  # noqa: E731
            pair = Pair(rank, world_size, deep_mlp, config, None, reference_optimizer=reference)
            pair.train(3).check(5e-6 if name == "Adagrad" else 1e-6)


@ranks(2, 4)
def test_lamb_norms_are_of_whole_parameters(rank, world_size):
    """Merged groups cut parameters anywhere; the trust ratio still sees the whole."""
    for stage in STAGES:
        config = zero_config(stage, reduce_bucket_size=10**6) | _named("Lamb", lr=0.05, weight_decay=0.1)
        reference = lambda params: Lamb(params, lr=0.05, weight_decay=0.1)  # noqa: E731
        Pair(rank, world_size, deep_mlp, config, None, reference_optimizer=reference).train(4).check()


@ranks(2)
def test_c11_bias_correction_is_per_parameter(rank, world_size):
    """`sub_group_size` 1, 20 and 1e9: Adam's step count grows by one per update, whatever the sub-groups."""
    for stage in (1, 2, 3):
        for size in (1, 20, 10**9):
            config = zero_config(stage, sub_group_size=size)
            adam = lambda params: torch.optim.Adam(params, lr=1e-2)  # noqa: E731
            Pair(rank, world_size, deep_mlp, config, adam).train(4).check()


class Wide(nn.Module):
    """A matrix much larger than the rest, so that any even cut goes through it."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(5, 3)
        self.large = nn.Linear(3, 41, bias=False)
        self.last = nn.Linear(41, 3)

    def forward(self, x):
        return self.last(torch.tanh(self.large(self.first(x))))


def wide(seed=0):
    torch.manual_seed(seed)
    return Wide()


@ranks(2, 4)
def test_c13_muon_on_a_matrix_that_straddles_ranks(rank, world_size):
    """Orthogonalised is the whole averaged gradient: equal to the unsharded optimizer and to the formula."""
    for stage in STAGES:
        for bucket in (1, 10**6):
            config = zero_config(stage, accum=2, reduce_bucket_size=bucket) | _named(
                "Muon", lr=0.02, adam_lr=0.01, weight_decay=0.1
            )
            pair = Pair(rank, world_size, wide, config, None, reference_optimizer=_reference_muon(wide))
            if stage and bucket == 1:
                piece = pair.optimizer.owned.get(pair.model.large.weight)
                assert piece is None or piece.piece.numel < pair.model.large.weight.numel(), "nothing straddles"
            pair.train(3).check(2e-6)


def _reference_muon(make_model):
    """An unsharded Muon over the reference's parameters, flagged by the names they have in the model."""
    shapes_with_flag = make_model()
    flag_muon_params(shapes_with_flag.named_parameters())
    flags = [vars(param)["use_muon"] for param in shapes_with_flag.parameters()]

    def build(params):
        params = list(params)
        for param, flag in zip(params, flags, strict=True):
            param.use_muon = flag
        return MuonWithAuxAdam(muon_param_groups(params, {"lr": 0.02, "adam_lr": 0.01, "weight_decay": 0.1}))

    return build


@ranks(2)
def test_c13_first_muon_update_by_hand(rank, world_size):
    """One step from zero momentum, written out: p - lr * orthogonalize(averaged gradient) * sqrt(rows / columns)."""
    for stage in STAGES:
        for bf16 in (False, True):
            model, plain = wide(), wide()
            config = zero_config(stage) | _named("Muon", lr=0.02)
            if bf16:
                config |= {"bf16": {"enabled": True}, "data_types": {"grad_accum_dtype": "fp32"}}
            engine, *_ = initialize(model=model, config=config)
            batches = vectors(world_size, 0, 0)
            engine.backward(square(engine, batches[rank].bfloat16() if bf16 else batches[rank]))
            engine.step()
            engine.destroy()
            sum(square(plain, batch) / world_size for batch in batches).backward()
            grad = plain.large.weight.grad
            expected = plain.large.weight.detach() - 0.02 * orthogonalize(grad, "gram") * (41 / 3) ** 0.5
            # bf16: weights are rounded to 8 bits (half a unit at |w| < 1 is 2e-3), gradients too.
            tolerance = 8e-3 if bf16 else 1e-6
            assert (model.large.weight.float() - expected).abs().max() < tolerance, (stage, bf16)


@ranks(2)
def test_client_optimizers(rank, world_size):
    """An object over all or some parameters, one with groups, a callable."""
    for stage in STAGES:
        models = []
        for give in (
            lambda model: adamw(model.parameters()),
            lambda model: adamw([{"params": [param]} for param in model.parameters()]),
            lambda model: adamw,
        ):
            model = mlp()
            engine, optimizer, *_ = initialize(model=model, optimizer=give(model), config=zero_config(stage))
            assert isinstance(optimizer, torch.optim.Optimizer)
            for step in range(3):
                engine.backward(square(engine, vectors(world_size, step, 0)[rank]))
                engine.step()
            engine.destroy()
            models.append(model)
        assert max(difference(models[0], models[1]).values()) < 1e-7
        assert max(difference(models[0], models[2]).values()) == 0.0


@ranks(2)
def test_optimizer_over_some_parameters(rank, world_size):
    """Parameters the optimizer does not know keep their values and get no memory; clipping ignores them."""

    def only_last(module):
        return list(module[2].parameters())

    for stage in STAGES:
        model, plain = mlp(), mlp()
        optimizer = torch.optim.SGD(only_last(model), lr=0.1)
        engine, *_ = initialize(model=model, optimizer=optimizer, config=zero_config(stage))
        reference = torch.optim.SGD(only_last(plain), lr=0.1)
        for step in range(3):
            batches = vectors(world_size, step, 0)
            engine.backward(square(engine, batches[rank]))
            engine.step()
            reference.zero_grad()
            sum(square(plain, batch) / world_size for batch in batches).backward()
            reference.step()
        engine.destroy()
        assert max(difference(model, plain).values()) < 1e-6


@ranks(2, 4)
def test_an_optimizer_that_has_taken_steps(rank, world_size):
    """Its state, step counts included, is carried over to the shards: training goes on as in torch."""
    for stage in STAGES:
        for make in (adamw, sgd):
            models = deep_mlp(), deep_mlp()
            optimizers = [make(model.parameters()) for model in models]
            for model, optimizer in zip(models, optimizers, strict=True):
                for step in range(2):
                    square(model, vectors(1, 90 + step, 0)[0]).backward()
                    optimizer.step()
                    optimizer.zero_grad()
            engine, *_ = initialize(model=models[0], optimizer=optimizers[0], config=zero_config(stage))
            for step in range(3):
                batches = vectors(world_size, step, 0)
                engine.backward(square(engine, batches[rank]))
                engine.step()
                sum(square(models[1], batch) / world_size for batch in batches).backward()
                optimizers[1].step()
                optimizers[1].zero_grad()
            engine.destroy()
            assert max(difference(*models).values()) < 1e-6, (stage, make)


class Rotating(torch.optim.Optimizer):
    """Not elementwise: every update depends on the whole tensor."""

    def __init__(self, params):
        super().__init__(params, {"lr": 1e-2})

    @torch.no_grad()
    def step(self, closure=None):
        for group in self.param_groups:
            for param in group["params"]:
                if param.grad is not None:
                    param.add_(param.grad / (param.grad.norm() + 1), alpha=-group["lr"])


class Plain(torch.optim.SGD):
    """Elementwise, but that cannot be known of a subclass."""


@ranks(2)
def test_untested_optimizers(rank, world_size):
    """Refused with sharded states unless the user vouches; welcome at stage 0."""
    for stage in (1, 2, 3):
        with pytest.raises(ConfigError, match="zero_allow_untested_optimizer"):
            initialize(model=mlp(), optimizer=Rotating, config=zero_config(stage))
        config = zero_config(stage) | {"zero_allow_untested_optimizer": True}
        Pair(rank, world_size, mlp, config, lambda params: Plain(params, lr=0.1)).train(2).check()
    Pair(rank, world_size, mlp, zero_config(0), Rotating).train(3).check()


# --------------------------------------------------------------------------------------------- schedules


@ranks(2)
def test_torch_schedulers(rank, world_size):
    """A torch LR scheduler on the client optimizer, as object or callable; its steps follow the updates."""
    kinds = (
        lambda optimizer: torch.optim.lr_scheduler.StepLR(optimizer, 2, gamma=0.5),
        lambda optimizer: torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, 7),
        lambda optimizer: torch.optim.lr_scheduler.OneCycleLR(optimizer, max_lr=0.1, total_steps=20),
        lambda optimizer: torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 1 / (1 + step)),
    )
    for stage in STAGES:
        for kind in kinds:
            for is_callable in (False, True):
                model, plain = mlp(), mlp()
                client, reference = sgd(model.parameters()), sgd(plain.parameters())
                expected = kind(reference)
                engine, _, _, scheduler = initialize(
                    model=model,
                    optimizer=client,
                    lr_scheduler=kind if is_callable else kind(client),
                    config=zero_config(stage, accum=2),
                )
                assert isinstance(scheduler, torch.optim.lr_scheduler.LRScheduler)
                for step in range(3):
                    for micro in range(2):
                        batches = vectors(world_size, step, micro)
                        engine.backward(square(engine, batches[rank]))
                        engine.step()
                        sum(square(plain, batch) / world_size / 2 for batch in batches).backward()
                    reference.step()
                    reference.zero_grad()
                    expected.step()
                    assert engine.get_lr() == pytest.approx([group["lr"] for group in reference.param_groups])
                engine.destroy()
                assert max(difference(model, plain).values()) < 1e-6


@ranks(2)
def test_g2_warmup_cosine(rank, world_size):
    """WarmupCosineLR total 10, warmup 4: after k updates the rate is the formula's value at n = k - 1."""
    config = zero_config(1) | {
        "optimizer": {"type": "SGD", "params": {"lr": 1.0}},
        "scheduler": {
            "type": "WarmupCosineLR",
            "params": {"total_num_steps": 10, "warmup_num_steps": 4, "warmup_type": "linear",
                       "warmup_min_ratio": 0.0, "cos_min_ratio": 0.0},
        },
    }  # fmt: skip
    engine, *_ = initialize(model=mlp(), config=config)
    seen = []
    for _ in range(10):
        engine.backward(square(engine, torch.ones(4, 5)))
        engine.step()
        seen.append(engine.get_lr()[0])
    warmup = [n / 4 for n in range(4)]
    cosine = [(1 + math.cos(math.pi * (n - 4 + 1) / 6)) / 2 for n in range(4, 10)]
    assert seen == pytest.approx(warmup + cosine, abs=1e-6)


@ranks(2)
def test_g3_one_cycle_beyond_its_cycle(rank, world_size):
    config = zero_config(1) | {
        "optimizer": {"type": "SGD", "params": {"lr": 0.1}},
        "scheduler": {
            "type": "OneCycle",
            "params": {"cycle_min_lr": 0.01, "cycle_max_lr": 0.1, "cycle_first_step_size": 2},
        },
    }
    engine, *_ = initialize(model=mlp(), config=config)
    for _ in range(8):
        engine.backward(square(engine, torch.ones(4, 5)))
        engine.step()
    assert engine.get_lr() == pytest.approx([0.01])


@ranks(2)
def test_returned_optimizer_answers_like_torchs(rank, world_size):
    for stage in STAGES:
        engine, optimizer, *_ = initialize(model=mlp(), optimizer=adamw, config=zero_config(stage))
        assert optimizer.param_groups[0]["lr"] == 1e-2
        assert optimizer.defaults["weight_decay"] == 0.1
        with pytest.raises(UsageError, match="cannot join"):
            optimizer.add_param_group({"params": [nn.Parameter(torch.zeros(1))]})
        loss = optimizer.step(partial(_closure_loss, engine))
        assert loss.item() > 0
        assert optimizer.state
        engine.destroy()


def _closure_loss(engine):
    loss = square(engine, torch.ones(4, 5))
    loss.backward()
    return loss
