"""Engines come and go: construction, destruction, several at once, and what must be refused."""

from __future__ import annotations

import copy
import gc
import io
import os
import pathlib
import re
import subprocess
import sys
import weakref

import pytest
import torch
from torch import nn

from fullspeed.base.errors import ConfigError, UsageError
from fullspeed.comm import CommRecorder, barrier, observing
from fullspeed.engine.initialize import initialize
from fullspeed.zero import GatheredParameters
from tests.models import deep_mlp, mlp, stack
from tests.parity.beside import Pair, adamw, difference, sgd, square, vectors, zero_config
from tests.ranks import ranks

STAGES = (0, 1, 2, 3)


def _step(engine, rank, world_size, step=0):
    engine.backward(square(engine, vectors(world_size, step, 0)[rank]))
    engine.step()


@ranks(2)
def test_s1_nothing_outlives_destroy(rank, world_size):
    """`destroy(); del; gc.collect()`: engine, module, parameters and optimizer are gone."""
    for stage in STAGES:
        model = stack()
        engine, optimizer, *_ = initialize(model=model, optimizer=adamw, config=zero_config(stage))
        for step in range(2):
            _step(engine, rank, world_size, step)
        with torch.no_grad():
            engine(torch.ones(2, 5))
        dying = {
            "engine": weakref.ref(engine),
            "module": weakref.ref(model),
            "block": weakref.ref(model.blocks[1]),
            "parameter": weakref.ref(model.blocks[1].up.weight),
            "optimizer": weakref.ref(optimizer),
            "runtime": weakref.ref(engine.runtime),
            "group": weakref.ref(engine.runtime.groups[0]),
        }
        engine.destroy()
        del engine, optimizer, model
        gc.collect()
        assert [name for name, reference in dying.items() if reference() is not None] == [], stage


def _shared_bytes() -> int:
    """Memory of the files that ranks share, as far as this one has touched it and nobody has given it back."""
    text = pathlib.Path("/proc/self/status").read_text()
    return 1024 * int(re.search(r"RssShmem:\s+(\d+)", text)[1])


@ranks(2)
def test_s1_a_destroyed_engine_that_is_still_held_keeps_no_group_and_no_shared_memory(rank, world_size):
    before = _shared_bytes()
    for stage in STAGES:
        model = nn.Linear(512, 1024)
        engine = initialize(model=model, optimizer=adamw, config=zero_config(stage))[0]
        engine.backward(engine(torch.ones(2, 512)).sum())
        engine.step()
        group = weakref.ref(engine.runtime.groups[0])
        assert _shared_bytes() - before > model.weight.numel() * 4 / world_size
        engine.destroy()
        gc.collect()
        assert group() is None, stage
        engine.destroy()
        barrier()  # a peer gives back what it owns, and this rank has mapped, in its own time
        assert _shared_bytes() - before < 2**18, stage


@ranks(2)
def test_s1_the_module_is_ordinary_again(rank, world_size):
    """After destroy it trains under plain torch, can be copied and saved, and may join a new engine."""
    for stage in STAGES:
        pair = Pair(rank, world_size, deep_mlp, zero_config(stage, accum=2), adamw).train(2)
        pair.engine.destroy()
        pair.engine.destroy()
        model = pair.model
        assert all(type(param) is nn.Parameter for param in model.parameters())
        assert all(param.grad is None for param in model.parameters())
        hooks = [h for m in model.modules() for h in (m._forward_hooks, m._forward_pre_hooks, m._backward_hooks)]
        assert not any(hooks)
        with pytest.raises(UsageError, match="destroyed"):
            pair.engine.backward(torch.zeros((), requires_grad=True))
        for module in (model, pair.reference):
            optimizer = sgd(module.parameters())
            square(module, torch.ones(4, 5)).backward()
            optimizer.step()
            optimizer.zero_grad()
        assert max(difference(model, pair.reference).values()) < 1e-6
        engine, *_ = initialize(model=model, optimizer=sgd, config=zero_config(3 - stage))
        _step(engine, rank, world_size)
        engine.destroy()


