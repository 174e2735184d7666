"""hpZ: after one gather over all ranks, a second copy of the parameters in each node serves the others."""

from __future__ import annotations

import gc
from collections import Counter

import pytest
import torch
from torch import nn

from fullspeed.base.errors import ConfigError
from fullspeed.comm import CommRecorder, barrier, observing
from fullspeed.engine.initialize import initialize
from fullspeed.sharding import access
from fullspeed.sharding.gathered import GatheredParameters
from tests.models import branching, deep_mlp, mlp, paths_for, stack
from tests.parity.beside import Pair, adamw, difference, square, vectors, zero_config
from tests.ranks import ranks


def hpz(size, **settings):
    return zero_config(3, zero_hpz_partition_size=size, **settings)


def gathers(recorder, size):
    """All-gathers by where they went: over all ranks, or inside a node of `size`."""
    found = Counter()
    for event in recorder.events:
        if event.op == "all_gather":
            nodes = {rank // size for rank in event.ranks}
            found["inside" if len(nodes) == 1 else "across"] += 1
    return found


def run(engine, rank, world_size, step=0, micro=0):
    loss = square(engine, vectors(world_size, step, micro)[rank])
    engine.backward(loss)
    return loss.item()


# ------------------------------------------------------------------------ parity


@ranks(4)
def test_trains_like_plain_torch(rank, world_size):
    """C14 besides: losses of the first step are those of plain stage 3. Nodes of one, two and four ranks."""
    for size, accum, prefetch in ((1, 1, 0), (2, 1, 10**6), (2, 3, 0), (4, 1, 10**6)):
        config = hpz(size, accum=accum, clip=0.05, stage3_prefetch_bucket_size=prefetch)
        pair = Pair(rank, world_size, stack, config, adamw).train(2)
        has_copy = pair.engine.runtime.links.node is not None
        assert has_copy == (size == 2), "a node of one rank has nothing to share, one of all ranks has all shards"
        assert min(pair.norms) > 0.05
        pair.check()


@ranks(2)
def test_two_ranks(rank, world_size):
    for size in (1, 2):
        Pair(rank, world_size, mlp, hpz(size, accum=2), adamw).train(3).check()


def _frozen(seed=0):
    model = stack(seed)
    for param in [*model.inner.parameters(), model.blocks[1].up.weight]:
        param.requires_grad_(False)
    return model


def _trainable(module):
    return [param for param in module.parameters() if param.requires_grad]


@ranks(4)
def test_frozen_parameters_cross_once(rank, world_size):
    """No step changes them, so after the first gather they never leave their node again."""
    pair = Pair(rank, world_size, _frozen, hpz(2, accum=2), adamw, groups=_trainable).train(1)
    recorder = CommRecorder()
    with observing(recorder):
        pair.train(2)
    trainable = len(pair.engine.runtime.trainable)
    assert trainable < len(pair.engine.runtime.groups)
    assert gathers(recorder, 2)["across"] == 2 * trainable
    pair.check()


def _paths(world_size, step, micro):
    return paths_for(vectors(world_size, step, micro), step + micro)


@ranks(4)
def test_ranks_take_different_branches(rank, world_size):
    """A group that one rank alone uses is gathered by all, and kept by all, in the same rounds."""
    for prefetch in (0, 10**6):
        config = hpz(2, accum=2, stage3_prefetch_bucket_size=prefetch)
        Pair(rank, world_size, branching, config, adamw, batches=_paths).train(3).check()


@ranks(4)
def test_with_shard_groups(rank, world_size):
    """Nodes inside shard groups of all four ranks, and shard groups that are nodes."""
    for size, node in ((4, 2), (2, 2), (2, 1)):
        config = hpz(node, accum=2, mics_shard_size=size)
        Pair(rank, world_size, deep_mlp, config, adamw).train(2).check()


@ranks(4)
def test_16_bit_training_equals_plain_stage_3(rank, world_size):
    """The copy is in the storage dtype: not a bit differs. fp16 overflow on one rank skips everywhere, as ever."""
    for precision in ("bf16", "fp16"):
        dtype = torch.bfloat16 if precision == "bf16" else torch.float16
        section = {"enabled": True} | ({"initial_scale_power": 8} if precision == "fp16" else {})
        found = []
        for size in (1, 2):
            model = deep_mlp()
            engine, optimizer, *_ = initialize(model=model, optimizer=adamw, config=hpz(size) | {precision: section})
            skipped = []
            for step in range(4):
                loss = square(engine, vectors(world_size, step, 0)[rank].to(dtype)).float()
                is_bad = precision == "fp16" and step == 1 and rank == 3
                engine.backward(loss * float("inf") if is_bad else loss)
                engine.step()
                skipped.append(optimizer.overflow)
            assert skipped == [False, precision == "fp16", False, False]
            found.append([access.safe_get_full_fp32_param(param) for param in model.parameters()])
            engine.destroy()
        assert all(torch.equal(one, other) for one, other in zip(*found, strict=True))


# ------------------------------------------------------------------------ traffic and memory


@ranks(4)
def test_backward_gathers_stay_inside_the_node(rank, world_size):
    """An update: one gather of each group over all ranks; every other, in any micro-batch, inside the node."""
    accum = 3
    config = hpz(2, accum=accum, stage3_prefetch_bucket_size=0)  # or backward's first gathers may begin in forward
    engine, *_ = initialize(model=deep_mlp(), optimizer=adamw, config=config)
    num_groups = len(engine.runtime.groups)
    for step in range(3):
        recorder = CommRecorder()
        with observing(recorder):
            for micro in range(accum):
                forward, backward = CommRecorder(), CommRecorder()
                with observing(forward):
                    loss = square(engine, vectors(world_size, step, micro)[rank])
                with observing(backward):
                    engine.backward(loss)
                    engine.step()
                assert gathers(forward, 2)["across"] == (0 if micro else num_groups)
                assert gathers(backward, 2)["across"] == 0
                assert gathers(backward, 2)["inside"] >= num_groups - 1
        assert gathers(recorder, 2)["across"] == num_groups
        with observing(recorder), torch.no_grad():
            square(engine, torch.ones(4, 5))
            square(engine, torch.ones(4, 5))
        assert gathers(recorder, 2)["across"] == 2 * num_groups, "copies are stale after a step, renewed once"
        engine.runtime.groups[0].forget_copies()  # on all ranks: as if values had been written
        with observing(recorder), torch.no_grad():
            square(engine, torch.ones(4, 5))
        assert gathers(recorder, 2)["across"] == 2 * num_groups + 1
        for group in engine.runtime.groups:
            group.forget_copies()


def _storage_bytes():
    gc.collect()
    storages = {}
    with torch._C.DisableTorchFunctionSubclass():
        for item in gc.get_objects():
            if isinstance(item, torch.Tensor) and item.layout == torch.strided:
                storages[item.untyped_storage()._cdata] = item.untyped_storage().nbytes()
    return sum(storages.values())


@ranks(4)
def test_memory_of_the_copy(rank, world_size):
    """P/h elements in the storage dtype, from the first forward of an update until its step."""
    dim, layers, node = 64, 4, 2
    numel = layers * (dim * dim + dim)
    for precision, itemsize in ((None, 4), ("bf16", 2)):
        torch.manual_seed(0)
        model = nn.Sequential(*(nn.Linear(dim, dim) for _ in range(layers)))
        config = hpz(node) | ({precision: {"enabled": True}} if precision else {})
        engine, *_ = initialize(model=model, optimizer=adamw, config=config)
        assert engine.memory_bytes()["secondary"] == 0
        before = _storage_bytes()
        x = torch.ones(2, dim, dtype=torch.bfloat16 if precision else torch.float32)
        with torch.no_grad():
            engine(x)
        expected = itemsize * numel / node
        held = engine.memory_bytes()["secondary"]
        assert expected <= held <= 1.02 * expected
        assert abs(_storage_bytes() - before - held) <= 0.02 * expected, "what is said is what is held"
        barrier()  # a rank that is counting must not be asked for its shards by one that goes on
        engine.backward(square(engine, x))
        assert engine.memory_bytes()["secondary"] == held
        engine.step()
        assert engine.memory_bytes()["secondary"] == 0
        engine.destroy()


# ------------------------------------------------------------------------ writes


@ranks(4)
def test_written_values_are_seen_at_once(rank, world_size):
    """Edits between forward and backward, and between two forwards without a step, reach every rank's next use."""
    pair = Pair(rank, world_size, stack, hpz(2), adamw).train(1)
    engine, x = pair.engine, vectors(world_size, 5, 0)[rank]
    with torch.no_grad():
        square(engine, x)
        assert engine.memory_bytes()["secondary"] > 0
        for param, theirs in zip(pair.model.parameters(), pair.reference.parameters(), strict=True):
            access.safe_set_full_fp32_param(param, theirs.detach() * 1.5)
            theirs.mul_(1.5)
        assert engine.memory_bytes()["secondary"] == 0
        torch.testing.assert_close(square(engine, x), square(pair.reference, x), atol=1e-6, rtol=0)
        with GatheredParameters(list(pair.model.outer.parameters()), modifier_rank=1):
            if rank == 1:
                pair.model.outer.weight.mul_(2)
        pair.reference.outer.weight.mul_(2)
        torch.testing.assert_close(square(engine, x), square(pair.reference, x), atol=1e-6, rtol=0)
        halved = {name: value / 2 for name, value in engine.module_state_dict().items()}
        engine.load_module_state_dict(halved)
        pair.reference.load_state_dict(halved)
        torch.testing.assert_close(square(engine, x), square(pair.reference, x), atol=1e-6, rtol=0)
    pair.train(2).check()


@ranks(4)
def test_edits_between_forward_and_backward(rank, world_size):
    """Backward multiplies with the new weight of the layer above, as the gathered values it asks for are new."""
    engine, *_ = initialize(model=mlp(), optimizer=adamw, config=hpz(2))
    outer = engine.module[2].weight
    gradients = []
    for factor in (1.0, 3.0):
        loss = square(engine, vectors(world_size, 0, 0)[rank])
        access.safe_set_full_fp32_param(outer, mlp()[2].weight.detach() * factor)
        engine.backward(loss)
        gradients.append(access.safe_get_full_grad(engine.module[0].weight))
        access.safe_set_full_fp32_param(outer, mlp()[2].weight.detach())
        engine.zero_grad()
    assert gradients[0].abs().max() > 1e-3
    torch.testing.assert_close(gradients[1], 3 * gradients[0], atol=1e-6, rtol=0)


@ranks(4)
def test_a_loaded_checkpoint_is_computed_with(rank, world_size, tmp_path):
    """Saved with copies around, loaded into an engine that has copies of other values: the training goes on."""
    model = stack()
    engine, *_ = initialize(model=model, optimizer=adamw, config=hpz(2))
    run(engine, rank, world_size)
    engine.step()
    run(engine, rank, world_size, 1)
    engine.zero_grad()
    engine.save_checkpoint(str(tmp_path))
    losses = []
    for config in (hpz(2), zero_config(3)):
        other, *_ = initialize(model=stack(7), optimizer=adamw, config=config)
        run(other, rank, world_size)
        other.load_checkpoint(str(tmp_path))
        losses.append([])
        for step in (1, 2):
            losses[-1].append(run(other, rank, world_size, step))
            other.step()
        other.destroy()
    assert losses[0] == losses[1]
    for step in (1, 2):
        assert run(engine, rank, world_size, step) == losses[0][step - 1]
        engine.step()


@ranks(4)
def test_an_engine_ends_with_its_values(rank, world_size):
    """`destroy` gives back the resident values, whatever copies there are."""
    pair = Pair(rank, world_size, stack, hpz(2), adamw).train(1)
    run(pair.engine, rank, world_size)
    assert pair.engine.memory_bytes()["secondary"] > 0
    pair.engine.destroy()
    assert max(difference(pair.model, pair.reference).values()) <= 1e-6


# ------------------------------------------------------------------------ with quantised gathers


@ranks(4)
def test_the_copy_holds_what_a_quantised_gather_delivered(rank, world_size):
    """qwZ: backward computes with the very values of forward, without sending codes again."""
    config = hpz(2, accum=2, zero_quantized_weights=True)
    engine, *_ = initialize(model=deep_mlp(), optimizer=adamw, config=config)
    seen = {group.index: [] for group in engine.runtime.groups}

    def look(module, args):
        for group in engine.runtime.groups:
            if group.is_whole:
                seen[group.index].append(group.full.clone())

    for module in engine.module:
        module.register_forward_pre_hook(look)
    recorder = CommRecorder()
    with observing(recorder):
        run(engine, rank, world_size)
        run(engine, rank, world_size, 0, 1)
    exact = {group.index: _exact(group) for group in engine.runtime.groups}
    for index, values in seen.items():
        assert len(values) >= 2
        assert all(torch.equal(value, values[0]) for value in values)
        is_coarse = not torch.equal(values[0], exact[index])
        assert is_coarse == (index != 1), "quantised, which zeros and ones survive"
        assert (values[0] - exact[index]).abs().max() < 0.01
    dtypes = Counter((event.dtype, len(event.ranks)) for event in recorder.events if event.op == "all_gather")
    num_groups = len(engine.runtime.groups)
    assert dtypes["torch.uint8", 4] == num_groups
    assert dtypes["torch.float32", 2] >= num_groups
    assert set(dtypes) == {("torch.uint8", 4), ("torch.float32", 2)}


def _exact(group):
    full = torch.empty(group.numel)
    group.links.gather.all_gather(full, group.store).wait()
    return full


# ------------------------------------------------------------------------ refusals


@ranks(4)
def test_what_cannot_be_is_refused(rank, world_size):
    with pytest.raises(ConfigError, match=r"zero_hpz_partition_size is 3: .*do not divide the 4 ranks"):
        initialize(model=mlp(), optimizer=adamw, config=hpz(3))
    with pytest.raises(ConfigError, match=r"zero_hpz_partition_size is 4: .*do not divide the 2 ranks"):
        initialize(model=mlp(), optimizer=adamw, config=hpz(4, mics_shard_size=2))
    for stage in (0, 1, 2):
        with pytest.raises(ConfigError, match=r"zero_hpz_partition_size is 2: .*only stage 3"):
            initialize(model=mlp(), optimizer=adamw, config=zero_config(stage, zero_hpz_partition_size=2))
