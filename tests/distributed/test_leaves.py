"""Leaf modules under stage 3: entered once, everything inside is there, whichever experts a rank's tokens go to."""

from __future__ import annotations

import functools

import pytest
import torch
from torch import nn

from fullspeed.base.errors import UsageError
from fullspeed.engine.initialize import initialize
from fullspeed.sharding.leaves import (
    get_z3_leaf_modules,
    set_z3_leaf_module,
    set_z3_leaf_modules,
    unset_z3_leaf_modules,
    z3_leaf_module,
)
from tests.parity.beside import Pair, adamw, causal, tokens, vectors, zero_config
from tests.ranks import ranks

PRELOAD = ("transformers.models.mixtral.modeling_mixtral",)


class SparseBlock(nn.Module):
    """Sends each sample to the expert that its first feature names; notes which experts are whole meanwhile."""

    def __init__(self) -> None:
        super().__init__()
        self.gate = nn.Linear(6, 1)
        self.experts = nn.ModuleList(nn.Linear(6, 6) for _ in range(4))

    def forward(self, x, route):
        chosen = route % len(self.experts)
        return x + torch.tanh(self.experts[chosen](x)) * torch.sigmoid(self.gate(x))


class Routed(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.inner, self.outer = nn.Linear(5, 6), nn.Linear(6, 3)
        self.blocks = nn.ModuleList(SparseBlock() for _ in range(2))

    def forward(self, batch):
        x = self.inner(batch["x"])
        for depth, block in enumerate(self.blocks):
            x = block(x, batch["route"] + depth)
        return self.outer(x)


def routed(seed=0, *, is_marked=True):
    torch.manual_seed(seed)
    model = Routed()
    if is_marked:
        set_z3_leaf_modules(model, [SparseBlock])
    return model


def routes(world_size, step, micro):
    """Every rank takes experts of its own, others in the next step."""
    return [{"x": x, "route": rank + step} for rank, x in enumerate(vectors(world_size, step, micro))]


@ranks(2, 4)
def test_experts_of_different_ranks(rank, world_size):
    for is_marked in (True, False):
        make = functools.partial(routed, is_marked=is_marked)
        pair = Pair(rank, world_size, make, zero_config(3, accum=2), adamw, batches=routes)
        pair.train(2).check()


@ranks(2)
def test_a_leaf_is_gathered_once_as_a_whole(rank, world_size):
    """Its whole subtree, expert not taken included; by mark, and by configuration of the same name."""
    configured = {"leaf_module": {"classes": ["Routed.Absent", "SparseBlock"]}}
    for is_marked, extra in ((True, {}), (False, configured)):
        engine, *_ = initialize(model=routed(0, is_marked=is_marked), optimizer=adamw, config=zero_config(3, **extra))
        block = engine.module.blocks[0]
        groups = {engine.runtime.slot_of[param][0].index for param in block.parameters()}
        assert len(groups) == 1
        group = engine.runtime.groups[groups.pop()]
        seen = []
        block.gate.register_forward_pre_hook(lambda *_, group=group, seen=seen: seen.append(group.is_whole))
        with torch.no_grad():
            engine(routes(world_size, 0, 0)[rank])
        assert seen == [True]
        engine.destroy()


@ranks(2)
def test_marks_are_for_before_initialize(rank, world_size):
    """With an engine there they would change nothing, so they are refused; destroy gives the model back."""
    model = routed(0)
    for stage in (0, 3):
        engine, *_ = initialize(model=model, optimizer=adamw, config=zero_config(stage))
        assert get_z3_leaf_modules(engine) == list(model.blocks)
        calls = (
            lambda: set_z3_leaf_modules(model, [nn.Linear]),
            lambda: unset_z3_leaf_modules(model, [SparseBlock]),
            lambda: set_z3_leaf_module(model.outer, True),
        )
        for call in calls:
            with pytest.raises(UsageError, match="before initialize"):
                call()
        assert not z3_leaf_module(model.outer)
        engine.destroy()
    assert unset_z3_leaf_modules(model, [SparseBlock]) == list(model.blocks)


def mixtral(seed=0, *, mark=()):
    """Four experts, two of them for each token; as the class takes it, without the list of blocks that HF gives."""
    from transformers import MixtralConfig, MixtralForCausalLM

    torch.manual_seed(seed)
    model = MixtralForCausalLM(
        MixtralConfig(
            vocab_size=61, hidden_size=32, intermediate_size=24, num_hidden_layers=2, num_attention_heads=4,
            num_key_value_heads=2, num_local_experts=4, num_experts_per_tok=2, max_position_embeddings=32,
        )
    )  # fmt: skip
    if mark:
        set_z3_leaf_modules(model, list(mark))
    return model


def _adamw(params):
    """An eps above the rounding of gradients, for elements whose gradient is nearly zero."""
    return torch.optim.AdamW(params, lr=1e-3, weight_decay=0.1, eps=1e-6)


@ranks(2, timeout_s=120)
def test_mixtral_routes_tokens_of_each_rank_its_own_way(rank, world_size):
    """Its sparse blocks are leaves by default: units of their own inside each decoder layer."""
    pytest.importorskip("transformers")
    pair = Pair(rank, world_size, mixtral, zero_config(3, accum=2), _adamw, loss=causal, batches=tokens)
    layer = pair.model.model.layers[0]
    group_of = {name: pair.engine.runtime.slot_of[param][0] for name, param in layer.named_parameters()}
    experts = {group.index for name, group in group_of.items() if name.startswith("mlp.")}
    rest = {group.index for name, group in group_of.items() if not name.startswith("mlp.")}
    assert len(experts) == len(rest) == 1
    assert experts != rest
    chosen = []
    layer.mlp.gate.register_forward_hook(lambda module, args, output: chosen.append(output[2].flatten().tolist()))
    pair.train(3).check()
    everyone = [None] * world_size
    torch.distributed.all_gather_object(everyone, chosen)
    assert everyone[0] != everyone[1], "the ranks' tokens must go different ways for this test to say anything"


@ranks(2, timeout_s=120)
def test_mixtral_with_marks_of_the_users_own(rank, world_size):
    """Class names in code; the layer as a whole is then the leaf, experts and all."""
    pytest.importorskip("transformers")
    make = functools.partial(mixtral, mark=["MixtralDecoderLayer"])
    pair = Pair(rank, world_size, make, zero_config(3), _adamw, loss=causal, batches=tokens)
    layer = pair.model.model.layers[0]
    assert len({pair.engine.runtime.slot_of[param][0].index for param in layer.parameters()}) == 1
    pair.train(2).check()
