"""Shard groups (MiCS, also called hybrid sharding): sharded over k ranks, replicated over the rest, same numbers."""

from __future__ import annotations

import os
import weakref
from collections import Counter
from functools import partial

import pytest
import torch
from torch import nn

from fullspeed.base.errors import ConfigError
from fullspeed.comm import (
    CommRecorder,
    HierarchicalGather,
    ReplicatedReduce,
    column_of,
    get_world_group,
    make_transport,
    observing,
    row_of,
    shared_transport,
)
from fullspeed.engine.initialize import initialize
from fullspeed.sharding import access
from tests.models import branching, deep_mlp, mlp, paths_for, stack
from tests.parity.beside import Pair, adamw, difference, sgd, square, vectors, zero_config
from tests.ranks import ranks, run_ranks

SHARDED = (1, 2, 3)
CPU = torch.device("cpu")


def mics(stage, size, **settings):
    return zero_config(stage, mics_shard_size=size, **settings)


def crossing(recorder, size):
    """(kind, elements) of every bulk transfer that leaves a shard group -> how often; scalars apart."""
    found = Counter()
    for event in recorder.events:
        if event.op != "agree" and event.numel > 1 and len({rank // size for rank in event.ranks}) > 1:
            found[event.op, event.numel] += 1
    return found


# ------------------------------------------------------------------------ parity


@pytest.mark.parametrize("stage", SHARDED)
@ranks(4)
def test_any_shard_group_trains_like_plain_torch(rank, world_size, stage):
    """Groups of one (only replicas), of two, and of all (only shards); accumulation, clipping, losses and norms."""
    for size, accum, overlap in ((1, 1, True), (2, 3, True), (2, 2, False), (4, 1, True)):
        config = mics(stage, size, accum=accum, clip=0.05, overlap_comm=overlap)
        pair = Pair(rank, world_size, stack, config, adamw).train(2)
        links = pair.engine.runtime.links
        assert (links.world_size, links.num_replicas) == (size, 4 // size)
        assert (links.replica, links.rank) == divmod(rank, size)
        assert all(group.layout.world_size == size for group in pair.engine.runtime.groups)
        assert min(pair.norms) > 0.05, "clipping is at work"
        pair.check()


@ranks(2)
def test_two_ranks(rank, world_size):
    for stage in SHARDED:
        for size in (1, 2):
            Pair(rank, world_size, mlp, mics(stage, size), sgd).train(3).check()


@ranks(6)
def test_replicas_that_do_not_divide_a_shard(rank, world_size):
    """Shards are cut in multiples of 16 elements: three replicas share one unevenly."""
    for stage in SHARDED:
        Pair(rank, world_size, mlp, mics(stage, 2, accum=2), adamw).train(2).check()


@ranks(4)
def test_reduction_by_all_reduce_and_in_one_group(rank, world_size):
    """`reduce_scatter: false` inside shard groups; merged groups; a predivide factor; persistent small parameters."""
    for stage in SHARDED:
        for zero in (
            {"reduce_scatter": False},
            {"reduce_bucket_size": 10**6},
            {"stage3_param_persistence_threshold": 10**6},
        ):
            config = mics(stage, 2, accum=2, **zero) | {"gradient_predivide_factor": 2.0}
            Pair(rank, world_size, mlp, config, adamw).train(2).check()


def _frozen(seed=0):
    model = stack(seed)
    for param in [*model.inner.parameters(), model.blocks[1].up.weight]:
        param.requires_grad_(False)
    return model


def _trainable(module):
    return [param for param in module.parameters() if param.requires_grad]


@ranks(4)
def test_frozen_parameters(rank, world_size):
    for stage in SHARDED:
        pair = Pair(rank, world_size, _frozen, mics(stage, 2, accum=2), adamw, groups=_trainable).train(3)
        assert any(not group.is_trainable for group in pair.engine.runtime.groups)
        pair.check()


def _paths(world_size, step, micro):
    return paths_for(vectors(world_size, step, micro), step)


@ranks(4)
def test_ranks_take_different_branches(rank, world_size):
    """Replicas of a shard complete their groups in different orders: second phases must pair all the same."""
    for stage in SHARDED:
        for prefetch in (0, 10**6) if stage == 3 else (0,):
            config = mics(stage, 2, accum=2, stage3_prefetch_bucket_size=prefetch)
            Pair(rank, world_size, branching, config, adamw, batches=_paths).train(4).check()


@pytest.mark.parametrize("name", ["Lamb", "Muon"])
@ranks(4)
def test_optimizers_that_need_whole_parameters(rank, world_size, name):
    """Their norms and matrices are gathered inside a shard group: equal to the same training without replicas."""
    models = []
    params = {"lr": 1e-2} if name == "Lamb" else {"lr": 1e-2, "weight_decay": 0.1}
    for size in (-1, 2):
        for stage in SHARDED:
            config = mics(stage, size) | {"optimizer": {"type": name, "params": params}}
            model = stack()
            engine, *_ = initialize(model=model, config=config)
            for step in range(3):
                engine.backward(square(engine, vectors(world_size, step, 0)[rank]))
                recorder = CommRecorder()
                with observing(recorder):
                    engine.step()
            assert engine.optimizer.optimizer.state, "it has stepped"
            of_optimizer = [event for event in recorder.events if event.op == "all_reduce" and event.numel > 1]
            assert {event.world_size for event in of_optimizer} == {2 if size == 2 else 4}
            engine.destroy()
            models.append(model)
    assert max(difference(models[0], stack()).values()) > 1e-3
    for other in models[1:]:
        assert max(difference(models[0], other).values()) < 1e-6


# ------------------------------------------------------------------------ traffic


@ranks(4)
def test_only_shards_of_gradients_cross(rank, world_size):
    """Of each group: a gather and a reduce-scatter inside a shard group, an all-reduce of one shard between them."""
    accum = 2
    for stage in SHARDED:
        engine, *_ = initialize(model=deep_mlp(), optimizer=adamw, config=mics(stage, 2, accum=accum))
        shards = Counter(group.layout.shard_numel for group in engine.runtime.groups)
        reductions = 1 if stage == 1 else accum
        for step in range(3):
            recorder = CommRecorder()
            with observing(recorder):
                for micro in range(accum):
                    engine.backward(square(engine, vectors(world_size, step, micro)[rank]))
                    engine.step()
            assert crossing(recorder, 2) == Counter(
                {("all_reduce", numel): count * reductions for numel, count in shards.items()}
            )
            counts = recorder.counts()
            assert counts["reduce_scatter"] == reductions * sum(shards.values())
            assert counts["all_gather"] > 0
        engine.destroy()


@ranks(4)
def test_gradients_of_a_pass_do_not_pile_up(rank, world_size):
    """Whole gradients go as soon as the shard group has read them, though the reduction ends with the backward."""
    model = nn.Sequential(*(nn.Linear(64, 64) for _ in range(12)))
    engine, *_ = initialize(model=model, optimizer=sgd, config=mics(2, 2, reduce_bucket_size=1))
    slot_of, buffers, alive = engine.runtime.slot_of, {}, []

    def watch(param, grad):
        group, _ = slot_of[param]
        if group.grads.local is not None:
            buffers[group.index] = weakref.ref(group.grads.local)
        alive.append(sum(buffer() is not None for buffer in buffers.values()))

    for param in model.parameters():
        param.register_hook(partial(watch, param))
    for _ in range(2):
        engine.backward(square(engine, torch.ones(2, 64)))
        engine.step()
        assert len(buffers) == 12
        assert max(alive) <= 5, "the one that fills, two to be read, and what a slower rank has yet to read"


@ranks(4)
def test_memory_is_that_of_the_shard_group(rank, world_size):
    """16P bytes of 16-bit Adam: 4P + 12P/k, 2P + 14P/k, 16P/k."""
    dim, layers = 128, 4
    numel = layers * (dim * dim + dim)
    for size in (1, 2):
        for stage, expected in ((1, 4 + 12 / size), (2, 2 + 14 / size), (3, 16 / size)):
            torch.manual_seed(0)
            model = nn.Sequential(*(nn.Linear(dim, dim) for _ in range(layers)))
            config = mics(stage, size) | {"bf16": {"enabled": True}}
            engine, *_ = initialize(model=model, optimizer=adamw, config=config)
            for _ in range(2):
                engine.backward(square(engine, torch.ones(2, dim, dtype=torch.bfloat16)))
                held = engine.memory_bytes()
                engine.step()
            engine.backward(square(engine, torch.ones(2, dim, dtype=torch.bfloat16)))
            held = engine.memory_bytes()
            total = sum(held[name] for name in ("params", "grads", "master", "optimizer"))
            assert abs(total - expected * numel) <= 0.02 * expected * numel, (stage, size, held)
            assert held["secondary"] == held["live"] == 0
            engine.destroy()


# ------------------------------------------------------------------------ precision


@ranks(4)
def test_overflow_on_one_rank_skips_everywhere(rank, world_size):
    for stage in SHARDED:
        config = mics(stage, 2) | {"fp16": {"enabled": True, "initial_scale_power": 8}}
        model = mlp()
        engine, optimizer, *_ = initialize(model=model, optimizer=adamw, config=config)
        before = {name: access.safe_get_full_fp32_param(param) for name, param in model.named_parameters()}
        x = vectors(world_size, 0, 0)[rank].half()
        loss = square(engine, x).float()
        engine.backward(loss * float("inf") if rank == 3 else loss)
        engine.step()
        assert optimizer.overflow
        assert not engine.was_step_applied()
        assert engine.get_global_grad_norm() == -1
        for name, param in model.named_parameters():
            assert torch.equal(access.safe_get_full_fp32_param(param), before[name])
        engine.backward(square(engine, x).float())
        engine.step()
        assert engine.was_step_applied()
        assert any(
            not torch.equal(access.safe_get_full_fp32_param(param), before[name])
            for name, param in model.named_parameters()
        )
        engine.destroy()


@ranks(4)
def test_16_bit_training_equals_plain_sharding(rank, world_size):
    """bf16 and fp16: up to the one more rounding of a sum made in two steps; replicas are equal to the last bit."""
    for precision in ("bf16", "fp16"):
        section = {"enabled": True} | ({"loss_scale": 64} if precision == "fp16" else {})
        dtype = torch.bfloat16 if precision == "bf16" else torch.float16
        for stage in SHARDED:
            found = []
            for size in (-1, 2):
                model = deep_mlp()
                config = mics(stage, size, accum=2, clip=0.05) | {precision: section}
                engine, *_ = initialize(model=model, optimizer=adamw, config=config)
                for step in range(3):
                    for micro in range(2):
                        x = vectors(world_size, step, micro)[rank].to(dtype)
                        engine.backward(square(engine, x).float())
                        engine.step()
                found.append([access.safe_get_full_fp32_param(param) for param in model.parameters()])
                if size == 2:
                    _check_replicas(engine)
                engine.destroy()
            worst = max((one - other).abs().max().item() for one, other in zip(*found, strict=True))
            assert worst < 2e-3, (precision, stage, worst)


def _check_replicas(engine):
    links = engine.runtime.links
    column = make_transport(column_of(links.dp_group, links.world_size), CPU)
    for group in engine.runtime.trainable:
        everyone = torch.empty(links.num_replicas * group.master.numel())
        column.all_gather(everyone, group.master.float()).wait()
        rows = everyone.view(links.num_replicas, -1)
        assert torch.equal(rows[0], rows[-1]), "replicas drift apart"


# ------------------------------------------------------------------------ accessors, checkpoints


@ranks(4)
def test_values_gradients_and_states_can_be_read_and_set(rank, world_size):
    for stage in SHARDED:
        pair = Pair(rank, world_size, deep_mlp, mics(stage, 2), adamw).train(2)
        batches = vectors(world_size, 2, 0)
        pair.engine.backward(square(pair.engine, batches[rank]))
        pair.reference_backward(batches)
        for param, theirs in zip(pair.model.parameters(), pair.reference.parameters(), strict=True):
            state = pair.reference_optimizer.state[theirs]
            torch.testing.assert_close(access.safe_get_full_fp32_param(param), theirs.detach(), atol=1e-6, rtol=0)
            torch.testing.assert_close(access.safe_get_full_grad(param), theirs.grad, atol=1e-6, rtol=0)
            moment = access.safe_get_full_optimizer_state(param, "exp_avg")
            torch.testing.assert_close(moment, state["exp_avg"], atol=1e-6, rtol=0)
        with torch.no_grad():
            for param, theirs in zip(pair.model.parameters(), pair.reference.parameters(), strict=True):
                state = pair.reference_optimizer.state[theirs]
                access.safe_set_full_fp32_param(param, theirs.detach() + 0.5)
                access.safe_set_full_grad(param, theirs.grad * 2)
                access.safe_set_full_optimizer_state(param, state["exp_avg"] * 3, "exp_avg")
                theirs.add_(0.5)
                theirs.grad.mul_(2)
                state["exp_avg"].mul_(3)
        pair.engine.step()
        pair.reference_step()
        pair.train(1).check()


def _resumable(folder, config, seed=0):
    engine, *_ = initialize(model=stack(seed), optimizer=adamw, config=config)
    if folder:
        engine.load_checkpoint(folder)
    return engine


def _steps(engine, first, last):
    losses = []
    for step in range(first, last):
        loss = square(engine, vectors(engine.world_size, step, 0)[engine.global_rank])
        engine.backward(loss)
        engine.step()
        losses.append(loss.item())
    return losses


@pytest.mark.parametrize("stage", SHARDED)
@ranks(4)
def test_checkpoints_between_layouts(rank, world_size, stage, tmp_path):
    """Saved with shard groups and loaded without, the other way round, and into other groups: one training."""
    whole = _resumable(None, zero_config(stage))
    _steps(whole, 0, 2)
    expected = _steps(whole, 2, 4)
    values = whole.module_state_dict()
    for index, (save_size, load_size) in enumerate(((2, -1), (-1, 2), (2, 1)) if stage == 3 else ((2, -1),)):
        folder = str(tmp_path / str(index))
        first = _resumable(None, mics(stage, save_size))
        _steps(first, 0, 2)
        first.save_checkpoint(folder)
        second = _resumable(folder, mics(stage, load_size), seed=7)
        torch.testing.assert_close(_steps(second, 2, 4), expected, atol=1e-6, rtol=0)
        for name, value in second.module_state_dict().items():
            torch.testing.assert_close(value, values[name], atol=1e-6, rtol=0)
        first.destroy()
        second.destroy()


@ranks(4)
def test_a_checkpoint_holds_every_element_once(rank, world_size, tmp_path):
    """Replicas share the work of writing what all of them have."""
    from fullspeed.checkpoint.reader import CheckpointReader

    for stage in SHARDED:
        config = mics(stage, 2) | {"bf16": {"enabled": True}}
        engine, *_ = initialize(model=stack(), optimizer=adamw, config=config)
        engine.backward(square(engine, torch.ones(4, 5, dtype=torch.bfloat16)))
        engine.step()
        engine.save_checkpoint(str(tmp_path / str(stage)), tag="t")
        reader = CheckpointReader(tmp_path / str(stage), "t", rank)
        saved, writers = Counter(), set()
        for chunk in reader.manifest.chunks:
            if chunk.per_element:
                saved[chunk.kind] += chunk.stop - chunk.start
                writers.add(chunk.rank)
        numel = sum(param.numel() for param in stack().parameters())
        assert len(saved) == 4, "parameters, masters, two moments"
        assert set(saved.values()) == {numel}
        assert writers == {0, 1, 2, 3}
        reader.close()
        engine.destroy()


def _save_weights(rank, world_size, config, folder):
    engine, *_ = initialize(model=stack(), optimizer=adamw, config=config)
    _steps(engine, 0, 2)
    engine.save_checkpoint(folder)
    return {name: value.clone() for name, value in engine.module_state_dict().items()}


def _load_weights(rank, world_size, config, folder):
    engine, *_ = initialize(model=stack(7), optimizer=adamw, config=config)
    path, _ = engine.load_checkpoint(folder, load_optimizer_states=False)
    assert path is not None
    return {name: value.clone() for name, value in engine.module_state_dict().items()}


def test_weights_go_to_fewer_and_to_more_ranks(tmp_path):
    """Four ranks in two shard groups and two ranks of plain ZeRO read each other's checkpoints."""
    layouts = ((4, mics(3, 2)), (2, zero_config(3)))
    for index, ((saves, config), (loads, other)) in enumerate((layouts, layouts[::-1])):
        folder = str(tmp_path / str(index))
        saved = run_ranks(_save_weights, saves, config, folder)
        for loaded in run_ranks(_load_weights, loads, other, folder):
            assert all(torch.equal(loaded[name], value) for name, value in saved[0].items())


# ------------------------------------------------------------------------ grids and transports


@ranks(4)
def test_rows_and_columns(rank, world_size):
    import torch.distributed as dist

    world = get_world_group()
    assert row_of(world, 4) is world
    assert column_of(world, 1) is world
    assert dist.get_process_group_ranks(row_of(world, 2)) == [[0, 1], [2, 3]][rank // 2]
    assert dist.get_process_group_ranks(column_of(world, 2)) == [[0, 2], [1, 3]][rank % 2]
    assert row_of(world, 2) is row_of(world, 2), "made once"


@ranks(4)
def test_a_hierarchical_gather_fills_in_order(rank, world_size):
    """Also with several under way that ranks wait for in different orders."""
    world = get_world_group()
    inside, between = make_transport(row_of(world, 2), CPU), make_transport(column_of(world, 2), CPU)
    gather = HierarchicalGather(inside, between, num_nodes=2)
    recorder = CommRecorder()
    with observing(recorder):
        fulls = [torch.zeros(4 * 3) for _ in range(5)]
        pending = [gather.all_gather(full, torch.full((3,), 10.0 * rank + i)) for i, full in enumerate(fulls)]
        for transfer in pending if rank % 2 else reversed(pending):
            transfer.wait()
    for i, full in enumerate(fulls):
        expected = torch.arange(4.0).mul(10).add(i).repeat_interleave(3)
        assert torch.equal(full, expected)
    across = [event for event in recorder.events if {r // 2 for r in event.ranks} == {0, 1}]
    assert {event.ranks for event in across} == {(rank % 2, rank % 2 + 2)}
    assert [event.numel for event in across] == [2 * 3] * 5, "a shard enters each node once"


@ranks(4)
def test_a_replicated_reduction_sums_over_all(rank, world_size):
    """Odd sizes, out-of-order waits, polls, a wider result, and results in place."""
    world = get_world_group()
    row, column = make_transport(row_of(world, 2), CPU), make_transport(column_of(world, 2), CPU)
    reduce = ReplicatedReduce(row, column, num_rows=2)
    fulls = [torch.arange(6.0, dtype=torch.bfloat16) + rank + i for i in range(5)]
    outs = [torch.zeros(3) for _ in fulls]
    pending = [reduce.reduce_scatter(full, out) for full, out in zip(fulls, outs, strict=True)]
    for transfer in pending if rank % 2 else reversed(pending):
        transfer.advance()
        transfer.poll()
    for transfer in reversed(pending):
        transfer.wait()
    begin = 3 * (rank % 2)
    for i, out in enumerate(outs):
        assert torch.equal(out, 4 * (torch.arange(6.0)[begin : begin + 3] + i) + 6)
    whole = torch.arange(6.0) * rank
    reduce.reduce_scatter(whole, whole[begin : begin + 3]).wait()
    assert torch.equal(whole[begin : begin + 3], 6 * torch.arange(6.0)[begin : begin + 3])
    whole = torch.arange(5 * 2.0) * rank
    reduce.all_reduce(whole).wait()
    assert torch.equal(whole, 6 * torch.arange(10.0))


@ranks(4)
def test_hierarchical_gathers_train_alike(rank, world_size):
    """A shard group over two nodes of two ranks: parameters cross between nodes once, numbers stay."""
    os.environ["LOCAL_WORLD_SIZE"] = "2"
    for stage in (1, 3):
        config = mics(stage, 4, accum=2, mics_hierarchical_params_gather=True)
        pair = Pair(rank, world_size, branching, config, adamw, batches=_paths)
        assert isinstance(pair.engine.runtime.links.gather, HierarchicalGather)
        pair.train(3).check()
    os.environ["LOCAL_WORLD_SIZE"] = "4"
    engine, *_ = initialize(model=mlp(), optimizer=adamw, config=config)
    assert not isinstance(engine.runtime.links.gather, HierarchicalGather), "in one node there is one hop"


@ranks(4)
def test_nodes_must_fill_shard_groups(rank, world_size):
    os.environ["LOCAL_WORLD_SIZE"] = "3"
    with pytest.raises(ConfigError, match=r"mics_shard_size is 4: .*as many ranks of a shard group on each"):
        initialize(model=mlp(), optimizer=adamw, config=mics(3, 4, mics_hierarchical_params_gather=True))


@ranks(4)
def test_over_messages(rank, world_size):
    """Hosts that share no memory exchange messages, which are matched by order: it must be the same on all ranks."""
    shared_transport.can_share = lambda group, device: False
    os.environ["LOCAL_WORLD_SIZE"] = "2"
    for config in (
        mics(2, 2, accum=2),
        mics(3, 2, accum=2),
        mics(3, 4, mics_hierarchical_params_gather=True),
        zero_config(3, zero_hpz_partition_size=2),
    ):
        pair = Pair(rank, world_size, branching, config, adamw, batches=_paths)
        assert not isinstance(pair.engine.runtime.links.gather, shared_transport.SharedMemoryTransport)
        pair.train(3).check()


# ------------------------------------------------------------------------ refusals


@ranks(4)
def test_what_cannot_be_is_refused(rank, world_size):
    model = mlp()
    with pytest.raises(ConfigError, match=r"mics_shard_size is 3: .*divide the 4 data-parallel ranks; use a divisor"):
        initialize(model=model, optimizer=adamw, config=mics(3, 3))
    with pytest.raises(ConfigError, match="stage 0 has nothing to shard"):
        initialize(model=model, optimizer=adamw, config=mics(0, 2))
    with pytest.raises(ConfigError, match=r"mics_hierarchical_params_gather is True: .*mics_shard_size"):
        initialize(model=model, optimizer=adamw, config=zero_config(3, mics_hierarchical_params_gather=True))
    engine, *_ = initialize(model=model, optimizer=adamw, config=zero_config(3, shard_group_size=2))
    assert engine.runtime.links.num_replicas == 2, "FullSpeed's own name of the key"
