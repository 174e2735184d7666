"""LoRA adapters by PEFT, trained by Hugging Face's Trainer on the `deepspeed` module."""

from __future__ import annotations

import pathlib
from typing import Any

import torch

from tests.ranks import ranks

PRELOAD = ("transformers.trainer", "peft")


def trained_adapter(hf: Any, folder: pathlib.Path, config: dict[str, Any] | None) -> tuple[Any, list[float]]:
    """Train LoRA on a frozen model and save the adapter; the trainer and its losses."""
    from peft import LoraConfig, get_peft_model

    hf.forget_accelerate()
    args = hf.arguments(folder, config, max_steps=4, learning_rate=1e-2)
    torch.manual_seed(3)
    lora = LoraConfig(r=4, target_modules=["q_proj", "v_proj", "down_proj"], task_type="CAUSAL_LM")
    trainer = hf.make_trainer(get_peft_model(hf.tiny_llama(), lora), args)
    trainer.train()
    trainer.save_model(str(folder / "saved"))
    torch.distributed.barrier()
    return trainer, hf.logged(trainer, "loss")


@ranks(2, timeout_s=240)
def test_adapters_train_alike_at_every_stage_and_are_saved_whole(rank, world_size, tmp_path):
    from fullspeed.compat import activate

    activate()
    from peft import PeftModel
    from safetensors.torch import load_file

    from tests.integration import hugging_face as hf

    _, expected = trained_adapter(hf, tmp_path / "plain", None)
    plain = load_file(tmp_path / "plain" / "saved" / "adapter_model.safetensors")
    assert any("lora_B" in name and weight.any() for name, weight in plain.items())
    assert expected[-1] < expected[0]
    for stage in (0, 1, 2, 3):
        config = hf.auto_config(stage)
        del config["optimizer"], config["scheduler"]
        folder = tmp_path / str(stage)
        trainer, losses = trained_adapter(hf, folder, config)
        engine = trainer.model_wrapped
        assert engine.zero_optimization_stage() == stage
        frozen = [param for param in engine.module.parameters() if not param.requires_grad]
        assert frozen
        torch.testing.assert_close(torch.tensor(losses), torch.tensor(expected), rtol=0, atol=1e-5)
        saved = load_file(folder / "saved" / "adapter_model.safetensors")
        assert saved.keys() == plain.keys()
        for name in plain:
            torch.testing.assert_close(saved[name], plain[name], rtol=0, atol=1e-5)
        evaluated = trainer.evaluate()["eval_loss"]
        engine.destroy()
        hf.forget_accelerate()
        reloaded = PeftModel.from_pretrained(hf.tiny_llama(), folder / "saved")
        again = hf.make_trainer(reloaded, hf.arguments(folder, None)).evaluate()["eval_loss"]
        assert abs(again - evaluated) < 1e-5
