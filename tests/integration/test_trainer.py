"""Hugging Face's Trainer on the `deepspeed` module: as without it, at every stage."""

from __future__ import annotations

import pathlib
from typing import Any

import torch

from tests.ranks import ranks

PRELOAD = ("transformers.trainer",)

Result = dict[str, Any]


def trained(hf: Any, folder: pathlib.Path, config: dict[str, Any] | None, **changes: Any) -> Result:
    """Train and evaluate a new model; what can be compared of it."""
    hf.forget_accelerate()
    trainer = hf.make_trainer(hf.tiny_llama(), hf.arguments(folder, config, **changes))
    trainer.train()
    evaluation = trainer.evaluate()
    predictions = trainer.predict(hf.TextBlocks(80, 3)).predictions
    trainer.save_model(str(folder / "saved"))
    return {
        "losses": hf.logged(trainer, "loss"),
        "norms": hf.logged(trainer, "grad_norm"),
        "eval_loss": evaluation["eval_loss"],
        "predictions": torch.from_numpy(predictions),
        "trainer": trainer,
    }


def saved_weights(folder: pathlib.Path) -> dict[str, torch.Tensor]:
    from safetensors.torch import load_file

    return load_file(folder / "saved" / "model.safetensors")


def check_alike(found: Result, expected: Result, tolerance: float = 1e-5) -> None:
    assert len(found["losses"]) == len(expected["losses"])
    for key in ("losses", "norms", "eval_loss"):
        torch.testing.assert_close(torch.tensor(found[key]), torch.tensor(expected[key]), rtol=0, atol=tolerance)
    torch.testing.assert_close(found["predictions"], expected["predictions"], rtol=0, atol=10 * tolerance)


@ranks(2, timeout_s=240)
def test_training_is_that_of_a_run_without_deepspeed(rank, world_size, tmp_path):
    from fullspeed.compat import activate

    activate()
    from tests.integration import hugging_face as hf

    expected = trained(hf, tmp_path / "plain", None)
    assert type(expected["trainer"].model_wrapped).__name__ == "DistributedDataParallel"
    assert expected["losses"][-1] < expected["losses"][0]
    for stage in (1, 2, 3):
        config = hf.auto_config(stage)
        del config["optimizer"], config["scheduler"]
        found = trained(hf, tmp_path / str(stage), config)
        engine = found["trainer"].model_wrapped
        assert engine.zero_optimization_stage() == stage
        assert engine.gradient_clipping() == 0.5
        assert engine.global_steps == 6
        check_alike(found, expected)
        torch.distributed.barrier()
        whole, plain = saved_weights(tmp_path / str(stage)), saved_weights(tmp_path / "plain")
        assert whole.keys() == plain.keys()
        for name in plain:
            torch.testing.assert_close(whole[name], plain[name], rtol=0, atol=1e-5)
        engine.destroy()


@ranks(2, timeout_s=240)
def test_a_run_resumes_where_it_was_saved(rank, world_size, tmp_path):
    from fullspeed.compat import activate

    activate()
    from tests.integration import hugging_face as hf

    for stage in (2, 3):
        config = hf.auto_config(stage)
        folder = tmp_path / str(stage)
        keep = {"save_strategy": "steps", "save_steps": 4, "eval_strategy": "steps", "eval_steps": 4}
        keep |= {"load_best_model_at_end": True, "greater_is_better": True}  # so that the last is not the best
        whole = trained(hf, folder, config, **keep)
        best = whole["trainer"].state.best_model_checkpoint
        assert best.endswith("checkpoint-4")
        at_best, at_end, afterwards = hf.logged(whole["trainer"], "eval_loss")
        assert at_end < at_best - 0.01
        assert abs(afterwards - at_best) < 1e-6
        whole["trainer"].model_wrapped.destroy()

        hf.forget_accelerate()
        resumed = hf.make_trainer(hf.tiny_llama(seed=1), hf.arguments(folder, config, **keep))
        resumed.train(resume_from_checkpoint=best)
        losses = hf.logged(resumed, "loss")
        torch.testing.assert_close(torch.tensor(losses), torch.tensor(whole["losses"]), rtol=0, atol=1e-6)
        assert len(losses) == 6
        resumed.model_wrapped.destroy()


@ranks(2, timeout_s=240)
def test_a_pretrained_model_is_built_in_shards_resized_evaluated_and_generates(rank, world_size, tmp_path):
    from fullspeed.compat import activate

    activate()
    from transformers import AutoModelForCausalLM

    from fullspeed.zero import GatheredParameters, is_zero_param
    from tests.integration import hugging_face as hf

    whole = hf.tiny_llama(tie_word_embeddings=True)
    if rank == 0:
        whole.save_pretrained(tmp_path / "pretrained")
    torch.distributed.barrier()
    config = hf.auto_config(3)
    del config["optimizer"], config["scheduler"]
    hf.forget_accelerate()
    # As in every script: arguments before the model, so that from_pretrained knows of ZeRO-3.
    args = hf.arguments(tmp_path / "out", config, max_steps=2)
    model = AutoModelForCausalLM.from_pretrained(tmp_path / "pretrained")
    assert all(is_zero_param(param) for param in model.parameters())
    for (name, param), (_, other) in zip(model.named_parameters(), whole.named_parameters(), strict=True):
        with GatheredParameters(param):
            assert torch.equal(param, other), name

    model.resize_token_embeddings(hf.VOCABULARY + 8, mean_resizing=False)
    assert model.get_input_embeddings().weight.shape == (hf.VOCABULARY + 8, 32)
    assert model.lm_head.weight is model.get_input_embeddings().weight
    with GatheredParameters(model.lm_head.weight):
        assert torch.equal(model.lm_head.weight[: hf.VOCABULARY], whole.lm_head.weight)

    evaluator = hf.make_trainer(model, args)
    before = evaluator.evaluate()["eval_loss"]
    assert evaluator.model_wrapped.optimizer is None
    evaluator.model_wrapped.destroy()

    hf.forget_accelerate()
    trainer = hf.make_trainer(model, hf.arguments(tmp_path / "out", config, max_steps=2))
    trainer.train()
    assert trainer.evaluate()["eval_loss"] < before
    prompt = hf.TextBlocks(0, 1)[0]["input_ids"][None, :8]
    made = trainer.model.generate(prompt, max_new_tokens=4 + rank, do_sample=False, synced_gpus=True)
    trainer.save_model(str(tmp_path / "trained"))
    torch.distributed.barrier()
    hf.forget_accelerate()
    from transformers.integrations import unset_hf_deepspeed_config

    unset_hf_deepspeed_config()
    again = AutoModelForCausalLM.from_pretrained(tmp_path / "trained")
    assert not any(is_zero_param(param) for param in again.parameters())
    assert torch.equal(made, again.generate(prompt, max_new_tokens=4 + rank, do_sample=False))
