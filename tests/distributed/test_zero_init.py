"""Models built with `zero.Init`: every way to build, read, change, copy and take over sharded parameters."""

import copy
import gc
import io
import weakref
from typing import Any

import pytest
import torch
from torch import nn

from fullspeed import zero
from fullspeed.base.errors import ConfigError, UsageError
from fullspeed.comm import all_gather_object
from fullspeed.engine.initialize import initialize
from fullspeed.sharding.holder import ShardHolder
from fullspeed.sharding.placeholder import is_sharded, owner_of
from tests.models import LLAMA, Stack, mlp, stack, tiny_llama
from tests.parity.beside import Pair, difference, sgd, zero_config
from tests.ranks import ranks

PRELOAD = (LLAMA,)


def value_of(param: torch.Tensor) -> torch.Tensor:
    """A whole copy, on every rank."""
    with zero.GatheredParameters(param):
        return param.detach().clone()


def all_sharded(model: nn.Module) -> bool:
    return all(is_sharded(param) for param in model.parameters())


def built(make: Any, rank: int, **kwargs: Any) -> Any:
    """What `make(seed)` gives inside the context; ranks above 0 draw other values, rank 0's must win."""
    with zero.Init(**kwargs):
        return make(rank)


def train(model: nn.Module, stage: int, **config: Any) -> Any:
    return initialize(model=model, optimizer=sgd, config=zero_config(stage) | config)[0]


# ------------------------------------------------------------------ building


@ranks(1, 2, 4)
def test_rank_zeros_values_win_and_shape_dtype_names_stay(rank: int, world_size: int) -> None:
    model, reference = built(stack, rank), stack(0)
    assert all_sharded(model)
    for (name, param), (wanted, other) in zip(model.named_parameters(), reference.named_parameters(), strict=True):
        assert (name, param.shape, param.dtype) == (wanted, other.shape, other.dtype)
        assert isinstance(param, nn.Parameter)
        assert torch.equal(value_of(param), other)


@ranks(2)
def test_each_rank_keeps_its_share_only(rank: int, world_size: int) -> None:
    with zero.Init():
        layer = nn.Linear(64, 64, bias=False)
    group, _ = owner_of(layer.weight).place_of(layer.weight)  # type: ignore[union-attr]
    assert group.store.numel() == 64 * 64 // 2
    assert group.full.untyped_storage().nbytes() == 0
    assert layer.weight.ds_tensor.numel() == 64 * 64 // 2  # type: ignore[attr-defined]


@ranks(2)
def test_parameters_are_sharded_as_soon_as_their_module_is_complete(rank: int, world_size: int) -> None:
    whole: list[int] = []

    class Watched(nn.Linear):
        def __init__(self) -> None:
            super().__init__(4, 4)
            whole.append(sum(not is_sharded(param) for layer in made for param in layer.parameters()))
            made.append(self)

    made: list[nn.Module] = []
    with zero.Init():
        layers = nn.ModuleList([Watched() for _ in range(5)])  # none has a parent while they are made
    assert max(whole) <= 2  # at most the one before is still whole
    assert all_sharded(layers)


