"""Runs of Hugging Face's Trainer that tests compare: a tiny random model on real text, with and without `deepspeed`.

Import it after `fullspeed.compat.activate()`: transformers and accelerate look for `deepspeed` when they are imported.
"""

from __future__ import annotations

import os
import pathlib
from typing import Any

import torch
from transformers import LlamaConfig, LlamaForCausalLM, Trainer, TrainingArguments

VOCABULARY, LENGTH = 128, 32
TEXT = pathlib.Path(torch.nn.__file__).read_bytes() + pathlib.Path(__file__).read_bytes()


class TextBlocks(torch.utils.data.Dataset):
    """Blocks of source text as bytes below 128, from `first` on."""

    def __init__(self, first: int, count: int) -> None:
        self.first, self.count = first, count

    def __len__(self) -> int:
        return self.count

    def __getitem__(self, index: int) -> dict[str, torch.Tensor]:
        if not 0 <= index < self.count:
            raise IndexError(index)
        begin = (self.first + index) * 16
        ids = torch.tensor([byte % VOCABULARY for byte in TEXT[begin : begin + LENGTH]])
        return {"input_ids": ids, "labels": ids.clone()}


def tiny_config(**changes: Any) -> LlamaConfig:
    values: dict[str, Any] = {
        "vocab_size": VOCABULARY,
        "hidden_size": 32,
        "intermediate_size": 64,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "max_position_embeddings": 64,
        "pad_token_id": 0,
        "bos_token_id": 1,
        "eos_token_id": 2,
    }
    return LlamaConfig(**values | changes)


def tiny_llama(seed: int = 0, **changes: Any) -> LlamaForCausalLM:
    torch.manual_seed(seed)
    return LlamaForCausalLM(tiny_config(**changes))


def auto_config(stage: int, **changes: Any) -> dict[str, Any]:
    """A configuration as Transformers' documentation has it: what it can fill in is "auto"."""
    zero: dict[str, Any] = {"stage": stage, "reduce_bucket_size": "auto", "overlap_comm": True}
    if stage == 3:
        zero |= {
            "stage3_prefetch_bucket_size": "auto",
            "stage3_param_persistence_threshold": "auto",
            "stage3_gather_16bit_weights_on_model_save": True,
        }
    return {
        "train_batch_size": "auto",
        "train_micro_batch_size_per_gpu": "auto",
        "gradient_accumulation_steps": "auto",
        "gradient_clipping": "auto",
        "fp16": {"enabled": "auto"},
        "bf16": {"enabled": "auto"},
        "zero_optimization": zero,
        "optimizer": {
            "type": "AdamW",
            "params": {"lr": "auto", "betas": "auto", "eps": "auto", "weight_decay": "auto"},
        },
        "scheduler": {
            "type": "WarmupDecayLR",
            "params": {
                "warmup_min_lr": "auto",
                "warmup_max_lr": "auto",
                "warmup_num_steps": "auto",
                "total_num_steps": "auto",
                "warmup_type": "linear",
            },
        },
        **changes,
    }


def arguments(folder: pathlib.Path | str, deepspeed: dict[str, Any] | None, **changes: Any) -> TrainingArguments:
    values: dict[str, Any] = {
        "output_dir": str(folder),
        "per_device_train_batch_size": 2,
        "per_device_eval_batch_size": 2,
        "gradient_accumulation_steps": 2,
        "max_steps": 6,
        "warmup_steps": 2,
        "learning_rate": 1e-3,
        "weight_decay": 0.1,
        "max_grad_norm": 0.5,
        "logging_steps": 1,
        "save_strategy": "no",
        "report_to": [],
        "use_cpu": not torch.cuda.is_available(),
        "disable_tqdm": True,
        "seed": 7,
        "deepspeed": deepspeed,
    }
    return TrainingArguments(**values | changes)


def make_trainer(model: Any, args: TrainingArguments, **more: Any) -> Trainer:
    return Trainer(model=model, args=args, train_dataset=TextBlocks(0, 64), eval_dataset=TextBlocks(64, 10), **more)


def logged(trainer: Trainer, key: str) -> list[float]:
    """What the trainer logged under `key`, in order."""
    return [entry[key] for entry in trainer.state.log_history if key in entry]


def forget_accelerate() -> None:
    """Let the next trainer or Accelerator of this process begin afresh, as in a new one."""
    from accelerate.state import AcceleratorState, GradientState

    AcceleratorState._reset_state(reset_partial_state=True)
    GradientState._reset_state()
    for name in [name for name in os.environ if name.startswith("ACCELERATE_")]:
        del os.environ[name]
