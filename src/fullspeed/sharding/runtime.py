"""Hooks that turn a model's forwards and backwards into the groups' verbs. Knows no stage number.

What the hooks decide is here; what follows is done by `Gatherer` (groups made whole and freed), `Reductions` (gradients
summed), `TransientViews` (what is saved and returned) and `RuntimeOwner` (use of a parameter outside its modules).

Life of a pass
1. A scope (a unit, or a module that owns parameters) is entered: its groups are made whole (`Gatherer.use`).
2. It is left: groups nobody else uses are released; its outputs will ask for them again when their gradient comes.
3. Backward reaches an output, or unpacks a saved view: the group is made whole and held until its last gradient.
4. A gradient arrives: it moves into the group's flat buffer; with the last one the group's reduction starts, in the
   agreed order, while backward goes on.
5. Backward ends: remaining reductions are started, all are waited for, everything is released.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from typing import Any

import torch
from torch import nn

from fullspeed.comm import Agreement
from fullspeed.sharding import attributes, placeholder
from fullspeed.sharding.file_resident import ValueFiles
from fullspeed.sharding.gatherer import Gatherer, Idle, LiveBudget
from fullspeed.sharding.group import FlatGroup
from fullspeed.sharding.links import GroupLinks
from fullspeed.sharding.order import LaunchCount
from fullspeed.sharding.outputs import tensors_in
from fullspeed.sharding.owner import RuntimeOwner
from fullspeed.sharding.reductions import ReductionPolicy, Reductions
from fullspeed.sharding.scopes import Scopes, not_compiled, uncompiled
from fullspeed.sharding.state_files import StateFiles, write_together
from fullspeed.sharding.views import TransientViews


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
        files: ValueFiles | None = None,
        state_files: StateFiles | None = None,
    ) -> None:
        """Where the resident values of some groups wait, and the masters and states, if they do.

        Both are closed with the runtime.
        """
        self.groups = list(groups)
        self.files, self.state_files = files, state_files
        self.policy = policy
        self.links = links
        self.device = groups[0].device if groups else torch.device("cpu")
        self.watch_nonfinite = False  # note the first parameter whose gradient arrives inf or nan
        self.first_nonfinite: str | None = None
        self.slot_of = {
            param: (group, slot) for group in groups for slot, param in enumerate(group.params)
        }  # parameter -> where it lives
        self._agreement = Agreement(links.dp_group)
        launches = LaunchCount()
        self._reductions = Reductions((), policy, self._agreement, launches)
        self._expect_gradients()
        self.gatherer = Gatherer(self.groups, budget, Agreement(links.shard_group), launches, files)
        self._depth = 0
        self._borrowed: list[FlatGroup] = []  # groups used outside their own modules, until the outermost scope ends
        self._in_pass = False  # a backward of ours is under way
        self._factor = 1.0  # scale of its gradients
        self.default_factor = 1.0  # scale of gradients in a backward the engine did not start
        self.on_plain_backward: Callable[[], None] = lambda: None
        self._views = TransientViews(groups, self._need)
        self._owner = RuntimeOwner(self)
        self._handles: list[Any] = []
        self.scopes = Scopes(root, units, self.groups, self._enter, self._leave)
        self._hook_parameters()

    # ------------------------------------------------------------------ hooks

    def _hook_parameters(self) -> None:
        for param, (group, slot) in self.slot_of.items():
            placeholder.adopt(param, self._owner)
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
        self.trainable = [group for group in self.groups if group.is_trainable]
        self._reductions.restart(self.trainable)

    # ---------------------------------------------------------------- forward

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
        outputs = list(tensors_in(output))
        returned = list(self._views.returned(outputs))
        if not is_outermost:
            for group, _ in returned:
                self._borrow(group)
        for group in needed:
            group.users -= 1
        if torch.is_grad_enabled():
            wanted = [group for group in needed if not group.users]
            if is_outermost:
                self._hook_outputs(outputs, [*wanted, *self._borrowed])
            elif wanted:
                self._hook_outputs(outputs, wanted)
        for group in needed:
            self._release_after_forward(group)
        if is_outermost:
            self._end_outermost()
            if _graph_task() == -1:  # in a recompute the group is held, so a view of it may be there
                self._views.refuse(returned)

    def _hook_outputs(self, outputs: Sequence[torch.Tensor], wanted: Sequence[FlatGroup]) -> None:
        """When a gradient comes to an output, backward needs these groups."""
        for tensor in outputs:
            # A leaf's gradient is the last one, and a parameter of ours would keep the hook for ever.
            if tensor.requires_grad and not tensor.is_leaf:
                tensor.register_hook(partial(self._on_output_grad, wanted))

    def _begin_outermost(self) -> None:
        if _graph_task() != -1:
            return  # a checkpoint recomputes; its own hooks on saved tensors must stay on top
        self.abandon_pass()
        self.gatherer.follow(is_training=torch.is_grad_enabled())
        self._views.begin_saving()

    def _end_outermost(self) -> None:
        self._views.end_saving()
        borrowed, self._borrowed = self._borrowed, []
        for group in borrowed:
            group.users -= 1
            self._release_after_forward(group)
        if _graph_task() == -1:
            self.gatherer.drain(Idle.FORWARD_DONE)
            if not torch.is_grad_enabled():
                self.gatherer.free_idle()
                self.gatherer.end_pass()
                self.gatherer.leave()

    def _release_after_forward(self, group: FlatGroup) -> None:
        """Release, unless a backward is recomputing this forward and will need the values at once."""
        if group.users or group.held_by_backward:
            return
        if _graph_task() != -1 and torch.is_grad_enabled():
            group.held_by_backward = True
        else:
            self.gatherer.release(group)

    @property
    def is_computing(self) -> bool:
        """Whether a forward or backward is under way."""
        return self._depth > 0 or self._in_pass

    def lend(self, groups: Iterable[FlatGroup]) -> None:
        """Make groups whole outside their own modules, for the forward or backward that is under way."""
        if self._depth == 0:
            self._need(groups)
            return
        for group in groups:
            self._borrow(group)
            self.gatherer.use(group)

    def _borrow(self, group: FlatGroup) -> None:
        """Keep the group whole until the outermost scope ends."""
        if group not in self._borrowed:
            self._borrowed.append(group)
            group.users += 1

    def name_of(self, param: nn.Parameter) -> str:
        """Fully qualified name of a parameter of this model."""
        group, slot = self.slot_of[param]
        return group.fqns[slot]

    # --------------------------------------------------------------- backward

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
        self._open_pass(factor)
        ShardingRuntime.num_engine_backwards += 1
        try:
            yield
        finally:
            ShardingRuntime.num_engine_backwards -= 1
        self._end_pass()

    def _begin_pass(self) -> None:
        """Called by the first hook of a backward the user started with `loss.backward()`."""
        if self._in_pass:
            return
        self.on_plain_backward()
        # Inside another engine's backward the loss is divided by the accumulation steps already.
        is_joined = ShardingRuntime.num_engine_backwards > 0
        self._open_pass(1.0 if is_joined else self.default_factor)
        torch.autograd.Variable._execution_engine.queue_callback(self._end_pass)

    def _open_pass(self, factor: float) -> None:
        self._in_pass, self._factor = True, factor
        self.gatherer.follow(is_training=True)
        self._reductions.begin_pass()

    def abandon_pass(self) -> None:
        """Close a pass that an exception left open; gradients that arrived stay.

        Other ranks may have come further, or to their end: this one does what it still owes them.
        """
        if self._in_pass:
            self._close_pass()

    def _on_grad(self, group: FlatGroup, slot: int, param: torch.Tensor) -> None:
        self._watch(group, slot, param)
        group.grads.accumulate(slot, self._factor if self._in_pass else self.default_factor)
        if not self._in_pass:
            return  # a backward that touched no module of ours; the step reduces what it left
        if self._reductions.arrived(group) and group.is_transient and not group.users:
            group.held_by_backward = False
            self.gatherer.release(group)

    def _watch(self, group: FlatGroup, slot: int, param: torch.Tensor) -> None:
        is_watching = self.watch_nonfinite and self.first_nonfinite is None
        if is_watching and param.grad is not None and not torch.isfinite(param.grad).all():
            self.first_nonfinite = group.fqns[slot]

    @uncompiled
    def _end_pass(self) -> None:
        """Backward is over. The next pass is expected to be alike."""
        if self._in_pass:
            self._reductions.expect_alike()
            self._close_pass()

    def _close_pass(self) -> None:
        """Reduce what is left, wait for all, release everything, learn this pass's order."""
        self._reductions.launch_remaining()
        self._in_pass = False
        self._release_backward()
        self.gatherer.drain(Idle.BACKWARD_DONE)
        self._reductions.finish_pass()

    def _release_backward(self) -> None:
        for group in self.groups:
            group.held_by_backward = False
        self.gatherer.free_idle()
        self.gatherer.end_pass()

    def watch_reductions(self, on_reduced: Callable[[FlatGroup], None]) -> None:
        """Call `on_reduced` with each group whose reduction is complete, in the backward that precedes a step."""
        self._reductions.on_reduced = on_reduced

    # ------------------------------------------------------------------- step

    def finish_reduction(self) -> dict[nn.Parameter, bool]:
        """Reduce whatever no pass has reduced. Collective.

        Returns, for every trainable parameter, whether any rank's gradient reached it since the last step.
        """
        self.meet()
        return self._reductions.reduce_rest()

    def meet(self) -> None:
        """Serve ranks that are still in a forward or backward until all ranks are here. Precedes every collective."""
        self.abandon_pass()
        self.gatherer.drain(Idle.AT_STEP)

    def sync(self) -> None:
        """Wait until every rank is here: no peer reads this rank's values any more, so they may be written."""
        self.meet()
        self._agreement.exchange([0])

    def keep_edits(self) -> None:
        """Take over what was edited since the last step. No rank may be reading. Collective if masters wait in files.

        Raises:
            StorageError: on every rank, when one could not write masters to its file.
        """

        def keep() -> None:
            for group in self.groups:
                group.keep_edits()

        write_together(keep, self.trainable, self.links.dp_group)

    def publish(self, refreshed: Collection[FlatGroup] = ()) -> None:
        """After the step: every rank sees the new values. `refreshed` have taken theirs from their masters already."""
        self.gatherer.free_idle()
        pending = [group.begin_publish(is_refreshed=group in refreshed) for group in self.trainable]
        for gather in pending:
            if gather is not None:
                gather.wait()
        self.check_files()

    def check_files(self) -> None:
        """Wait until resident values that wait in files are there. Collective if there are any.

        Raises:
            StorageError: on every rank, when values of any rank could not be read or written since the last round.
        """
        if self.files is not None:
            self.files.flush()
            failures = self._agreement.exchange([int(self.files.failure is not None)])
            self.files.raise_failures([rank for rank, (has_failed,) in enumerate(failures) if has_failed])

    def clear_grads(self) -> None:
        """Forget all gradients."""
        self.abandon_pass()
        for group in self.trainable:
            group.grads.clear()

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
            group.release()
            for param in group.params:
                attributes.detach(param)
        self._agreement.exchange([0])  # peers have read this rank's shards: what they lie in may go
        for files in (self.files, self.state_files):
            if files is not None:
                files.close()
                self._agreement.exchange([0])  # nothing is left of any rank's when this returns
        self.groups.clear()  # the one list that the gatherer and the scopes hold too
        self.slot_of = {}
        self._expect_gradients()
        self._views = TransientViews((), self._need)
        self.on_plain_backward = lambda: None
        self.check_files()


def _before_accumulate(me: weakref.ref[ShardingRuntime], index: int, grad: torch.Tensor) -> None:
    """Autograd is about to add to `param.grad`: take an exposed gradient back first, it counts already."""
    runtime = me()
    if runtime is not None:
        runtime.groups[index].grads.unexpose()


def _on_grad(me: weakref.ref[ShardingRuntime], index: int, slot: int, param: torch.Tensor) -> None:
    runtime = me()
    if runtime is not None:
        runtime._on_grad(runtime.groups[index], slot, param)


def _graph_task() -> int:
    """Identity of the backward that is running in this thread; -1 when none is."""
    return int(torch._C._current_graph_task_id())