@ranks(2)
def test_a_constructor_sees_its_own_parameters_whole(rank: int, world_size: int) -> None:
    class Scaled(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.scale = nn.Parameter(torch.ones(3))
            self.inner = nn.Linear(3, 3)
            assert not is_sharded(self.scale)
            with torch.no_grad():
                self.scale.mul_(float(self.scale.sum()))
                self.inner.weight.fill_(2.0)  # complete already: an operation on shards

    model = built(lambda seed: Scaled(), rank)
    assert value_of(model.scale).tolist() == [3.0] * 3
    assert value_of(model.inner.weight).unique().tolist() == [2.0]


@ranks(2)
def test_ways_to_define_a_class(rank: int, world_size: int) -> None:
    with zero.Init():

        class Inside(nn.Module):
            def __init__(self) -> None:
                super().__init__()
                self.first, self.act = nn.Linear(2, 2), lambda x: nn.functional.relu(x)

        dynamic = type("Dynamic", (Inside,), {})
        inside, late = Inside(), dynamic()
        setattr(inside, "second", nn.Linear(2, 3))  # noqa: B010 - attached after construction
        inside.register_parameter("bare", nn.Parameter(torch.zeros(5)))
        inside.blocks = nn.ModuleDict({"a": nn.Linear(2, 2)})
        inside.blocks["b"] = nn.Linear(2, 2)
    assert all_sharded(inside)
    assert all_sharded(late)
    assert len(list(inside.parameters())) == 9


@ranks(2)
def test_nested_contexts_and_reentry_shard_once(rank: int, world_size: int) -> None:  # I3
    context = zero.Init()
    with context, zero.Init():
        first = nn.Linear(3, 3)
    with context:
        second = nn.Linear(3, 3)
    assert all_sharded(first)
    assert all_sharded(second)
    assert owner_of(first.weight) is not owner_of(second.weight)
    after = nn.Linear(3, 3)
    assert not is_sharded(after.weight)


@ranks(2)
def test_initialize_inside_the_context(rank: int, world_size: int) -> None:  # I3
    with zero.Init():
        model = stack(rank)
        engine = train(model, 3)
        engine.backward(engine(torch.ones(4, 5)).sum())
        engine.step()
    assert all(param in engine.runtime.slot_of for param in model.parameters())
    engine.destroy()


@ranks(2)
def test_not_enabled_does_nothing(rank: int, world_size: int) -> None:
    with zero.Init(enabled=False):
        layer = nn.Linear(3, 3)
    assert not is_sharded(layer.weight)


@ranks(2)
def test_an_exception_in_a_constructor_leaves_nothing_behind(rank: int, world_size: int) -> None:
    class Broken(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.weight = nn.Parameter(torch.ones(3))
            raise ValueError("no")

    with pytest.raises(ValueError, match="no"), zero.Init():
        Broken()
    assert not is_sharded(nn.Linear(2, 2).weight)
    assert all_sharded(built(mlp, rank))


@ranks(2)
def test_converting_a_module_that_exists(rank: int, world_size: int) -> None:
    model = mlp(rank)
    ids = [id(param) for param in model.parameters()]
    zero.Init(module=model)
    assert all_sharded(model)
    assert [id(param) for param in model.parameters()] == ids
    with torch.no_grad():
        assert torch.equal(model(torch.ones(2, 5)), mlp(0)(torch.ones(2, 5)))


@ranks(2)
@pytest.mark.parametrize("config", [{"train_batch_size": "auto"}, {"zero_optimization": {"stage": 3}}, {}])
def test_a_configuration_needs_no_batch_keys(rank: int, world_size: int, config: dict[str, Any]) -> None:  # A6
    with zero.Init(config_dict_or_path=config):
        layer = nn.Linear(3, 3)
    assert is_sharded(layer.weight)


@ranks(2)
def test_a_faulty_configuration_is_refused(rank: int, world_size: int) -> None:
    with pytest.raises(ConfigError, match="zero_optimisation"):
        zero.Init(config={"zero_optimisation": {"stage": 3}})
    with pytest.raises(UsageError, match="remote_device"):
        zero.Init(remote_device="nvme")


@ranks(2)
def test_tied_and_shared_modules(rank: int, world_size: int) -> None:
    model = built(lambda seed: tiny_llama(seed, is_tied=True), rank)
    assert model.lm_head.weight is model.model.embed_tokens.weight
    reference = tiny_llama(0, is_tied=True)
    tokens = torch.arange(8)[None]
    with torch.no_grad():
        assert torch.equal(model(input_ids=tokens).logits, reference(input_ids=tokens).logits)


@ranks(2)
def test_lazy_and_empty_parameters(rank: int, world_size: int) -> None:
    with zero.Init():
        lazy, empty = nn.LazyLinear(3), nn.ParameterList([nn.Parameter(torch.empty(0, 4))])
    assert not is_sharded(lazy.weight)
    assert empty[0].shape == (0, 4)
    assert lazy(torch.ones(2, 5)).shape == (2, 3)


# --------------------------------------------------------------------- dtypes


@ranks(2)
def test_dtype_of_parameters_and_of_tensors_made_without_one(rank: int, world_size: int) -> None:  # I5
    with zero.Init(dtype=torch.bfloat16):
        layer = nn.Linear(3, 3)
        made = {"zeros": torch.zeros(2), "arange": torch.arange(0.0, 1.0, 0.5), "full": torch.full((2,), 1.5)}
        counted, chosen = torch.arange(4), torch.ones(2, dtype=torch.float64)
        legacy = torch.Tensor([4])
    assert layer.weight.dtype is torch.bfloat16
    assert {tensor.dtype for tensor in made.values()} == {torch.bfloat16}
    assert counted.dtype is torch.int64
    assert chosen.dtype is torch.float64  # said explicitly
    assert legacy.tolist() == [4.0]
    assert torch.zeros(1).dtype is torch.float32


@ranks(2)
def test_dtype_comes_from_the_configuration(rank: int, world_size: int) -> None:
    with zero.Init(config_dict_or_path={"bf16": {"enabled": True}}):
        half = nn.Linear(3, 3)
    with zero.Init(config_dict_or_path={}):
        full = nn.Linear(3, 3)
    assert (half.weight.dtype, full.weight.dtype) == (torch.bfloat16, torch.float32)


@ranks(2)
def test_other_threads_are_not_touched(rank: int, world_size: int) -> None:
    import threading

    seen: list[Any] = []

    def work() -> None:
        layer = nn.Linear(2, 2)
        seen.extend([layer.weight.dtype, is_sharded(layer.weight)])

    with zero.Init(dtype=torch.float16):
        thread = threading.Thread(target=work)
        thread.start()
        thread.join()
    assert seen == [torch.float32, False]


# ---------------------------------------------------- operations without engine


@ranks(2)
def test_a_forward_without_an_engine(rank: int, world_size: int) -> None:  # I8
    model = built(mlp, rank)
    x = torch.ones(2, 5)
    with torch.no_grad():
        assert torch.equal(model(x), mlp(0)(x))
    with pytest.raises(UsageError, match=r"zero\.Init.*initialize"):
        model(x)
    assert all_sharded(model)


@ranks(2)
def test_init_functions_after_the_context(rank: int, world_size: int) -> None:  # I6
    model = built(mlp, rank)
    nn.init.constant_(model[0].weight, 3.0)
    nn.init.normal_(model[2].weight)  # ranks draw alike or not: rank 0's values win
    assert value_of(model[0].weight).unique().tolist() == [3.0]
    drawn = value_of(model[2].weight)
    assert drawn.unique().numel() == drawn.numel()
    rows = all_gather_object(drawn.tolist())
    assert all(row == rows[0] for row in rows)


@ranks(2)
def test_apply_inside_and_after_construction(rank: int, world_size: int) -> None:
    def ones(module: nn.Module) -> None:
        if isinstance(module, nn.Linear):
            module.weight.data.fill_(1.0)
            module.bias.data.zero_()

    class Applied(Stack):
        def __init__(self) -> None:
            super().__init__()
            self.apply(ones)

    for model in (built(lambda seed: Applied(), rank), built(stack, rank).apply(ones)):
        assert value_of(model.inner.weight).unique().tolist() == [1.0]
        assert value_of(model.outer.bias).unique().tolist() == [0.0]


@ranks(2)
@pytest.mark.parametrize("way", ["mul_", "data", "row", "copy_", "setitem", "detach", "slice of data", "foreach"])
def test_an_edit_is_never_lost(rank: int, world_size: int, way: str) -> None:
    weight = built(lambda seed: nn.Linear(4, 6), rank).weight
    expected = value_of(weight)
    with torch.no_grad():
        if way == "mul_":
            weight.mul_(2)
            expected.mul_(2)
        elif way == "data":
            weight.data.add_(1)
            expected.add_(1)
        elif way == "row":
            weight[2].zero_()
            expected[2].zero_()
        elif way == "copy_":
            weight.copy_(torch.full((6, 4), 5.0))
            expected.fill_(5.0)
        elif way == "setitem":
            weight[1, 2] = 7.0
            expected[1, 2] = 7.0
        elif way == "detach":
            weight.detach().sub_(1)
            expected.sub_(1)
        elif way == "slice of data":
            weight.data[3][1:].fill_(9.0)
            expected[3][1:] = 9.0
        else:
            torch._foreach_add_([weight], 3.0)
            expected.add_(3.0)
    assert torch.equal(value_of(weight), expected)
    assert is_sharded(weight)


@ranks(2)
def test_reading_gives_ordinary_tensors(rank: int, world_size: int) -> None:
    weight, reference = built(mlp, rank)[0].weight, mlp(0)[0].weight
    with torch.no_grad():
        assert torch.equal(weight + 0, reference)
        assert weight.sum().item() == reference.sum().item()
        assert torch.equal(torch.cat([weight, weight]), torch.cat([reference, reference]))
        assert torch.equal(weight.clone(), reference)
        assert weight.tolist() == reference.tolist()
        assert weight.norm().item() == reference.norm().item()
    assert "values in shards" in repr(weight)


@ranks(2)
@pytest.mark.parametrize("way", ["numpy", "data_ptr", "untyped_storage"])
def test_pointing_at_freed_memory_is_refused(rank: int, world_size: int, way: str) -> None:
    weight = built(mlp, rank)[0].weight
    with pytest.raises(UsageError, match="GatheredParameters"):
        getattr(weight.detach(), way)()


@ranks(2)
def test_a_view_that_outlives_its_parameter(rank: int, world_size: int) -> None:
    model = built(mlp, rank)
    view = model[0].weight.data
    engine = train(model, 3)
    with pytest.raises(UsageError, match="outlived"):
        view.add_(1)
    engine.destroy()


@ranks(2)
@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16, torch.float32])  # the last is what it has
def test_changing_the_dtype_of_the_model(rank: int, world_size: int, dtype: torch.dtype) -> None:
    model = built(mlp, rank).to(dtype)
    assert all_sharded(model)
    assert {param.dtype for param in model.parameters()} == {dtype}
    assert torch.equal(value_of(model[0].weight), mlp(0)[0].weight.to(dtype))


