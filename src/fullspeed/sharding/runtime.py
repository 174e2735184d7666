"""Hooks that turn a model's forwards and backwards into the groups' verbs. Knows no stage number.

Life of a pass
1. A scope (a unit, or a module that owns parameters) is entered: its groups are made whole (`Gatherer.use`).
2. It is left: groups nobody else uses are released; its outputs will ask for them again when their gradient comes.
3. Backward reaches an output, or unpacks a saved view: the group is made whole and held until its last gradient.
4. A gradient arrives: it moves into the group's flat buffer; with the last one the group's reduction starts, in the
   agreed order, while backward goes on.
5. Backward ends: remaining reductions are started, all are waited for, everything is released.
"""

from __future__ import annotations

import itertools
import weakref
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from typing import Any, cast

import torch
from torch import nn

from fullspeed.base.errors import UsageError
from fullspeed.comm import Agreement, Group
from fullspeed.sharding import attributes, placeholder
from fullspeed.sharding.gatherer import Gatherer, Idle, LiveBudget
from fullspeed.sharding.group import FlatGroup
from fullspeed.sharding.links import GroupLinks
from fullspeed.sharding.order import ReductionOrder
from fullspeed.sharding.outputs import tensors_in
from fullspeed.sharding.scopes import Scopes, not_compiled, uncompiled

_NO_PASS = -2

# Beyond two, a reduction gains nothing by starting early, and its buffers are held for longer.
MAX_REDUCTIONS_IN_FLIGHT = 16


class ReductionPolicy:
    """When gradients are reduced.

    Attributes:
        is_boundary: the coming backward is the last before a step; set by the engine.
        each_backward: reduce in every backward (gradients are sharded), not only in the last.
        overlap: start a group's reduction as soon as its last gradient is there.
        max_in_flight_numel: elements of gradient being reduced at once; the oldest is waited for beyond it.
    """

    def __init__(self, *, overlap: bool, max_in_flight_numel: int, each_backward: bool) -> None:
        self.is_boundary = True
        self.each_backward = each_backward
        self.overlap = overlap
        self.max_in_flight_numel = max_in_flight_numel

    @property
    def in_backward(self) -> bool:
        """Whether the backward that runs now reduces."""
        return self.is_boundary or self.each_backward


