"""What may change about a running engine: how its units are executed, and which parameters it trains."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

from torch import nn

from fullspeed.accelerator import get_accelerator
from fullspeed.base.errors import UsageError
from fullspeed.sharding.optimizer import ShardedOptimizer
from fullspeed.sharding.runtime import ShardingRuntime
from fullspeed.sharding.unfreeze import unfreeze


class Changes:
    """Mixin: `compile` and `unfreeze`."""

    module: nn.Module
    runtime: ShardingRuntime
    lr_scheduler: Any
    _require_optimizer: Callable[[str], ShardedOptimizer]

    def compile(
        self,
        backend: str | Callable[..., Any] | None = None,
        compile_kwargs: dict[str, Any] | None = None,
        schedule: Any = None,
        compiled_autograd_enabled: bool = False,
    ) -> None:
        """Compile the module's units (its transformer blocks, say) in place with torch.compile, at any stage.

        What is gathered and freed around a unit stays outside of what is compiled, so a unit has no graph break of
        ours, and units of one class and shape are compiled once. A later call replaces the settings of an earlier one.

        Args:
            backend: name or function, as for torch.compile; by default the accelerator's choice.
            compile_kwargs: further arguments of torch.compile: mode, fullgraph, dynamic, options.
            schedule: a schedule of compiler passes; refused, there are none.
            compiled_autograd_enabled: compile backward across its hooks; refused, they communicate.

        Raises:
            UsageError: an argument is refused.
        """
        if schedule is not None:
            raise UsageError("schedule: there are no compiler passes to schedule in this version; leave it out")
        if compiled_autograd_enabled:
            raise UsageError(
                "compiled_autograd_enabled: gradients are reduced in hooks that cannot be compiled; leave it out"
            )
        self.runtime.scopes.compile(backend or get_accelerator().get_compile_backend(), compile_kwargs or {})

    @property
    def is_compiled(self) -> bool:
        """Whether `compile` was called."""
        return self.runtime.scopes.is_compiled

    def unfreeze(self, params: Iterable[nn.Parameter | str], *, into: int | None = None, **options: Any) -> None:
        """Train parameters that were frozen at initialize. Collective, between steps; all ranks pass the same.

        They require gradients from now on. Parameters that the optimizer was given at initialize are trained in their
        own param group; others make a new one, as `optimizer.add_param_group` would. The optimizer's state of them
        starts afresh, and masters start from the resident values.

        Args:
            params: parameters of the module, or their names.
            into: join this param group, and so its learning rate and schedule, instead of a new one.
            options: of the new param group: lr, weight_decay, ...

        Raises:
            UsageError: a parameter is none of this engine's; `into` or `options` do not apply; or there is a learning
                rate schedule, which was made for the param groups there are.
        """
        optimizer = self._require_optimizer("unfreeze")
        by_name = dict(self.module.named_parameters(remove_duplicate=False))
        given = list(params)  # of a generator there is only one pass
        unknown = [each for each in given if isinstance(each, str) and each not in by_name]
        if unknown:
            raise UsageError(f"unfreeze: the module has no parameter named {', '.join(unknown)}")
        chosen = [by_name[each] if isinstance(each, str) else each for each in given]
        unfreeze(optimizer, chosen, into, options)

    def _before_new_param_group(self) -> None:
        """A schedule made for fewer groups would fail in the middle of an update."""
        if self.lr_scheduler is not None:
            raise UsageError(
                f"{type(self.lr_scheduler).__name__} steers the param groups it was made for, not a new one; join one "
                f"of them with engine.unfreeze(params, into=0), or set engine.lr_scheduler = None first and assign a "
                f"schedule made afterwards"
            )