@ranks(2)
def test_setting_data_of_another_shape(rank: int, world_size: int) -> None:
    layer = built(lambda seed: nn.Embedding(10, 4), rank)
    old = value_of(layer.weight)
    bigger = torch.cat([old, torch.zeros(3, 4)])
    layer.weight.data = bigger
    assert layer.weight.shape == (13, 4)
    assert is_sharded(layer.weight)
    assert torch.equal(value_of(layer.weight), bigger)


@ranks(2)
def test_deepcopy_is_sharded_and_independent(rank: int, world_size: int) -> None:
    model = built(lambda seed: tiny_llama(seed, is_tied=True), rank)
    twin = copy.deepcopy(model)
    assert all_sharded(twin)
    assert twin.lm_head.weight is twin.model.embed_tokens.weight
    nn.init.zeros_(twin.model.norm.weight)
    assert value_of(twin.model.norm.weight).unique().tolist() == [0.0]
    assert value_of(model.model.norm.weight).unique().tolist() == [1.0]


@ranks(2)
def test_torch_save_writes_whole_values(rank: int, world_size: int) -> None:
    model, reference = built(mlp, rank), mlp(0)
    for saved in (model.state_dict(), dict(model.named_parameters())):
        buffer = io.BytesIO()
        torch.save(saved, buffer)
        buffer.seek(0)
        loaded = torch.load(buffer)
        assert all(torch.equal(loaded[name], value) for name, value in reference.state_dict().items())


