"""`GatheredParameters`: whole values for a while; an edit reaches the masters on every rank or is an error on all."""

import io
import pickle
from typing import Any

import pytest
import torch
from torch import nn

from fullspeed import zero
from fullspeed.base.errors import UsageError
from fullspeed.engine.initialize import initialize
from fullspeed.sharding.placeholder import is_sharded
from tests.models import LLAMA, mlp, stack, tiny_llama
from tests.parity.beside import difference, sgd, zero_config
from tests.ranks import ranks

PRELOAD = (LLAMA,)

HOME = ["held", "stage 3", "stage 3 bf16", "stage 2", "stage 1 bf16", "stage 0"]


def housed(home: str, rank: int) -> tuple[nn.Module, Any]:
    """A model under zero.Init (no engine), or one an engine runs."""
    model = stack(rank)
    if home == "held":
        zero.Init(module=model)
        return model, None
    half = {"bf16": {"enabled": True}} if home.endswith("bf16") else {}
    stage = int(home.split()[1])
    return model, initialize(model=model, optimizer=sgd, config=zero_config(stage) | half)[0]


def master_of(param: nn.Parameter, engine: Any) -> torch.Tensor:
    """What the optimizer steps, whole."""
    if engine is not None:
        found = zero.safe_get_full_fp32_param(param)
        assert found is not None
        return found
    with zero.GatheredParameters(param):
        return param.detach().clone()


@ranks(2)
@pytest.mark.parametrize("home", HOME)
def test_an_edit_of_every_rank_reaches_the_master(rank: int, world_size: int, home: str) -> None:  # I1
    model, engine = housed(home, rank)
    before = master_of(model.inner.weight, engine)
    untouched = master_of(model.outer.weight, engine)
    with zero.GatheredParameters(model.inner.weight):
        assert model.inner.weight.shape == (6, 5)
        model.inner.weight.data.fill_(0.5)  # a write torch does not count
        with torch.no_grad():
            model.inner.weight[0] = 2.0
    after = master_of(model.inner.weight, engine)
    assert not torch.equal(before, after)
    assert after[0].unique().tolist() == [2.0]
    assert after[1:].unique().tolist() == [0.5]
    assert torch.equal(master_of(model.outer.weight, engine), untouched)  # not rounded by the way


@ranks(2)
@pytest.mark.parametrize("home", HOME)
def test_one_ranks_edit_needs_modifier_rank(rank: int, world_size: int, home: str) -> None:  # I1
    model, engine = housed(home, rank)
    before = master_of(model.inner.weight, engine)

    def edit_alone() -> None:
        with zero.GatheredParameters(model.inner.weight):
            if rank == 1:
                model.inner.weight.data.add_(1)

    with pytest.raises(UsageError, match=r"weight \(edited on rank 1\).*modifier_rank"):
        edit_alone()
    assert torch.equal(master_of(model.inner.weight, engine), before)
    with zero.GatheredParameters(model.inner.weight, modifier_rank=1):
        model.inner.weight.data.fill_(float(rank))
    assert master_of(model.inner.weight, engine).unique().tolist() == [1.0]


@ranks(2)
@pytest.mark.parametrize("home", HOME)
def test_reading_changes_nothing(rank: int, world_size: int, home: str) -> None:
    model, engine = housed(home, rank)
    before = [master_of(param, engine) for param in model.parameters()]
    with zero.GatheredParameters(model.parameters()):
        values = [param.detach().clone() for param in model.parameters()]
        assert not any(is_sharded(param) for param in model.parameters())
    for was, value, param in zip(before, values, model.parameters(), strict=True):
        assert torch.equal(was.to(value.dtype).to(torch.bfloat16), value.to(torch.bfloat16))
        assert torch.equal(master_of(param, engine), was)


@ranks(4)
def test_edits_land_in_every_ranks_shard(rank: int, world_size: int) -> None:
    model, engine = housed("stage 3", rank)
    wanted = torch.arange(30.0).view(6, 5)
    with zero.GatheredParameters([model.inner.weight], modifier_rank=3):
        if rank == 3:
            model.inner.weight.data.copy_(wanted)
    assert torch.equal(master_of(model.inner.weight, engine), wanted)


@ranks(2)
@pytest.mark.parametrize("home", ["held", "stage 3"])
def test_what_may_be_passed(rank: int, world_size: int, home: str) -> None:
    model, _ = housed(home, rank)
    weight = model.inner.weight
    for given in (weight, [weight], (p for p in [weight]), {"a": weight}, [[weight], [weight]], {weight}, [weight] * 3):
        with zero.GatheredParameters(given):
            assert not is_sharded(weight)
        assert is_sharded(weight)
    for nothing in ([], None, torch.ones(2), [torch.ones(2), None, 3], nn.Parameter(torch.ones(2)), iter(())):
        with zero.GatheredParameters(nothing, modifier_rank=0):
            assert is_sharded(weight)
    with zero.GatheredParameters(weight, enabled=False):
        assert is_sharded(weight)


