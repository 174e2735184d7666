"""The training engine: the user's module, with a backward and a step that know about accumulation and ranks."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from typing import Any

import torch
from torch import nn
from torch.optim import Optimizer

from fullspeed.base import env
from fullspeed.base.errors import UsageError
from fullspeed.base.log import log_dist
from fullspeed.checkpoint.staging import StagingBuffer
from fullspeed.comm import Group, get_rank, get_world_group, get_world_size, trim_shared_memory
from fullspeed.config import Batch, Config
from fullspeed.engine import python_gc
from fullspeed.engine.accessors import ConfigAccessors
from fullspeed.engine.background import BackgroundSave
from fullspeed.engine.batches import Batches
from fullspeed.engine.changes import Changes
from fullspeed.engine.deepspeed_layout import LayoutCheckpointing
from fullspeed.engine.inputs import cast_floating
from fullspeed.engine.offloading import FOR_TRAINING, Offloading
from fullspeed.engine.save_on_signal import SaveOnSignal
from fullspeed.engine.watch import Watch
from fullspeed.engine.watched import Watched
from fullspeed.precision.policy import DTYPES, PrecisionPolicy
from fullspeed.sharding.optimizer import ShardedOptimizer
from fullspeed.sharding.runtime import ShardingRuntime
from fullspeed.sharding.scopes import uncompiled


class Engine(ConfigAccessors, LayoutCheckpointing, Batches, Changes, Offloading, Watched, nn.Module):
    """Wraps a module for training. Made by `fullspeed.initialize`; attributes it lacks are looked up on the module.

    One update is `grad_accum_steps` times (forward, backward, step): only the last of these steps changes weights.
    Gradients may equally come from plain `loss.backward()`, from several backwards, or from other engines' losses.
    """

    def __init__(
        self,
        *,
        module: nn.Module,
        config: Config,
        raw_config: Any,
        batch: Batch,
        precision: PrecisionPolicy,
        runtime: ShardingRuntime,
        optimizer: ShardedOptimizer | None,
        client_optimizer: Any,
        lr_scheduler: Any,
        dp_group: Group,
        device: torch.device,
        mpu: Any,
    ) -> None:
        nn.Module.__init__(self)
        self.module = module
        self._config, self.config, self._batch = config, raw_config, batch
        self.precision, self.runtime, self.device, self.mpu = precision, runtime, device, mpu
        self.optimizer = optimizer
        self.basic_optimizer: Optimizer | None = None if optimizer is None else optimizer.optimizer
        self.client_optimizer = client_optimizer
        self.lr_scheduler = lr_scheduler
        self.training_dataloader: Any = None
        self.data_parallel_group = self.seq_data_parallel_group = dp_group
        self.dp_world_size = self.seq_dp_world_size = get_world_size(dp_group)
        self.mp_world_size = self.sequence_parallel_size = 1
        self.global_rank, self.world_size = get_rank(get_world_group()), get_world_size(get_world_group())
        self.local_rank = env.get_int("LOCAL_RANK", 0)
        self.param_names = {param: fqn for fqn, param in module.named_parameters()}

        self.global_steps = self.global_samples = self.micro_steps = self.skipped_steps = 0
        self._num_backwards = self._num_micro_steps = 0  # since the last update
        self._forced_boundary: bool | None = None
        self._sync_disabled = False
        self._loss_is_scaled = False  # the coming plain backward starts from a loss `scale` returned
        self._step_applied = False
        self._watch = Watch(config, self, dp_group, self.global_rank)
        self._batches = self._post_process = None
        self._background, self._staging = BackgroundSave(dp_group), StagingBuffer(device)
        self._is_destroyed = False
        folder = config.checkpoint.save_on_signal if optimizer is not None else False
        self._saver = SaveOnSignal(lambda: self.save_checkpoint(folder, in_background=False)) if folder else None
        runtime.on_plain_backward = self._before_plain_backward
        if optimizer is not None:
            optimizer.before_new_group = self._before_new_param_group
            optimizer.before_step = lambda: self._refuse_while_offloaded("step")
        self._update_default_factor()
        if config.disable_python_gc:
            python_gc.hold_off()

    # ---------------------------------------------------------------- forward

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """The module's output, unchanged. Inputs are cast where the configuration says so."""
        self._refuse_while_offloaded("forward", but_for=frozenset() if torch.is_grad_enabled() else FOR_TRAINING)
        if self.precision.widens:
            assert self.precision.compute is not None
            args, kwargs = cast_floating((args, kwargs), self.precision.compute, only=self.precision.param)
        if self._config.fp16.enabled and self._config.fp16.auto_cast:
            assert self.precision.compute is not None
            args, kwargs = cast_floating((args, kwargs), self.precision.compute)
        if self.training:
            self._watch.begin_forward(self.global_steps)
        with self._watch.phase("forward"), self._autocast():
            return self.module(*args, **kwargs)

    def _autocast(self) -> Any:
        section = self._config.torch_autocast
        if not section.enabled:
            return nullcontext()
        return torch.autocast(self.device.type, dtype=DTYPES[section.dtype])

    # --------------------------------------------------------------- backward

    @uncompiled
    def backward(
        self,
        loss: torch.Tensor,
        retain_graph: bool = False,
        scale_wrt_gas: bool = True,
        *,
        gradient: torch.Tensor | None = None,
    ) -> torch.Tensor:
        """Accumulate the gradient of `loss` and reduce what its stage reduces now.

        Args:
            loss: a scalar with a graph; or any tensor, with `gradient`.
            retain_graph: keep the graph for another backward.
            scale_wrt_gas: divide by the accumulation steps, so that an update averages over them.
            gradient: the gradient with respect to `loss`, as for `torch.Tensor.backward`.

        Returns:
            The loss divided by the accumulation steps (undivided if `scale_wrt_gas` is false), without loss scale.

        Raises:
            UsageError: no optimizer, or a loss that has no graph or is no scalar.
        """
        optimizer = self._require_optimizer("backward")
        if loss.numel() != 1 and gradient is None:
            raise UsageError(
                f"backward needs a scalar loss, got shape {tuple(loss.shape)}; reduce it, or pass gradient="
            )
        if not loss.requires_grad:
            raise UsageError("backward got a loss without a graph; compute it with gradients enabled")
        divisor = self._batch.grad_accum_steps if scale_wrt_gas and self._config.managed_gradient_accumulation else 1
        averaged = loss / divisor if divisor != 1 else loss
        scaled = averaged * optimizer.loss_scale if optimizer.loss_scale != 1.0 else averaged
        self._before_backward()
        with self._watch.phase("backward"), self.runtime.backward_pass(1.0), self._watch.phase("backward_inner"):
            scaled.backward(gradient, retain_graph=retain_graph)
        self._watch.add_loss(loss)
        return averaged.detach() if gradient is not None else averaged

    def _before_backward(self) -> None:
        self._refuse_while_offloaded("backward")
        self.runtime.policy.is_boundary = (
            self._config.managed_gradient_accumulation
            and not self._sync_disabled
            and self.is_gradient_accumulation_boundary()
        )
        self._num_backwards += 1

    def _before_plain_backward(self) -> None:
        """A backward the user started. Its gradients are averaged over the accumulation steps like any other's."""
        optimizer = self.optimizer
        if optimizer is not None and optimizer.loss_scale != 1.0 and not self._loss_is_scaled:
            raise UsageError(
                f"the loss scale is {optimizer.loss_scale:g} and this backward started from an unscaled loss; call "
                f"engine.backward(loss) or engine.scale(loss).backward()"
            )
        self._loss_is_scaled = False
        self._before_backward()

    def scale(self, loss: torch.Tensor) -> torch.Tensor:
        """`loss` times the loss scale, for a plain `.backward()` on the result."""
        optimizer = self._require_optimizer("scale")
        self._loss_is_scaled = True
        return loss * optimizer.loss_scale

    @contextmanager
    def no_sync(self) -> Iterator[None]:
        """Backwards inside reduce nothing that can wait (whole gradients); the result of an update is the same."""
        was_disabled, self._sync_disabled = self._sync_disabled, True
        try:
            yield
        finally:
            self._sync_disabled = was_disabled

    @contextmanager
    def coalesce_grad_reduction(self) -> Iterator[None]:
        """Several backwards inside, one reduction: at the next step at the latest."""
        policy = self.runtime.policy
        each_backward, policy.each_backward = policy.each_backward, False
        try:
            with self.no_sync():
                yield
        finally:
            policy.each_backward = each_backward

    def is_gradient_accumulation_boundary(self) -> bool:
        """Whether the next `step` updates weights."""
        return self._is_boundary(self._num_micro_steps + 1)

    def _is_boundary(self, num_micro_steps: int) -> bool:
        if not self._config.managed_gradient_accumulation:
            return True
        if self._forced_boundary is not None:
            return self._forced_boundary
        return num_micro_steps >= self._batch.grad_accum_steps

    def set_gradient_accumulation_boundary(self, is_boundary: bool) -> None:
        """Decide the boundary by hand from now on. Call before backward, so that the last one can overlap."""
        if not self._config.managed_gradient_accumulation:
            raise UsageError("managed_gradient_accumulation is false: every step is an update, there is no boundary")
        self._forced_boundary = is_boundary

    def allreduce_gradients(self, bucket_size: int = 500_000_000) -> None:
        """Reduce everything accumulated so far, now. Collective."""
        del bucket_size
        self.runtime.finish_reduction()

    # ------------------------------------------------------------------- step

    @uncompiled
    def step(self, lr_kwargs: dict[str, Any] | None = None) -> None:
        """End a micro-batch; at the boundary, update the weights and the schedule. Collective at the boundary.

        Raises:
            LossScaleError: gradients overflow and the loss scale can go no lower.
        """
        optimizer = self._require_optimizer("step")
        self._refuse_while_offloaded("step")
        self._watch.end_micro_batch()
        self._step_applied = False
        self._num_micro_steps += 1
        self.micro_steps += 1
        if self._is_boundary(self._num_micro_steps):
            self._update(optimizer, lr_kwargs or {})
        self.runtime.policy.is_boundary = self.is_gradient_accumulation_boundary()

    def _update(self, optimizer: ShardedOptimizer, lr_kwargs: dict[str, Any]) -> None:
        with self._watch.phase("step"):
            optimizer.step()
        self.global_steps += 1
        samples = self._batch.train_batch_size
        if not self._config.managed_gradient_accumulation:
            samples = self._batch.micro_batch_size * self.dp_world_size * self._num_backwards
        self.global_samples += samples
        self._num_backwards = self._num_micro_steps = 0
        if optimizer.overflow:
            self.skipped_steps += 1
        else:
            self._step_applied = True
            self._step_scheduler(lr_kwargs)
        self._report(samples)
        self._background.poll()
        if self._saver is not None:
            self._saver.at_boundary()

    def _step_scheduler(self, lr_kwargs: dict[str, Any]) -> None:
        if self.lr_scheduler is None:
            return
        try:
            self.lr_scheduler.step(**lr_kwargs)
        except TypeError:
            if lr_kwargs:
                raise
            # Schedulers whose `step` wants a number are told the samples of an update.
            self.lr_scheduler.step(self._batch.train_batch_size)

    def was_step_applied(self) -> bool:
        """Whether the last `step` changed weights."""
        return self._step_applied

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Forget all gradients accumulated so far."""
        del set_to_none
        self.runtime.clear_grads()

    # ------------------------------------------------------------ batch sizes

    def set_train_batch_size(self, train_batch_size: int) -> None:
        """Change the samples per update by changing the accumulation steps; a multiple of micro batch * ranks."""
        per_micro_step = self._batch.micro_batch_size * self.dp_world_size
        if train_batch_size % per_micro_step:
            raise UsageError(
                f"train_batch_size {train_batch_size} is no multiple of micro batch {self._batch.micro_batch_size} "
                f"* {self.dp_world_size} ranks = {per_micro_step}"
            )
        steps = train_batch_size // per_micro_step
        self._batch = self._batch._replace(train_batch_size=train_batch_size, grad_accum_steps=steps)
        self._update_default_factor()

    def set_train_micro_batch_size(self, micro_batch_size: int) -> None:
        """Change the samples per forward on one rank; the samples per update follow."""
        train = micro_batch_size * self._batch.grad_accum_steps * self.dp_world_size
        self._batch = self._batch._replace(micro_batch_size=micro_batch_size, train_batch_size=train)

    def _update_default_factor(self) -> None:
        managed = self._config.managed_gradient_accumulation
        self.runtime.default_factor = 1.0 / self._batch.grad_accum_steps if managed else 1.0

    # ----------------------------------------------------------------- getters

    def get_lr(self) -> list[float]:
        """Learning rate of every param group."""
        return [float(group["lr"]) for group in self._require_optimizer("get_lr").param_groups]

    def get_mom(self) -> list[Any]:
        """Betas, or momentum, of every param group; empty for an optimizer without either."""
        groups = self._require_optimizer("get_mom").param_groups
        found = [group.get("betas", group.get("momentum")) for group in groups]
        return [value for value in found if value is not None]

    def get_type(self) -> list[Any]:
        """The `type` entry of every param group, where there is one."""
        return [group["type"] for group in self._require_optimizer("get_type").param_groups if "type" in group]

    def get_global_grad_norm(self) -> float | None:
        """L2 norm of all gradients of the last step, unscaled, before clipping; -1 if not finite; None before one."""
        return None if self.optimizer is None else self.optimizer._global_grad_norm

    def get_clipped_grad_norm(self) -> float | None:
        """The same after clipping."""
        return None if self.optimizer is None else self.optimizer._clipped_grad_norm

    def get_batch_info(self) -> tuple[int, int, int]:
        """(train batch size, micro-batch size, accumulation steps)."""
        return self._batch.train_batch_size, self._batch.micro_batch_size, self._batch.grad_accum_steps

    def get_data_types(self) -> tuple[torch.dtype, torch.dtype]:
        """(dtype parameters are stored in, dtype gradients accumulate in)."""
        param = self.precision.param or torch.float32
        return param, self.precision.grad_accum or param

    def get_data_parallel_rank(self) -> int:
        """This rank among those with different data."""
        return get_rank(self.data_parallel_group)

    def get_model_parallel_rank(self) -> int:
        """Rank in the model-parallel group: 0, there is none."""
        return 0

    def get_tensor_parallel_rank(self) -> int:
        """Rank in the tensor-parallel group: 0, there is none."""
        return 0

    def memory_bytes(self) -> dict[str, int]:
        """Bytes this rank holds now, by name; and the peak of `live` so far.

        `secondary` is hpZ's second copy of shards, `staging` what background saves write from, `shadow` the copies that
        steps beside training work on, `live` are whole values that exist only around their use (gathered, or widened
        for compute). `disk` waits in files and comes and goes through host memory of `buffers`.
        """
        totals = {"params": 0, "secondary": 0, "disk": 0, "grads": 0, "master": 0, "live": 0}
        for group in self.runtime.groups:
            for name, nbytes in group.nbytes().items():
                totals[name] += nbytes
        totals["staging"] = self._staging.nbytes
        totals["buffers"] = 0 if self.runtime.files is None else self.runtime.files.pool.total_bytes
        if (state_files := self.runtime.state_files) is not None:
            totals["buffers"] += state_files.buffer_bytes()
            totals["disk"] += state_files.nbytes()
        totals["disk"] += 0 if self._away is None else self._away.nbytes()
        totals["optimizer"] = 0 if self.optimizer is None else self.optimizer.nbytes()
        totals["shadow"] = 0 if self.optimizer is None else self.optimizer.stepper.nbytes()
        totals["peak_live"] = self.runtime.gatherer.peak_live_bytes
        return totals

    def empty_partition_cache(self) -> None:
        """Free gathered parameters that nothing computes with."""
        self.runtime.gatherer.free_idle()

    def collect_python_gc(self) -> None:
        """Run Python's cycle collector once, at a point where a pause does not hurt."""
        import gc

        gc.collect()

    def dump_state(self) -> None:
        """Log the resolved configuration on rank 0."""
        log_dist(self._config.model_dump_json(indent=2, exclude_defaults=True))

    # ----------------------------------------------------------------- life

    def _require_optimizer(self, what: str) -> ShardedOptimizer:
        if self._is_destroyed:
            raise UsageError(f"{what}: this engine was destroyed; build a new one with initialize")
        if self.optimizer is None:
            raise UsageError(f"{what} needs an optimizer; pass one to initialize or name one in the configuration")
        return self.optimizer

    def destroy(self) -> None:
        """Remove every hook and give the module its parameters back, whole and ordinary. Collective; idempotent."""
        if self._is_destroyed:
            return
        self._is_destroyed = True
        self._watch.close()
        if self._saver is not None:
            self._saver.close()
        self.runtime.destroy()
        self._forget_offloaded()
        if self.optimizer is not None:
            self.optimizer.before_new_group = self.optimizer.before_step = lambda: None
        self.optimizer = self.basic_optimizer = self.client_optimizer = None
        self.lr_scheduler = self.training_dataloader = self._batches = None
        self.param_names = {}
        trim_shared_memory()
        if self._config.disable_python_gc:
            python_gc.let_go()
        self._background.wait()

    def __getattr__(self, name: str) -> Any:
        try:
            return nn.Module.__getattr__(self, name)
        except AttributeError:
            module = self.__dict__.get("_modules", {}).get("module")
            if module is None:
                raise
            return getattr(module, name)