@ranks(2)
def test_state_dict_and_load_state_dict(rank: int, world_size: int) -> None:
    model, other = built(mlp, rank), mlp(5)
    assert {name: tensor.shape for name, tensor in model.state_dict().items()} == {
        name: tensor.shape for name, tensor in other.state_dict().items()
    }
    assert model.load_state_dict(other.state_dict()).missing_keys == []
    assert max(difference_to(model, other)) == 0.0
    with pytest.raises(RuntimeError, match="size mismatch"):
        model.load_state_dict({**other.state_dict(), "0.weight": torch.zeros(2, 2)})


def difference_to(model: nn.Module, other: nn.Module) -> list[float]:
    with zero.GatheredParameters(model.parameters()):
        return list(difference(model, other).values())


@ranks(2)
def test_nothing_keeps_a_dropped_model_alive(rank: int, world_size: int) -> None:
    model = built(mlp, rank)
    holder, param = weakref.ref(owner_of(model[0].weight)), weakref.ref(model[0].weight)  # type: ignore[arg-type]
    assert isinstance(holder(), ShardHolder)
    del model
    gc.collect()
    assert holder() is None
    assert param() is None


# ------------------------------------------------------------------ an engine


@ranks(1, 2, 4)
@pytest.mark.parametrize("stage", [0, 1, 2, 3])
def test_training_equals_a_model_built_ordinarily(rank: int, world_size: int, stage: int) -> None:
    models = [built(stack, rank), stack(0)]
    Pair(rank, world_size, lambda seed: models.pop(0), zero_config(stage)).train().check()