@ranks(2)
@pytest.mark.parametrize("home", ["held", "stage 3"])
def test_nested_contexts(rank: int, world_size: int, home: str) -> None:  # I3
    model, engine = housed(home, rank)
    weight = model.inner.weight
    with zero.GatheredParameters(weight):
        with zero.GatheredParameters([weight, model.outer.weight]):
            weight.data.fill_(1.0)
        assert not is_sharded(weight)
        assert is_sharded(model.outer.weight)
        weight.data.add_(1.0)
    assert is_sharded(weight)
    assert master_of(weight, engine).unique().tolist() == [2.0]


@ranks(2)
@pytest.mark.parametrize("home", ["held", "stage 3"])
def test_an_exception_inside_drops_edits_and_shards_again(rank: int, world_size: int, home: str) -> None:
    model, engine = housed(home, rank)
    before = master_of(model.inner.weight, engine)

    def fail_inside() -> None:
        with zero.GatheredParameters(model.inner.weight), torch.no_grad():
            model.inner.weight.data.zero_()
            model.inner.weight.zero_()  # a write torch counts
            raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        fail_inside()
    assert is_sharded(model.inner.weight)
    assert torch.equal(master_of(model.inner.weight, engine), before)


@ranks(2)
def test_a_new_parameter_assigned_inside_survives(rank: int, world_size: int) -> None:
    model = tiny_llama(rank)
    zero.Init(module=model)
    with zero.GatheredParameters(model.lm_head.weight, modifier_rank=0):
        model.lm_head.weight = nn.Parameter(torch.full((61, 32), 3.0))
    assert model.lm_head.weight.unique().tolist() == [3.0]
    engine, *_ = initialize(model=model, optimizer=sgd, config=zero_config(3))
    assert zero.safe_get_full_fp32_param(model.lm_head.weight).unique().tolist() == [3.0]
    engine.destroy()


@ranks(2)
@pytest.mark.parametrize("modifier_rank", [None, 0])
def test_embedding_resize_as_transformers_does_it(rank: int, world_size: int, modifier_rank: int | None) -> None:
    """New embeddings are filled from the old ones inside the context, then take their place."""
    model, reference = tiny_llama(rank), tiny_llama(0)
    zero.Init(module=model)
    old = model.model.embed_tokens
    new = nn.Embedding(70, 32)
    nn.init.zeros_(new.weight)
    with zero.GatheredParameters([old.weight, new.weight], modifier_rank=modifier_rank):
        if modifier_rank is None or rank == modifier_rank:
            new.weight.data[:61] = old.weight.data
        old.weight.data = new.weight.data
        old.num_embeddings = 70
    assert old.weight.shape == (70, 32)
    with zero.GatheredParameters(old.weight):
        assert torch.equal(old.weight[:61], reference.model.embed_tokens.weight)
        assert old.weight[61:].abs().sum() == 0


@ranks(2)
@pytest.mark.parametrize("home", ["stage 3", "stage 1"])
def test_setting_data_of_an_engines_parameter(rank: int, world_size: int, home: str) -> None:
    model, engine = housed(home, rank)
    weight = model.inner.weight
    with zero.GatheredParameters(weight):
        weight.data = torch.full((6, 5), 4.0)
    assert master_of(weight, engine).unique().tolist() == [4.0]
    with pytest.raises(UsageError, match=r"inner\.weight.*before initialize"), zero.GatheredParameters(weight):
        weight.data = torch.zeros(7, 5)


@ranks(2)
@pytest.mark.parametrize("stage", [0, 1, 2, 3])
def test_training_goes_on_from_the_edit(rank: int, world_size: int, stage: int) -> None:
    model, reference = mlp(rank), mlp(0)
    engine, *_ = initialize(model=model, optimizer=sgd, config=zero_config(stage))
    optimizer = sgd(reference.parameters())
    x = torch.randn(4, 5, generator=torch.Generator().manual_seed(3))
    for step in range(4):
        engine.backward(engine(x).square().mean())
        engine.step()
        reference(x).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()
        with zero.GatheredParameters(model.parameters(), modifier_rank=0 if step % 2 else None):
            for each in (model, reference):
                each[0].weight.data.clamp_(-0.2, 0.2)
    engine.destroy()
    assert max(difference(model, reference).values()) < 1e-6


