"""The systems the benchmark compares, each a function from one batch to its loss; settings on top."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

# Sizes are elements unless the name says otherwise.
MODEL: dict[str, Any] = {
    "num_hidden_layers": 6,
    "hidden_size": 512,
    "intermediate_size": 1536,
    "vocab_size": 8192,
    "num_attention_heads": 8,
    "num_key_value_heads": 8,
    "max_position_embeddings": 256,
    "tie_word_embeddings": False,
    "use_cache": False,
    "attn_implementation": "sdpa",
}
SEQUENCE_TOKENS = 256
MICRO_BATCH = 2
ADAMW: dict[str, Any] = {"lr": 3e-4, "betas": [0.9, 0.95], "eps": 1e-8, "weight_decay": 0.01}

# The `zero_optimization` section that FullSpeed and DeepSpeed get alike.
ZERO: dict[int, dict[str, Any]] = {
    0: {"stage": 0},
    1: {"stage": 1},
    2: {"stage": 2},
    3: {  # at most half of the model whole at any time
        "stage": 3,
        "stage3_max_live_parameters": 1.5e7,
        "stage3_prefetch_bucket_size": 4e6,
        "stage3_param_persistence_threshold": 1e4,
    },
}
FULLSPEED = tuple(f"fullspeed-{stage}" for stage in ZERO)
VARIANTS: dict[str, dict[str, Any]] = {"fullspeed-3:no-prefetch": {"stage3_prefetch_bucket_size": 0}}
DEEPSPEED = tuple(f"deepspeed-{stage}" for stage in ZERO)
TORCH = ("ddp", "fsdp2-keep", "fsdp2-reshard")


@dataclass
class Trainer:
    """What the timing loop needs from a system."""

    step: Callable[[Any], Any]  # one batch to its loss: forward, backward, optimizer
    held_bytes: Callable[[], dict[str, int]] = dict  # the system's own account of its memory


def build_model() -> Any:
    """The model, the same weights on every rank and in every system."""
    import torch
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(0)
    return LlamaForCausalLM(LlamaConfig(**MODEL))


def batches(rank: int, world_size: int) -> Iterator[Any]:
    """This rank's token ids (MICRO_BATCH, SEQUENCE_TOKENS), step after step.

    Low ids are frequent, so there is something to learn.
    """
    import torch

    generator = torch.Generator().manual_seed(1)
    while True:
        uniform = torch.rand(world_size, MICRO_BATCH, SEQUENCE_TOKENS, generator=generator)
        yield (uniform.pow(4) * MODEL["vocab_size"]).long()[rank]


def torch_trainer(kind: str, is_bf16: bool) -> Trainer:
    """Plain torch: `alone`, `ddp`, `fsdp2-keep` (ZeRO-2) or `fsdp2-reshard` (ZeRO-3)."""
    import torch
    from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
    from torch.nn.parallel import DistributedDataParallel

    model = build_model()
    if kind.startswith("fsdp2"):
        policy = MixedPrecisionPolicy(torch.bfloat16, torch.float32) if is_bf16 else MixedPrecisionPolicy()
        keep = {"reshard_after_forward": False} if kind == "fsdp2-keep" else {}
        for layer in model.model.layers:
            fully_shard(layer, mp_policy=policy, **keep)
        fully_shard(model, mp_policy=policy, **keep)
    if kind == "ddp":
        model = DistributedDataParallel(model, gradient_as_bucket_view=True)
    optimizer = torch.optim.AdamW(model.parameters(), fused=True, **ADAMW)
    use_autocast = is_bf16 and not kind.startswith("fsdp2")

    def step(tokens: Any) -> Any:
        with torch.autocast("cpu", torch.bfloat16, enabled=use_autocast):
            loss = model(input_ids=tokens, labels=tokens).loss
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        return loss

    return Trainer(step)


def engine_config(stage: int, is_bf16: bool) -> dict[str, Any]:
    """The JSON config, for either library."""
    return {
        "train_micro_batch_size_per_gpu": MICRO_BATCH,
        "gradient_clipping": 0.0,  # the default is 1.0, and the torch peers do not clip
        "steps_per_print": 1_000_000,
        "zero_optimization": ZERO[stage],
        "bf16": {"enabled": is_bf16},
    }


def fullspeed_trainer(stage: int, is_bf16: bool, zero: dict[str, Any]) -> Trainer:
    """FullSpeed with the optimizer named in its config; `zero` changes the section of its stage."""
    import fullspeed

    config = engine_config(stage, is_bf16) | {"optimizer": {"type": "AdamW", "params": ADAMW}}
    config["zero_optimization"] = config["zero_optimization"] | zero
    model = build_model()
    engine, *_ = fullspeed.initialize(model=model, model_parameters=model.parameters(), config=config)
    return Trainer(engine_step(engine), engine.memory_bytes)


def deepspeed_trainer(stage: int, is_bf16: bool) -> Trainer:
    """DeepSpeed with torch's fused AdamW, which is faster than what it would compile for itself."""
    import deepspeed
    import torch

    model = build_model()
    optimizer = torch.optim.AdamW(model.parameters(), fused=True, **ADAMW)
    engine, *_ = deepspeed.initialize(model=model, optimizer=optimizer, config=engine_config(stage, is_bf16))
    return Trainer(engine_step(engine))


def engine_step(engine: Any) -> Callable[[Any], Any]:
    """The three calls of a DeepSpeed engine as one step."""

    def step(tokens: Any) -> Any:
        loss = engine(input_ids=tokens, labels=tokens).loss
        engine.backward(loss)
        engine.step()
        return loss

    return step


def make_trainer(system: str) -> Trainer:
    """The system called `name`, `name-stage`, or either with `@bf16` behind it; or one of the variants."""
    name, _, dtype = system.partition("@")
    library, _, stage = name.partition(":")[0].partition("-")
    if library == "fullspeed":
        return fullspeed_trainer(int(stage), dtype == "bf16", VARIANTS.get(name, {}))
    if library == "deepspeed":
        return deepspeed_trainer(int(stage), dtype == "bf16")
    return torch_trainer(name, dtype == "bf16")