@ranks(2)
def test_destroy_in_mid_window(rank, world_size):
    """With accumulated gradients, and inside an unfinished forward-backward pair: parameters come back whole."""
    for stage in STAGES:
        for has_backward in (False, True):
            model = deep_mlp()
            engine, *_ = initialize(model=model, optimizer=adamw, config=zero_config(stage, accum=3))
            loss = square(engine, torch.ones(4, 5))
            if has_backward:
                engine.backward(loss)
            engine.destroy()
            assert max(difference(model, deep_mlp()).values()) == 0.0


def test_s4_one_process_without_a_launcher(tmp_path):
    """No RANK, no MPI: a script runs as a world of one."""
    script = tmp_path / "train.py"
    script.write_text(
        "import torch, fullspeed\n"
        "model = torch.nn.Linear(3, 2)\n"
        "config = {'train_batch_size': 4, 'optimizer': {'type': 'AdamW', 'params': {'lr': 0.01}},\n"
        "          'zero_optimization': {'stage': 3}}\n"
        "engine, *_ = fullspeed.initialize(model=model, config=config)\n"
        "for _ in range(2):\n"
        "    engine.backward(engine(torch.ones(4, 3)).square().mean()); engine.step()\n"
        "print('world', engine.world_size, 'steps', engine.global_steps)\n"
    )
    env = {name: value for name, value in os.environ.items() if not name.startswith(("OMPI_", "PMI_", "SLURM_"))}
    done = subprocess.run(
        [sys.executable, str(script)], env=env, capture_output=True, text=True, timeout=200, check=False
    )
    assert done.returncode == 0, done.stderr
    assert "world 1 steps 2" in done.stdout


@ranks(2)
def test_s7_two_optimizers_on_parts_of_one_model(rank, world_size):
    """Two engines over one module, each with its own parameters, optimizer and stage."""
    for stages in ((0, 0), (1, 2), (2, 2), (3, 3), (0, 3), (3, 1)):
        model, plain = deep_mlp(), deep_mlp()
        parts = [(model[0], model[2]), (model[3], model[5])]
        plain_parts = [(plain[0], plain[2]), (plain[3], plain[5])]
        engines = [
            initialize(model=model, optimizer=make(_params(part)), config=zero_config(stage))[0]
            for part, stage, make in zip(parts, stages, (adamw, sgd), strict=True)
        ]
        references = [make(_params(part)) for part, make in zip(plain_parts, (adamw, sgd), strict=True)]
        for step in range(4):
            batches = vectors(world_size, step, 0)
            loss = square(engines[0], batches[rank])
            if step % 2:
                loss.backward()
            else:
                engines[0].backward(loss)
            sum(square(plain, batch) / world_size for batch in batches).backward()
            for engine, reference in zip(engines, references, strict=True):
                if step != 2 or engine is engines[0]:
                    engine.step()
                    reference.step()
                engine.zero_grad()
                reference.zero_grad()
        for engine in engines:
            engine.destroy()
        assert max(difference(model, plain).values()) < 1e-6, stages


def _params(modules):
    return [param for module in modules for param in module.parameters()]


@ranks(2)
def test_two_independent_engines(rank, world_size):
    """Different models trained in turns, and one built while another is mid-window."""
    for stage in STAGES:
        first = Pair(rank, world_size, mlp, zero_config(stage, accum=2), adamw)
        first.engine.backward(square(first.engine, vectors(world_size, 0, 0)[rank]))
        first.engine.step()
        second = Pair(rank, world_size, deep_mlp, zero_config(3 - stage), sgd)
        second.train(2)
        first.engine.backward(square(first.engine, vectors(world_size, 0, 1)[rank]))
        first.engine.step()
        for micro in range(2):
            first.reference_backward(vectors(world_size, 0, micro))
        first.reference_step()
        first.train(1)
        second.train(1)
        first.check()
        second.check()


@ranks(2)
def test_one_module_in_two_engines_is_refused(rank, world_size):
    model = mlp()
    engine, *_ = initialize(model=model, optimizer=sgd, config=zero_config(3))
    with pytest.raises(UsageError, match=r"0\.weight belongs to another engine"):
        initialize(model=model, optimizer=sgd, config=zero_config(3))
    _step(engine, rank, world_size)
    assert engine.was_step_applied()