@ranks(2)
def test_inside_a_forward(rank: int, world_size: int) -> None:
    class Normed(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.first, self.second = nn.Linear(5, 5), nn.Linear(5, 5)
            self.norms: list[float] = []

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            with zero.GatheredParameters(self.second.weight):
                self.norms.append(self.second.weight.detach().norm().item())
            return self.second(self.first(x))

    torch.manual_seed(rank)
    model = Normed()
    engine, *_ = initialize(model=model, optimizer=sgd, config=zero_config(3))
    for _ in range(2):
        engine.backward(engine(torch.ones(4, 5)).sum())
        engine.step()
    assert model.norms[0] != model.norms[1]
    engine.destroy()


@ranks(2)
def test_generating_with_everything_whole_gathers_nothing(rank: int, world_size: int) -> None:
    from fullspeed.comm import CommRecorder, observing

    model, reference = tiny_llama(rank), tiny_llama(0)
    engine, *_ = initialize(model=model, optimizer=sgd, config=zero_config(3))
    tokens = torch.arange(6)[None]
    recorder = CommRecorder()
    with zero.unwrap_model_for_generation(engine):
        with observing(recorder):
            found = model.generate(tokens, max_new_tokens=4 + rank, do_sample=False, pad_token_id=0)
        assert "all_gather" not in recorder.counts()
    assert torch.equal(found, reference.generate(tokens, max_new_tokens=4 + rank, do_sample=False, pad_token_id=0))
    engine.destroy()


@ranks(2)
def test_compatible_attributes(rank: int, world_size: int) -> None:
    model, engine = housed("stage 3", rank)
    weight: Any = model.inner.weight
    assert zero.is_zero_param(weight)
    assert (weight.ds_shape, weight.ds_numel) == (torch.Size((6, 5)), 30)
    assert weight.ds_status is zero.ZeroParamStatus.NOT_AVAILABLE
    assert len({param.ds_id for param in model.parameters()}) == len(list(model.parameters()))
    assert weight.ds_tensor.ds_numel == weight.partition_numel() == weight.ds_summary()["shard_numel"]
    weight.all_gather()
    assert weight.ds_status is zero.ZeroParamStatus.AVAILABLE
    assert weight.detach().numel() == 30
    weight.partition()
    assert weight.ds_status is zero.ZeroParamStatus.NOT_AVAILABLE
    engine.destroy()
    assert not zero.is_zero_param(weight)
    assert not zero.is_zero_param(torch.ones(2))


def test_without_ranks_and_engine_it_is_transparent() -> None:
    layer = nn.Linear(2, 2)
    with zero.GatheredParameters(layer.parameters(), modifier_rank=0):
        layer.weight.data.fill_(1.0)
    assert layer.weight.unique().tolist() == [1.0]


@ranks(2)
@pytest.mark.parametrize("home", ["held", "stage 3", "stage 3 bf16"])
def test_whole_values_can_be_pickled(rank: int, world_size: int, home: str) -> None:
    """A copy takes along what the user put on the parameter, and nothing of the engine's."""
    model, engine = housed(home, rank)
    weight, expected = model.inner.weight, master_of(model.inner.weight, engine)
    if home.endswith("bf16"):
        expected = expected.bfloat16().float()
    weight.tag = "mine"
    file = io.BytesIO()
    with zero.GatheredParameters(weight):
        copy = pickle.loads(pickle.dumps(weight))
        torch.save(weight, file)
    file.seek(0)
    for loaded in (copy, torch.load(file, weights_only=False)):
        assert type(loaded) is nn.Parameter
        assert torch.equal(loaded.float(), expected)
        assert vars(loaded) == {"tag": "mine"}
    assert is_sharded(weight)


@ranks(2)
@pytest.mark.parametrize("home", ["held", "stage 3", "stage 3 bf16"])
def test_arrays_keep_the_values_they_were_given(rank: int, world_size: int, home: str) -> None:
    """numpy shares memory for good: the parameter goes on elsewhere, trained and gathered as ever."""
    model, engine = housed(home, rank)
    weight = model.inner.weight
    with zero.GatheredParameters(weight):
        array = weight.detach().float().numpy() if home.endswith("bf16") else weight.detach().numpy()
        values = array.copy()
    assert is_sharded(weight)
    arrays, losses = [], []
    if engine is not None:
        handle = model.inner.register_forward_hook(
            lambda *_: arrays.append(model.inner.weight.detach().float().numpy())
        )
        for _ in range(2):
            loss = engine(torch.ones(2, 5)).square().mean()
            engine.backward(loss)
            engine.step()
            losses.append(loss.item())
        handle.remove()
        other, plain = housed(home, rank)
        for expected in losses:
            loss = plain(torch.ones(2, 5)).square().mean()
            assert loss.item() == expected
            plain.backward(loss)
            plain.step()
        assert torch.equal(master_of(weight, engine), master_of(other.inner.weight, plain))
        assert not (arrays[0] == arrays[1]).all()
    assert (array == values).all()
