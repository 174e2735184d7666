"""A small Llama of transformers, random weights: trained with the engine it equals plain torch at every stage."""

from __future__ import annotations

import pytest
import torch

from fullspeed.engine.initialize import initialize
from fullspeed.sharding.access import safe_get_full_fp32_param
from tests.models import LLAMA, tiny_llama
from tests.parity.beside import Pair, causal, difference, sgd, tokens, zero_config
from tests.ranks import ranks

PRELOAD = (LLAMA,)

pytest.importorskip("transformers")

STAGES = (0, 1, 2, 3)


def _adamw(params):
    """A rate that suits a Llama, and an eps above the rounding of gradients: with a smaller one, an element whose
    gradient is nearly zero moves by rounding divided by rounding."""
    return torch.optim.AdamW(params, lr=1e-3, weight_decay=0.1, eps=1e-6)


def _pair(rank, world_size, config, optimizer=_adamw, **model):
    make = lambda seed: tiny_llama(seed, **model)  # noqa: E731
    return Pair(rank, world_size, make, config, optimizer, loss=causal, batches=tokens)


@ranks(1, 2, 4, timeout_s=150)
def test_ten_steps_equal_plain_torch(rank, world_size):
    """Stages 0 to 3; on two ranks also without accumulation and clipping, with SGD, eager attention, tied weights."""
    cases = (
        (1, 0.0, _adamw, {"attention": "eager"}),
        (3, 0.2, _adamw, {"attention": "sdpa"}),
        (3, 0.2, sgd, {"attention": "sdpa", "is_tied": True, "num_layers": 3}),
    )
    for stage in STAGES:
        for accum, clip, optimizer, model in cases:
            if world_size != 2 and (accum, optimizer) != (3, _adamw):
                continue
            pair = _pair(rank, world_size, zero_config(stage, accum=accum, clip=clip), optimizer, **model)
            groups = pair.engine.runtime.groups
            assert len(groups) >= model.get("num_layers", 2) + 2
            assert all(group.placement.params == (stage == 3) for group in groups)
            pair.train(10).check()
            if clip:
                assert min(pair.norms) > clip, "nothing was clipped"


@ranks(2, timeout_s=120)
def test_gradient_checkpointing_of_the_model(rank, world_size):
    """`model.gradient_checkpointing_enable()`, both kinds."""
    for stage in STAGES:
        for reentrant in (False, True):
            pair = _pair(rank, world_size, zero_config(stage, accum=2))
            pair.model.gradient_checkpointing_enable({"use_reentrant": reentrant})
            pair.model.enable_input_require_grads()
            pair.train(3).check()


@ranks(2, timeout_s=120)
def test_frozen_llama_with_a_trainable_head(rank, world_size):
    """Only the last layer and the head train."""

    def make(seed):
        model = tiny_llama(seed)
        model.requires_grad_(False)
        model.model.layers[1].requires_grad_(True)
        model.lm_head.requires_grad_(True)
        return model

    for stage in STAGES:
        pair = Pair(
            rank,
            world_size,
            make,
            zero_config(stage, accum=2),
            _adamw,
            groups=lambda module: [param for param in module.parameters() if param.requires_grad],
            loss=causal,
            batches=tokens,
        )
        pair.train(3).check()


@ranks(2, timeout_s=120)
def test_generation_between_steps(rank, world_size):
    """Greedy generation of different lengths on the ranks, under every stage, equal to the plain model's."""
    for stage in STAGES:
        pair = _pair(rank, world_size, zero_config(stage))
        for _ in range(2):
            pair.train(1)
            prompt = torch.arange(1, 4).view(1, 3) + rank
            options = {"max_new_tokens": 3 + 2 * rank, "min_new_tokens": 3 + 2 * rank, "do_sample": False}
            with torch.no_grad():
                mine = pair.engine.generate(prompt, **options)
                theirs = pair.reference.generate(prompt, **options)
            assert torch.equal(mine, theirs)
        pair.check()


@ranks(2, timeout_s=120)
def test_16_bit_llama(rank, world_size):
    """bf16 and fp16, masters after five updates: stages within 2e-4 of one another (gradients travel in 16 bits, and
    AdamW turns a last-bit difference of a tiny gradient into a part of lr = 1e-3), within 5e-3 of fp32."""
    exact = _masters(rank, world_size, zero_config(0))
    for name, section in (("bf16", {"enabled": True}), ("fp16", {"enabled": True, "loss_scale": 128})):
        results = [
            _masters(rank, world_size, zero_config(stage, reduce_bucket_size=10**4) | {name: section})
            for stage in STAGES
        ]
        for others in results[1:]:
            worst = max((results[0][fqn] - others[fqn]).abs().max().item() for fqn in others)
            assert worst <= 2e-4, (name, worst)
        drift = max((results[0][fqn] - exact[fqn]).abs().max().item() for fqn in exact)
        assert 0 < drift < 5e-3, (name, drift)


def _masters(rank, world_size, config):
    model = tiny_llama()
    engine, *_ = initialize(model=model, optimizer=_adamw, config=config)
    for step in range(5):
        engine.backward(causal(engine, tokens(world_size, step, 0)[rank]))
        engine.step()
    masters = {name: safe_get_full_fp32_param(param) for name, param in model.named_parameters()}
    engine.destroy()
    assert max(difference(model, tiny_llama()).values()) > 1e-3
    return masters