class ShardingRuntime:
    """Owns the groups of one model and the hooks on its modules and parameters."""

    num_engine_backwards = 0  # backwards under way in this process that an engine started

    def __init__(
        self,
        root: nn.Module,
        groups: Sequence[FlatGroup],
        units: Sequence[nn.Module],
        budget: LiveBudget,
        policy: ReductionPolicy,
        links: GroupLinks,
    ) -> None:
        self.root = root
        self.groups = list(groups)
        self.policy = policy
        self.links = links
        self._agreement = Agreement(links.dp_group)
        self.device = groups[0].device if groups else torch.device("cpu")
        self.watch_nonfinite = False  # note the first parameter whose gradient arrives inf or nan
        self.first_nonfinite: str | None = None
        self.slot_of = {
            param: (group, slot) for group in groups for slot, param in enumerate(group.params)
        }  # parameter -> where it lives
        self._num_launched = 0  # reductions started so far, over all passes
        self._expect_gradients()
        self.gatherer = Gatherer(groups, budget, Agreement(links.shard_group), lambda: self._num_launched)
        self._in_flight: list[tuple[int, FlatGroup]] = []  # (how many were launched before, group), oldest first
        self._advanced: list[FlatGroup] = []  # summed, but peers may still be reading
        self._last_fired: dict[int, int] = {}  # group -> when its last gradient of a pass came
        self._clock = itertools.count()
        self._depth = 0
        self._borrowed: list[FlatGroup] = []  # groups used outside their own modules, until the outermost scope ends
        self._pass_id = _NO_PASS
        self._factor = 1.0
        self.default_factor = 1.0  # scale of gradients in a backward the engine did not start
        self.on_plain_backward: Callable[[], None] = lambda: None
        self._saved_hooks: Any = None
        self._group_of_storage: dict[int, FlatGroup] = {
            group.full.untyped_storage()._cdata: group for group in groups if group.is_transient
        }
        self._handles: list[Any] = []
        self.scopes = Scopes(root, units, self.groups, self._enter, self._leave)
        self._hook_parameters()

    # ------------------------------------------------------------------ hooks

    def _hook_parameters(self) -> None:
        for param, (group, slot) in self.slot_of.items():
            placeholder.adopt(param, self)
            if group.placement.params:
                attributes.attach(group, slot)
            if group.trained[slot]:
                self._hook_gradients(param)

    def _hook_gradients(self, param: nn.Parameter) -> None:
        # Python's cycle collector cannot look into a tensor's hooks: a strong reference would keep us alive for ever.
        me, (group, slot) = weakref.ref(self), self.slot_of[param]
        before, after = partial(_before_accumulate, me, group.index), partial(_on_grad, me, group.index, slot)
        self._handles.append(param.register_hook(not_compiled(before)))
        self._handles.append(param.register_post_accumulate_grad_hook(not_compiled(after)))

    def trains(self, param: nn.Parameter) -> bool:
        """Whether one of our parameters is trained: since initialize, or since `train`."""
        group, slot = self.slot_of[param]
        return group.trained[slot]

    def train(self, params: Sequence[nn.Parameter]) -> None:
        """Train frozen parameters, which require gradients already, from now on. Collective, between passes."""
        self.sync()
        self.gatherer.free_idle()
        for param in params:
            group, slot = self.slot_of[param]
            group.train(slot)
            self._hook_gradients(param)
        self._expect_gradients()

    def _expect_gradients(self) -> None:
        """Start over with what gradients are expected and in which order groups are reduced."""
        self.trainable = [group for group in self.groups if group.is_trainable]
        self.order = ReductionOrder([group.index for group in reversed(self.trainable)])
        self._order_is_learned = False
        self._fired = dict.fromkeys((group.index for group in self.trainable), 0)
        # Gradients per pass: one for each parameter at first, then as many as in the last pass.
        self._expected = {group.index: sum(group.trained) for group in self.trainable}

    def _enter(self, needed: Sequence[FlatGroup], module: nn.Module, args: Any) -> None:
        if self._depth == 0:
            self._begin_outermost()
        self._depth += 1
        for group in needed:
            group.users += 1
            if not group.is_whole or (group.users == 1 and not group.held_by_backward):
                self.gatherer.use(group)

    def _leave(self, needed: Sequence[FlatGroup], module: nn.Module, args: Any, output: Any) -> None:
        self._depth -= 1
        is_outermost = self._depth == 0
        views = list(self._views_in(output))
        if not is_outermost:
            for group, _ in views:
                self._borrow(group)
        for group in needed:
            group.users -= 1
        if torch.is_grad_enabled():
            wanted = [group for group in needed if not group.users]
            if wanted or is_outermost:
                borrowed = list(self._borrowed) if is_outermost else []
                for tensor in tensors_in(output):
                    # A leaf's gradient is the last one, and a parameter of ours would keep the hook for ever.
                    if tensor.requires_grad and not tensor.is_leaf:
                        tensor.register_hook(partial(self._on_output_grad, [*wanted, *borrowed]))
        for group in needed:
            self._release_after_forward(group)
        if is_outermost:
            self._end_outermost()
            self._refuse_views(views)

    def _begin_outermost(self) -> None:
        if _graph_task() != -1:
            return  # a checkpoint recomputes; its own hooks on saved tensors must stay on top
        self.abandon_pass()
        self.gatherer.follow(is_training=torch.is_grad_enabled())
        if self._group_of_storage and not _has_saved_tensor_hooks():
            self._saved_hooks = torch.autograd.graph.saved_tensors_hooks(self._pack, self._unpack)
            self._saved_hooks.__enter__()

    def _end_outermost(self) -> None:
        if self._saved_hooks is not None:
            self._saved_hooks.__exit__(None, None, None)
            self._saved_hooks = None
        borrowed, self._borrowed = self._borrowed, []
        for group in borrowed:
            group.users -= 1
            self._release_after_forward(group)
        if _graph_task() == -1:
            self.gatherer.drain(Idle.FORWARD_DONE)
            if not torch.is_grad_enabled():
                self.gatherer.free_idle()
                self.gatherer.trace.end_pass()
                self.gatherer.leave()

    def _release_after_forward(self, group: FlatGroup) -> None:
        """Release, unless a backward is recomputing this forward and will need the values at once."""
        if group.users or group.held_by_backward:
            return
        if _graph_task() != -1 and torch.is_grad_enabled():
            group.held_by_backward = True
        else:
            self.gatherer.release(group)

    @uncompiled
    def run(self, tensors: list[torch.Tensor], operation: placeholder.Operation) -> Any:
        """Carry out an operation on sharded parameters of ours; see `placeholder.Owner`."""
        self._resolve(cast("list[nn.Parameter]", tensors))
        return operation.carry_out()

    def copy_of(self, tensor: torch.Tensor) -> torch.Tensor:
        """A whole, ordinary copy of one of our parameters; see `placeholder.Owner`."""
        self._resolve([cast(nn.Parameter, tensor)])
        return nn.Parameter(tensor.detach().clone(), tensor.requires_grad)

    def deep_copy_of(self, param: nn.Parameter) -> nn.Parameter:
        """A whole, ordinary copy of one of our parameters; see `placeholder.Owner`."""
        return cast(nn.Parameter, self.copy_of(param))

    def _resolve(self, params: list[nn.Parameter]) -> None:
        """A sharded parameter is used outside the modules that own it: gather it, or say why that cannot be."""
        groups = {id(self.slot_of[param][0]): self.slot_of[param][0] for param in params}
        if self._depth == 0 and self._pass_id == _NO_PASS:
            names = ", ".join(dict.fromkeys(self.name_of(param) for param in params))
            raise UsageError(
                f"parameter {names} is sharded over ranks and its values are not here now; use it inside the model's "
                f"forward, read it with safe_get_full_fp32_param, or save with save_checkpoint"
            )
        for group in groups.values():
            if self._depth == 0:
                self._need([group])
            else:
                self._borrow(group)
                self.gatherer.use(group)

    @property
    def group(self) -> Group:
        """All ranks that train the model."""
        return self.links.dp_group

    def place_of(self, param: torch.Tensor) -> tuple[FlatGroup, int]:
        """The group and slot of one of our parameters."""
        return self.slot_of[cast(nn.Parameter, param)]

    def assemble(self) -> None:
        """Between forwards and backwards, wait until every rank is here. Inside one, ranks come by themselves."""
        if self._depth == 0 and self._pass_id == _NO_PASS:
            self.sync()

    def replace(self, param: nn.Parameter, value: torch.Tensor) -> None:
        """Refused: the optimizer's state is bound to the parameter's shape and dtype."""
        raise UsageError(
            f"parameter {self.name_of(param)} of a running engine, of shape {tuple(param.shape)} and {param.dtype}, "
            f"cannot become one of shape {tuple(value.shape)} and {value.dtype}; change it before initialize"
        )

    @contextmanager
    def whole(self, groups: Sequence[FlatGroup]) -> Iterator[None]:
        """Inside, the groups' exact values are here. Collective."""
        self.assemble()
        for group in groups:
            group.users += 1
            self.gatherer.fetch(group)
        try:
            yield
        finally:
            for group in groups:
                group.users -= 1
                if not group.users and not group.held_by_backward:
                    self.gatherer.free(group)

    def _borrow(self, group: FlatGroup) -> None:
        """Keep the group whole until the outermost scope ends."""
        if group not in self._borrowed:
            self._borrowed.append(group)
            group.users += 1

    def _views_in(self, output: Any) -> Iterator[tuple[FlatGroup, torch.Tensor]]:
        """Views of values that are freed after use; the parameters themselves know when theirs are."""
        for tensor in tensors_in(output) if self._group_of_storage else ():
            if not isinstance(tensor, nn.Parameter) and torch._C._has_storage(tensor):
                group = self._group_of_storage.get(tensor.untyped_storage()._cdata)
                if group is not None:
                    yield group, tensor

    def _refuse_views(self, views: Sequence[tuple[FlatGroup, torch.Tensor]]) -> None:
        """Nobody may be left with a view of freed memory. In a recompute the group is held, so there it may be."""
        if views and _graph_task() == -1:
            group, view = views[0]
            slot = max(i for i, at in enumerate(group.layout.slots) if at.offset <= view.storage_offset())
            raise UsageError(
                f"the forward returns a view of parameter {group.fqns[slot]}, whose values are freed when it ends; "
                f"return the parameter itself or a copy (.clone())"
            )

    def name_of(self, param: nn.Parameter) -> str:
        """Fully qualified name of a parameter of this model."""
        group, slot = self.slot_of[param]
        return group.fqns[slot]

    # --------------------------------------------------------------- backward

    @uncompiled
    def _pack(self, tensor: torch.Tensor) -> torch.Tensor | tuple[FlatGroup, torch.Tensor]:
        group = self._group_of_storage.get(tensor.untyped_storage()._cdata)
        return tensor if group is None else (group, tensor)

    @uncompiled
    def _unpack(self, packed: torch.Tensor | tuple[FlatGroup, torch.Tensor]) -> torch.Tensor:
        if isinstance(packed, torch.Tensor):
            return packed
        group, tensor = packed
        self._need([group])
        return tensor

    @uncompiled
    def _on_output_grad(self, groups: Sequence[FlatGroup], grad: torch.Tensor) -> None:
        self._begin_pass()
        self._need(groups)

    def _need(self, groups: Iterable[FlatGroup]) -> None:
        for group in groups:
            if not group.is_transient:
                continue
            if not group.held_by_backward:
                group.held_by_backward = True
                if not group.users:
                    self.gatherer.use(group)
            elif not group.is_whole:
                self.gatherer.use(group)

    @contextmanager
    def backward_pass(self, factor: float) -> Iterator[None]:
        """A backward started by the engine: gradients count `factor` times; ends with everything reduced."""
        self.abandon_pass()
        self._open_pass(id(self), factor)
        ShardingRuntime.num_engine_backwards += 1
        try:
            yield
        finally:
            ShardingRuntime.num_engine_backwards -= 1
        self._end_pass()

    def _begin_pass(self) -> None:
        """Called by the first hook of a backward the user started with `loss.backward()`."""
        if self._pass_id != _NO_PASS:
            return
        self.on_plain_backward()
        # Inside another engine's backward the loss is divided by the accumulation steps already.
        is_joined = ShardingRuntime.num_engine_backwards > 0
        self._open_pass(_graph_task(), 1.0 if is_joined else self.default_factor)
        torch.autograd.Variable._execution_engine.queue_callback(self._end_pass)

    def _open_pass(self, pass_id: int, factor: float) -> None:
        self._pass_id, self._factor = pass_id, factor
        self.gatherer.follow(is_training=True)
        self.order.begin_pass()
        self._fired = dict.fromkeys(self._fired, 0)

    def abandon_pass(self) -> None:
        """Close a pass that an exception left open; gradients that arrived stay, reductions under way are finished."""
        if self._pass_id == _NO_PASS:
            return
        self._pass_id = _NO_PASS
        self._finish_in_flight()
        self._release_backward()

    def _pass_factor(self) -> float:
        return self._factor if self._pass_id != _NO_PASS else self.default_factor

    def _on_grad(self, group: FlatGroup, slot: int, param: torch.Tensor) -> None:
        self._watch(group, slot, param)
        group.accumulate(slot, self._pass_factor())
        if self._pass_id == _NO_PASS:
            return  # a backward that touched no module of ours; the step reduces what it left
        self._fired[group.index] += 1
        self._last_fired[group.index] = next(self._clock)
        if self._fired[group.index] != self._expected[group.index]:
            return
        launched = self.order.ready(group.index)
        if self.policy.in_backward and self.policy.overlap:
            for index in launched:
                self._launch(self.groups[index])
        if group.is_transient and not group.users:
            group.held_by_backward = False
            self.gatherer.release(group)

    def _watch(self, group: FlatGroup, slot: int, param: torch.Tensor) -> None:
        is_watching = self.watch_nonfinite and self.first_nonfinite is None
        if is_watching and param.grad is not None and not torch.isfinite(param.grad).all():
            self.first_nonfinite = group.fqns[slot]

    def _launch(self, group: FlatGroup) -> None:
        self._in_flight.append((self._num_launched, group))
        self._num_launched += 1
        group.begin_reduce()
        in_flight = sum(waiting.numel for _, waiting in self._in_flight)
        while in_flight > self.policy.max_in_flight_numel or len(self._in_flight) > MAX_REDUCTIONS_IN_FLIGHT:
            number, oldest = self._in_flight[0]
            # In mid-backward, wait only for what every rank has started: another may be waiting for us to gather.
            if self.gatherer.communicates and number >= self.gatherer.num_launched_by_all:
                break
            self._in_flight.pop(0)
            in_flight -= oldest.numel
            oldest.advance_reduce()
            self._advanced.append(oldest)
            if not self._in_flight:
                break
        self._advanced = [waiting for waiting in self._advanced if not waiting.try_finish_reduce()]

    def _finish_in_flight(self) -> None:
        self._in_flight.clear()
        self._advanced.clear()
        for group in self.trainable:
            group.finish_reduce()

    @uncompiled
    def _end_pass(self) -> None:
        """Backward is over: reduce what is left, wait for all, release everything, learn this pass's order."""
        if self._pass_id == _NO_PASS:
            return
        if self.policy.in_backward:
            self._reduce_remaining()
        self._pass_id = _NO_PASS
        self._expected = dict(self._fired)
        self._release_backward()
        self.gatherer.drain(Idle.BACKWARD_DONE)
        if self.policy.in_backward:
            for group in self.trainable:
                group.advance_reduce()
            self._finish_in_flight()
            self._learn_order()
            for group in self.trainable:
                group.expose_grads()

    def _reduce_remaining(self) -> None:
        overlap = self.policy.overlap
        launched_early = set(self.order.order[: self.order.num_launched]) if overlap else set()
        self.order.remaining()
        for index in self.order.order:
            if index not in launched_early:
                self._launch(self.groups[index])

    def _release_backward(self) -> None:
        for group in self.groups:
            group.held_by_backward = False
        self.gatherer.free_idle()
        self.gatherer.trace.end_pass()

    def _learn_order(self) -> None:
        """After the first pass, reduce in the order in which rank 0 completed its groups."""
        if self._order_is_learned:
            return
        self._order_is_learned = True
        never = len(self._last_fired)
        mine = sorted(self.order.order, key=lambda index: self._last_fired.get(index, next(self._clock) + never))
        self.order = ReductionOrder(self._agreement.exchange(mine)[0])

    # ------------------------------------------------------------------- step

    def finish_reduction(self) -> dict[nn.Parameter, bool]:
        """Reduce whatever no pass has reduced. Collective.

        Returns, for every trainable parameter, whether any rank's gradient reached it since the last step.
        """
        self.meet()
        flags = self._agreement.maximum(self._flags())
        while flags[0]:
            for index in self.order.order:
                self.groups[index].begin_reduce()
            self._finish_in_flight()
            flags[0] = int(self._agreement.maximum(torch.tensor([self._has_local()], dtype=torch.uint8))[0])
        touched = iter(flags[1:].tolist())
        return {param: bool(next(touched)) for group in self.trainable for param in group.params}

    def meet(self) -> None:
        """Serve ranks that are still in a forward or backward until all ranks are here. Precedes every collective."""
        self.abandon_pass()
        self.gatherer.drain(Idle.AT_STEP)

    def sync(self) -> None:
        """Wait until every rank is here: no peer reads this rank's values any more, so they may be written."""
        self.meet()
        self._agreement.exchange([0])

    def _has_local(self) -> int:
        return int(any(group.has_local for group in self.trainable))

    def _flags(self) -> torch.Tensor:
        flags = [self._has_local()]
        for group in self.trainable:
            group.adopt_exposed_grads()
            flags.extend(int(touched) for touched in group.touched)
        return torch.tensor(flags, dtype=torch.uint8)

    def publish(self) -> None:
        """After the step: every rank sees the new values."""
        self.gatherer.free_idle()
        pending = [group.begin_publish() for group in self.trainable]
        for gather in pending:
            if gather is not None:
                gather.wait()

    def clear_grads(self) -> None:
        """Forget all gradients."""
        self.abandon_pass()
        for group in self.trainable:
            group.clear_grads()

    def destroy(self) -> None:
        """Remove every hook and give the model its parameters back, whole. Collective; may be called twice."""
        self.scopes.remove()
        for handle in self._handles:
            handle.remove()
        self._handles = []
        if not self.groups:
            return
        self.meet()
        self.clear_grads()
        self.gatherer.free_idle()
        for group in self.groups:
            group.release(self._restore)
            for param in group.params:
                attributes.detach(param)
        self.groups, self.trainable, self.slot_of = [], [], {}
        self._group_of_storage = {}
        self.on_plain_backward = lambda: None

    def _restore(self, group: FlatGroup) -> None:
        if group.is_transient:
            group.begin_unshard(exact=True)
            group.finish_unshard()


def _before_accumulate(me: weakref.ref[ShardingRuntime], index: int, grad: torch.Tensor) -> None:
    """Autograd is about to add to `param.grad`: take an exposed gradient back first, it counts already."""
    runtime = me()
    if runtime is not None:
        runtime.groups[index].unexpose_grads()


def _on_grad(me: weakref.ref[ShardingRuntime], index: int, slot: int, param: torch.Tensor) -> None:
    runtime = me()
    if runtime is not None:
        runtime._on_grad(runtime.groups[index], slot, param)


def _has_saved_tensor_hooks() -> bool:
    """Whether somebody, a checkpoint for one, already listens to saved tensors; only the top listener is called."""
    return torch._C._autograd._top_saved_tensors_default_hooks(True) is not None


def _graph_task() -> int:
    """Identity of the backward that is running in this thread; -1 when none is."""
    return int(torch._C._current_graph_task_id())