@ranks(2)
def test_a15_unsupported_blocks_are_refused(rank, world_size):
    """A block of a feature this version lacks raises and names it; switched off it is welcome."""
    for key, on, off in (
        ("sparse_attention", {"mode": "fixed"}, None),
        ("curriculum_learning", {"enabled": True, "curriculum_type": "seqlen", "min_difficulty": 8,
                                 "max_difficulty": 16, "schedule_type": "fixed_linear",
                                 "schedule_config": {"total_curriculum_step": 4, "difficulty_step": 8}},
         {"enabled": False}),
        ("progressive_layer_drop", {"enabled": True}, {"enabled": False}),
        ("amp", {"enabled": True}, {"enabled": False}),
    ):  # fmt: skip
        with pytest.raises(ConfigError, match=key):
            initialize(model=mlp(), optimizer=sgd, config=zero_config(0) | {key: on})
        if off is not None:
            engine, *_ = initialize(model=mlp(), optimizer=sgd, config=zero_config(0) | {key: off})
            engine.destroy()


@ranks(1)
def test_what_initialize_refuses(rank, world_size):
    with pytest.raises(UsageError, match="needs a model"):
        initialize(config={"train_batch_size": 1})
    with pytest.raises(UsageError, match="no configuration"):
        initialize(model=mlp())
    with pytest.raises(UsageError, match="given twice"):
        initialize(model=mlp(), config={"train_batch_size": 1}, config_params={"train_batch_size": 1})
    with pytest.raises(ConfigError, match="gradient_clipping"):
        initialize(model=mlp(), config={"train_batch_size": 1, "gradient_clipp1ng": 1})


@ranks(2)
def test_engine_looks_like_its_module(rank, world_size):
    """Attributes, train and eval mode, submodules and parameters are the module's."""
    model = stack()
    model.version = "mine"
    engine, *_ = initialize(model=model, optimizer=sgd, config=zero_config(3))
    assert engine.version == "mine"
    assert engine.module is model
    assert engine.blocks is model.blocks
    engine.eval()
    assert not model.blocks[0].training
    engine.train()
    assert model.blocks[0].training
    assert {id(param) for param in engine.parameters()} == {id(param) for param in model.parameters()}
    with pytest.raises(AttributeError):
        _ = engine.no_such_thing


@ranks(2)
def test_engine_without_optimizer_evaluates(rank, world_size):
    """No optimizer: forward at every stage, sharded at stage 3, and the module comes back."""
    for stage in STAGES:
        model = deep_mlp(rank)
        engine, optimizer, *_ = initialize(model=model, config=zero_config(stage))
        assert optimizer is None
        with torch.no_grad():
            assert torch.allclose(engine(torch.ones(2, 5)), deep_mlp(0)(torch.ones(2, 5)), atol=1e-6)
        engine.destroy()
        assert max(difference(model, deep_mlp(0)).values()) == 0.0


@ranks(2)
def test_a_step_without_gradients(rank, world_size):
    """A step called with nothing accumulated updates nothing that has no gradient."""
    for stage in STAGES:
        model = mlp()
        engine, *_ = initialize(model=model, optimizer=adamw, config=zero_config(stage))
        engine.step()
        engine.destroy()
        assert max(difference(model, mlp()).values()) == 0.0


@ranks(2)
@pytest.mark.parametrize("way", ["deepcopy", "torch.save"])
def test_a_copy_of_a_module_in_training_is_an_ordinary_module(rank, world_size, way):
    """Its forward is its own business, on one rank alone; what the engine does goes on as if there were none."""
    for stage in STAGES:
        pair = Pair(rank, world_size, deep_mlp, zero_config(stage), adamw).train(2)
        with GatheredParameters(pair.model.parameters()):
            twin = copy.deepcopy(pair.model) if way == "deepcopy" else _unpickled(pair.model)
        assert type(twin) is type(pair.model)
        events = CommRecorder()
        with observing(events):
            if rank == 0:
                loss = square(twin, torch.ones(4, 5))
                loss.backward()
                torch.optim.SGD(twin.parameters(), lr=0.1).step()
                assert square(twin, torch.ones(4, 5)).item() < loss.item()
        assert not events.events
        pair.train(2).check()


def _unpickled(model):
    file = io.BytesIO()
    torch.save(model, file)
    file.seek(0)
    return torch.load(file, weights_only=False)
