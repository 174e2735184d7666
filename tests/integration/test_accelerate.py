"""A training loop written with Accelerate, on the `deepspeed` module."""

from __future__ import annotations

import pathlib
from typing import Any

import torch

from tests.ranks import ranks

PRELOAD = ("transformers.trainer",)


def steps(hf: Any, plugin: Any, *, resume_from: pathlib.Path | None = None, save_to: pathlib.Path | None = None) -> Any:
    """Eight micro-batches, two to a step, saved after the fourth; or the last four, resumed."""
    from accelerate import Accelerator, PartialState

    hf.forget_accelerate()
    PartialState(cpu=True)  # without it Accelerate takes a CPU with a plugin for a world of one
    accelerator = Accelerator(cpu=plugin is None, gradient_accumulation_steps=2, deepspeed_plugin=plugin)
    model = hf.tiny_llama(seed=0 if resume_from is None else 1)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3, weight_decay=0.1)
    schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 1 / (1 + step))
    loader = torch.utils.data.DataLoader(hf.TextBlocks(0, 32), batch_size=2)
    model, optimizer, loader, schedule = accelerator.prepare(model, optimizer, loader, schedule)
    if resume_from is not None:
        accelerator.load_state(str(resume_from))
    losses, norms = [], []
    for index, batch in enumerate(loader):
        if resume_from is not None and index < 4:
            continue
        with accelerator.accumulate(model):
            loss = model(**batch).loss
            accelerator.backward(loss)
            if accelerator.sync_gradients:
                norms.append(float(accelerator.clip_grad_norm_(model.parameters(), 0.5)))
            optimizer.step()
            schedule.step()
            optimizer.zero_grad()
        losses.append(accelerator.gather(loss.detach().reshape(1)).mean().item())
        if index == 3 and save_to is not None:
            accelerator.save_state(str(save_to))
    return accelerator, model, losses, norms, schedule.get_last_lr()


@ranks(2, timeout_s=240)
def test_a_loop_with_accelerate_gives_the_same_and_resumes(rank, world_size, tmp_path):
    from fullspeed.compat import activate

    activate()
    from accelerate import DeepSpeedPlugin

    from tests.integration import hugging_face as hf

    accelerator, model, expected, plain_norms, plain_lr = steps(hf, None)
    whole = accelerator.unwrap_model(model).state_dict()
    for stage in (1, 2, 3):

        def plugin(stage: int = stage) -> Any:
            return DeepSpeedPlugin(
                zero_stage=stage, gradient_accumulation_steps=2, gradient_clipping=0.5, zero3_save_16bit_model=True
            )

        folder = tmp_path / str(stage)
        accelerator, engine, losses, norms, lr = steps(hf, plugin(), save_to=folder)
        assert engine.zero_optimization_stage() == stage
        assert engine.global_steps == 4
        torch.testing.assert_close(torch.tensor(losses), torch.tensor(expected), rtol=0, atol=1e-5)
        torch.testing.assert_close(torch.tensor(norms), torch.tensor(plain_norms), rtol=0, atol=1e-5)
        assert lr == plain_lr
        state = accelerator.get_state_dict(engine)
        if stage == 3 and rank != 0:
            assert state is None
        else:
            for name, tensor in whole.items():
                torch.testing.assert_close(state[name], tensor, rtol=0, atol=1e-5)
        assert accelerator.unwrap_model(engine) is engine.module
        engine.destroy()
        _, engine, resumed, _, _ = steps(hf, plugin(), resume_from=folder)
        torch.testing.assert_close(torch.tensor(resumed), torch.tensor(losses[4:]), rtol=0, atol=1e-6)
        engine.destroy()