@ranks(2)
@pytest.mark.parametrize("precision", ["fp16", "bf16"])
def test_training_in_16_bits(rank: int, world_size: int, precision: str) -> None:
    config = {precision: {"enabled": True}}
    losses = []
    for model in (stack(0), built(stack, rank, dtype=torch.float32)):
        engine = train(model, 3, **config)
        for _ in range(3):
            loss = engine(torch.ones(4, 5)).float().square().mean()
            engine.backward(loss)
            engine.step()
        losses.append(loss.item())
        engine.destroy()
    assert losses[0] == losses[1]


@ranks(2)
def test_frozen_parameters_and_optimizer_made_before(rank: int, world_size: int) -> None:
    model, reference = built(stack, rank), stack(0)
    for each in (model, reference):
        each.inner.requires_grad_(False)
    optimizer = torch.optim.SGD([param for param in model.parameters() if param.requires_grad], lr=0.1)
    engine, *_ = initialize(model=model, optimizer=optimizer, config=zero_config(3))
    plain = torch.optim.SGD([param for param in reference.parameters() if param.requires_grad], lr=0.1)
    x = torch.randn(4, 5, generator=torch.Generator().manual_seed(1))
    for _ in range(3):
        engine.backward(engine(x).square().mean())
        engine.step()
        reference(x).square().mean().backward()
        plain.step()
        plain.zero_grad()
    engine.destroy()
    assert max(difference(model, reference).values()) < 1e-6


@ranks(2)
def test_evaluation_engine_without_an_optimizer(rank: int, world_size: int) -> None:
    model = built(mlp, rank)
    engine, optimizer, *_ = initialize(model=model, config=zero_config(3))
    assert optimizer is None
    with torch.no_grad():
        assert torch.equal(engine(torch.ones(2, 5)), mlp(0)(torch.ones(2, 5)))
    engine.destroy()
    assert not is_sharded(model[0].weight)


@ranks(2)
def test_two_engines_take_parts_of_one_model(rank: int, world_size: int) -> None:
    model = built(mlp, rank)
    first, *_ = initialize(model=model[0], optimizer=sgd, config=zero_config(3))
    second, *_ = initialize(model=model[2], optimizer=sgd, config=zero_config(2))
    loss = second(torch.tanh(first(torch.ones(2, 5)))).sum()
    loss.backward()
    first.step()
    second.step()
    first.destroy()
    second.destroy()
    reference = mlp(0)
    optimizer = sgd(reference.parameters())
    reference(torch.ones(2, 5)).sum().backward()
    optimizer.step()
    assert max(difference(model, reference).values()) < 1e-6


@ranks(2)
def test_the_holders_memory_is_freed_when_an_engine_takes_over(rank: int, world_size: int) -> None:
    model = built(mlp, rank)
    holder = weakref.ref(owner_of(model[0].weight))  # type: ignore[arg-type]
    engine = train(model, 3)
    gc.collect()
    assert holder() is None
    engine.destroy()
