"""Training and evaluating by the batch, and the loaders batches come from."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, Any

import torch

from fullspeed.base.errors import UsageError
from fullspeed.comm import Group, ReduceOp, all_reduce, get_rank
from fullspeed.data.loader import RepeatingLoader, make_loader
from fullspeed.engine.inputs import as_arguments, loss_of, to_device

if TYPE_CHECKING:
    from fullspeed.config import Batch, Config


class Batches:
    """Mixin: `train_batch`, `eval_batch` and `deepspeed_io`. The engine gives it the rest of the loop."""

    _config: Config
    _batch: Batch
    data_parallel_group: Group
    dp_world_size: int
    device: torch.device
    training: bool
    training_dataloader: Any
    train: Callable[..., Any]
    eval: Callable[..., Any]
    backward: Callable[..., torch.Tensor]
    step: Callable[..., None]
    _batches: Any = None
    _post_process: Callable[[Any], Any] | None = None

    def train_batch(self, data_iter: Iterator[Any] | None = None) -> torch.Tensor:
        """One update: `grad_accum_steps` micro-batches forward and backward, then the step.

        The module must return its loss (see `engine.inputs.loss_of`). Returns the loss averaged over micro-batches
        and ranks, fp32, detached.
        """
        self.train()
        total = torch.zeros((), dtype=torch.float32, device=self.device)
        batches = self._data_iterator(data_iter)
        for _ in range(self._batch.grad_accum_steps):
            loss = loss_of(self._forward_batch(next(batches)))
            self.backward(loss)
            self.step()
            total += loss.detach().float()
        all_reduce(total, ReduceOp.SUM, self.data_parallel_group)
        return total / (self._batch.grad_accum_steps * self.dp_world_size)

    @torch.no_grad()
    def eval_batch(self, data_iter: Iterator[Any] | None = None) -> torch.Tensor:
        """The loss of one micro-batch per rank in evaluation mode, averaged over ranks; weights stay."""
        was_training = self.training
        self.eval()
        try:
            loss = loss_of(self._forward_batch(next(self._data_iterator(data_iter)))).detach().float()
        finally:
            self.train(was_training)
        return all_reduce(loss, ReduceOp.SUM, self.data_parallel_group) / self.dp_world_size

    def _data_iterator(self, given: Iterator[Any] | None) -> Iterator[Any]:
        if given is not None:
            return given
        if self.training_dataloader is None:
            raise UsageError("no data: pass an iterator of batches, or training_data to initialize")
        if self._batches is None:
            self._batches = RepeatingLoader(self.training_dataloader)
        return self._batches  # type: ignore[no-any-return]

    def _forward_batch(self, batch: Any) -> Any:
        if self._post_process is not None:
            batch = self._post_process(batch)
        args, kwargs = as_arguments(to_device(batch, self.device))
        return self(*args, **kwargs)  # type: ignore[operator]

    def set_data_post_process_func(self, post_process: Callable[[Any], Any]) -> None:
        """Have `train_batch` and `eval_batch` pass every batch through `post_process`."""
        self._post_process = post_process

    def deepspeed_io(
        self,
        dataset: Any,
        batch_size: int | None = None,
        route: str = "train",
        pin_memory: bool | None = None,
        data_sampler: Any = None,
        collate_fn: Callable[[list[Any]], Any] | None = None,
        num_local_io_workers: int | None = None,
    ) -> Any:
        """A loader over `dataset` with this engine's micro-batch size and share of the samples.

        Args:
            dataset: map-style or iterable.
            batch_size: samples per batch on this rank; the micro-batch size by default.
            route: "train" shuffles; "eval", "predict" and "encode" keep the order.
            pin_memory: by default wherever there is a device to copy to.
            data_sampler: replaces the distributed sampler.
            collate_fn: makes a batch of samples.
            num_local_io_workers: loader processes; 0 loads in this one.
        """
        return make_loader(
            dataset,
            batch_size or self._batch.micro_batch_size,
            get_rank(self.data_parallel_group),
            self.dp_world_size,
            shuffle=route == "train",
            drop_last=self._config.dataloader_drop_last,
            collate_fn=collate_fn,
            sampler=data_sampler,
            num_workers=num_local_io_workers or 0,
            pin_memory=self.device.type != "cpu" if pin_memory is None else pin_memory,
        )
