"""`initialize`: from a model and a configuration to an engine, an optimizer, a loader and a schedule."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import nn
from torch.optim import Optimizer

from fullspeed.accelerator import get_accelerator, keep_freed_memory, return_freed_memory
from fullspeed.activation.configure import configure_from_section
from fullspeed.base import env
from fullspeed.base.errors import ConfigError, ConfigFault, UsageError
from fullspeed.base.log import set_log_level
from fullspeed.comm import Group, get_world_group, get_world_size, init_distributed
from fullspeed.config import Config, check_offload, check_ranks, load_config, require_resolved, resolve_batch
from fullspeed.engine.engine import Engine
from fullspeed.engine.parts import build_optimizer, build_scheduler, move_to
from fullspeed.optim.lamb import Lamb
from fullspeed.precision.buffers import cast_buffers, fp32_patterns
from fullspeed.precision.loss_scale import LossScale, StaticLossScale, make_loss_scale
from fullspeed.precision.policy import PrecisionPolicy
from fullspeed.sharding import access
from fullspeed.sharding.build import build_runtime
from fullspeed.sharding.optimizer import ShardedOptimizer, StepPolicy
from fullspeed.sharding.steppers import choose_stepper, updates_per_epoch


def initialize(
    args: Any = None,
    model: nn.Module | None = None,
    optimizer: Optimizer | Callable[[list[Any]], Optimizer] | None = None,
    model_parameters: Iterable[Any] | None = None,
    training_data: Any = None,
    lr_scheduler: Any = None,
    distributed_port: int = 29500,
    mpu: Any = None,
    dist_init_required: bool | None = None,
    collate_fn: Callable[[list[Any]], Any] | None = None,
    config: Any = None,
    mesh_param: tuple[int, ...] | None = None,
    config_params: Any = None,
) -> tuple[Engine, ShardedOptimizer | None, Any, Any]:
    """Build a training engine around `model`.

    Args:
        args: a namespace; `args.deepspeed_config` names the configuration when `config` is absent.
        model: any module. Its parameters keep their identity; rank 0's values win.
        optimizer: a fresh torch optimizer over the model's parameters, or a callable that makes one from a list of
            parameters; wins over the configuration's `optimizer` section.
        model_parameters: parameters, named parameters or param groups to optimise; by default all that require grad.
        training_data: a dataset to make a loader of, with the configured micro-batch size.
        lr_scheduler: a scheduler over `optimizer`, or a callable that makes one from the returned optimizer.
        distributed_port: port for ranks discovered through MPI or SLURM.
        mpu: an object whose `get_data_parallel_group()` names the ranks that share this model.
        dist_init_required: False if torch.distributed must be initialised already.
        collate_fn: how the loader makes a batch of samples.
        config: a dict, a path to a JSON file, or base64 of its text. `config_params` is its older name.
        mesh_param: reserved for sequence parallelism.
        config_params: see `config`.

    Returns:
        (engine, optimizer, training dataloader, lr scheduler); the last three may be None.

    Raises:
        ConfigError: with every fault of the configuration.
        UsageError: the arguments contradict one another.
    """
    if model is None:
        raise UsageError("initialize needs a model: initialize(model=my_module, config=...)")
    if mesh_param is not None:
        raise UsageError("mesh_param is for sequence parallelism, which this version does not have; leave it out")
    source = _config_source(args, config, config_params)
    settings = load_config(source)
    require_resolved(settings, "gradient_clipping")
    if settings.log_level is not None:
        set_log_level(settings.log_level)
    init_distributed(distributed_port=distributed_port, dist_init_required=dist_init_required)
    if args is not None and hasattr(args, "local_rank"):
        args.local_rank = env.get_int("LOCAL_RANK", 0)
    dp_group = mpu.get_data_parallel_group() if mpu is not None else get_world_group()
    world_source = "the mpu's data-parallel group" if mpu is not None else "all ranks of torch.distributed"
    batch = resolve_batch(settings, get_world_size(dp_group), world_source)
    check_ranks(settings, get_world_size(dp_group))

    if "activation_checkpointing" in settings.model_fields_set:
        configure_from_section(settings.activation_checkpointing, mpu)
    accelerator = get_accelerator()
    device = torch.device(accelerator.current_device_name())
    check_offload(settings, device.type)
    if device.type == "cpu":
        return_freed_memory()
    move_to(model, device)
    basic = build_optimizer(model, settings, optimizer, model_parameters)
    wrapped, runtime, precision = _shard(model, settings, basic, dp_group, device)
    if wrapped is not None:
        epoch_updates = updates_per_epoch(training_data, batch.train_batch_size)
        wrapped.stepper = choose_stepper(settings.zero_optimization, wrapped, epoch_updates)
    if device.type == "cpu":
        # Whoever has tensors wait in files is short of memory, and waits for a disk longer than for pages.
        waits = runtime.files is not None or runtime.state_files is not None
        (return_freed_memory if waits else keep_freed_memory)()
    scheduler = build_scheduler(settings, lr_scheduler, wrapped)
    engine = Engine(
        module=model,
        config=settings,
        raw_config=source,
        batch=batch,
        precision=precision,
        runtime=runtime,
        optimizer=wrapped,
        client_optimizer=optimizer,
        lr_scheduler=scheduler,
        dp_group=dp_group,
        device=device,
        mpu=mpu,
    )
    if training_data is not None:
        engine.training_dataloader = engine.deepspeed_io(training_data, collate_fn=collate_fn)
    if settings.dump_state:
        engine.dump_state()
    return engine, wrapped, engine.training_dataloader, scheduler


def _config_source(args: Any, config: Any, config_params: Any) -> Any:
    """The one place the configuration was given in."""
    from_args = None
    for name in ("deepspeed_config", "deepscale_config"):
        from_args = from_args or getattr(args, name, None)
    given = {
        "config": config,
        "config_params": config_params,
        "args.deepspeed_config": from_args,
    }
    present = {name: value for name, value in given.items() if value is not None}
    if not present:
        raise UsageError("no configuration: pass config=, or args with deepspeed_config")
    if len(present) > 1:
        raise UsageError(f"the configuration is given twice: {' and '.join(present)}; pass one of them")
    return next(iter(present.values()))


def _shard(
    model: nn.Module, config: Config, basic: Optimizer | None, dp_group: Group, device: torch.device
) -> tuple[ShardedOptimizer | None, Any, PrecisionPolicy]:
    precision = PrecisionPolicy.from_config(config, get_accelerator())
    if precision.buffers is not None:
        keep = fp32_patterns(model, config.data_types.keep_in_fp32_modules, is_fp16=config.fp16.enabled)
        cast_buffers(model, precision.buffers, keep)
    managed = None
    if basic is not None:
        managed = {param for group in basic.param_groups for param in group["params"]}
    runtime = build_runtime(model, config, precision, dp_group, device, managed)
    if basic is None:
        return None, runtime, precision
    fp16 = config.fp16
    loss_scale: LossScale = StaticLossScale(1.0)
    if fp16.enabled:
        loss_scale = make_loss_scale(
            fp16.loss_scale,
            initial_scale_power=fp16.initial_scale_power,
            window=fp16.loss_scale_window,
            hysteresis=fp16.hysteresis,
            consecutive_hysteresis=fp16.consecutive_hysteresis,
            min_scale=fp16.min_loss_scale,
        )
    if isinstance(basic, Lamb) and fp16.enabled and not loss_scale.is_dynamic:
        raise ConfigError(
            [ConfigFault("fp16.loss_scale", fp16.loss_scale, "LAMB needs the dynamic loss scale", "set it to 0")]
        )
    zero = config.zero_optimization
    policy = StepPolicy(
        clip_norm=config.gradient_clipping,
        check_overflow=fp16.enabled or (config.bf16.enabled and config.bf16.check_grad_overflow),
        compute_norm=zero.compute_grad_norm,
        sub_group_numel=zero.sub_group_size,
        require_all_used=not zero.ignore_unused_parameters,
    )
    optimizer = ShardedOptimizer(basic, runtime, loss_scale, policy, dp_group)
    access.register(optimizer)
    return optimizer, runtime, precision
