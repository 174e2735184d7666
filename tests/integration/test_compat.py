"""What libraries do to an engine by private names, where it is not worth their installation."""

from __future__ import annotations

import copy

import torch

from tests.launches import launch
from tests.ranks import ranks


def test_scripts_started_as_deepspeed_import_it(tmp_path):
    script = tmp_path / "script.py"
    script.write_text(
        "import importlib.metadata, os, deepspeed\n"
        "deepspeed.init_distributed()\n"
        "print('saw', deepspeed.__version__ == importlib.metadata.version('deepspeed'), deepspeed.comm.get_rank())\n"
    )
    ended = launch(["--num_gpus", "2", "--as-deepspeed", "--no_local_rank", str(script)], tmp_path)
    assert ended.code == 0, ended.err
    assert "saw True 0" in ended.out
    assert "saw True 1" in ended.out
    without = launch(["--no_local_rank", str(script)], tmp_path)
    assert "No module named 'deepspeed'" in without.err + without.out


@ranks(2)
def test_hooks_can_be_taken_off_for_generation_as_trl_does(rank, world_size):
    import fullspeed
    from fullspeed.zero import GatheredParameters

    torch.manual_seed(0)
    model = torch.nn.Sequential(torch.nn.Linear(8, 8), torch.nn.ReLU(), torch.nn.Linear(8, 2))
    plain = copy.deepcopy(model)
    config = {
        "train_micro_batch_size_per_gpu": 1,
        "optimizer": {"type": "SGD", "params": {"lr": 0.1}},
        "zero_optimization": {"stage": 3, "stage3_param_persistence_threshold": 0},
    }
    engine, *_ = fullspeed.initialize(model=model, config=config)
    x = torch.ones(1, 8)
    with GatheredParameters(engine.parameters()), torch.no_grad():
        offload = engine.optimizer.parameter_offload
        names = [name for name, _ in offload.module.named_parameters(recurse=True)]
        assert sorted(names) == sorted(name for name, _ in plain.named_parameters())
        for _, param in offload.module.named_parameters():
            param.ds_active_sub_modules.clear()
        assert list(offload.module.ds_external_parameters()) == []
        for hook in [*offload.forward_hooks, *offload.backward_hooks]:
            hook.remove()
        offload.forward_hooks = offload.backward_hooks = []
        # Ranks generate different numbers of tokens.
        for _ in range(1 + rank):
            torch.testing.assert_close(engine.module(x), plain(x))
        offload._register_deepspeed_module(offload.module)
    loss = engine(x).sum()
    engine.backward(loss)
    engine.step()
    plain(x).sum().backward()
    torch.optim.SGD(plain.parameters(), lr=0.1).step()
    torch.testing.assert_close(engine(x), plain(x))


@ranks(2)
def test_groups_and_gradients_are_reached_as_deepspeed_has_them(rank, world_size):
    import fullspeed
    from fullspeed.compat import groups, tensors
    from fullspeed.zero import safe_get_full_grad

    model = torch.nn.Linear(4, 4)
    config = {
        "train_micro_batch_size_per_gpu": 1,
        "optimizer": {"type": "SGD", "params": {"lr": 0.1}},
        "zero_optimization": {"stage": 2},
    }
    engine, *_ = fullspeed.initialize(model=model, config=config)
    assert groups._get_data_parallel_world_size() == groups._get_sequence_data_parallel_world_size() == 2
    assert groups._get_data_parallel_rank() == rank
    assert torch.distributed.get_world_size(groups._clone_world_group()) == 2
    engine.backward(engine(torch.ones(1, 4)).sum())
    before = safe_get_full_grad(model.weight)
    tensors.safe_update_full_grad_vectorized([model.weight], lambda grad, param: grad * 2)
    torch.testing.assert_close(safe_get_full_grad(model.weight), 2 * before)
    saved = tensors.clone_tensors_for_torch_save(model.state_dict())
    assert saved["weight"].untyped_storage().nbytes() == 64
