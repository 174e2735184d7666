"""Hugging Face's Trainer on the `deepspeed` module: as without it, at every stage."""

from __future__ import annotations

import pathlib
from typing import Any

import torch

from tests.ranks import ranks

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
