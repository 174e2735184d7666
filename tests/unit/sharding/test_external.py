"""Registering parameters with modules that do not own them; what gathers then is tests/distributed's."""

import gc
import weakref

import pytest
from torch import nn

from fullspeed.base.errors import UsageError
from fullspeed.sharding.external import (
    external_parameters,
    follow,
    register_external_parameter,
    unregister_external_parameter,
)


def test_registered_once_in_order_and_taken_back() -> None:
    module, first, second = nn.Identity(), nn.Linear(2, 2).weight, nn.Linear(2, 2).weight
    for param in (first, second, first):
        register_external_parameter(module, param)
    found = external_parameters(module)
    assert len(found) == 2
    assert found[0] is first
    assert found[1] is second
    unregister_external_parameter(module, first)
    assert [param is second for param in external_parameters(module)] == [True]


def test_followers_hear_of_changes_only_and_are_not_kept_alive() -> None:
    class Follower:
        def __init__(self) -> None:
            self.heard: list[nn.Module] = []

        def follow_external(self, module: nn.Module) -> None:
            self.heard.append(module)

    follower, module, param = Follower(), nn.Identity(), nn.Linear(2, 2).weight
    follow(follower)
    register_external_parameter(module, param)
    register_external_parameter(module, param)
    assert follower.heard == [module]
    unregister_external_parameter(module, param)
    assert follower.heard == [module, module]
    gone = weakref.ref(follower)
    del follower
    gc.collect()
    assert gone() is None
    register_external_parameter(module, param)


def test_a_module_does_not_live_on_because_of_its_registrations() -> None:
    module = nn.Linear(2, 2)
    register_external_parameter(module, nn.Linear(2, 2).weight)
    gone = weakref.ref(module)
    del module
    gc.collect()
    assert gone() is None


@pytest.mark.parametrize("call", [register_external_parameter, unregister_external_parameter])
def test_other_things_than_modules_and_parameters_are_refused(call) -> None:
    linear = nn.Linear(2, 2)
    with pytest.raises(UsageError, match=r"torch\.nn\.Module, got Parameter"):
        call(linear.weight, linear)
    with pytest.raises(UsageError, match=r"got a Tensor instead of a torch\.nn\.Parameter"):
        call(linear, linear.weight.detach())
    with pytest.raises(UsageError, match="got a NoneType"):
        call(linear, None)


def test_taking_back_what_was_never_registered_is_refused() -> None:
    module, param = nn.Identity(), nn.Linear(3, 2).weight
    with pytest.raises(UsageError, match=r"shape \(2, 3\) is not registered with this Identity; it has 0"):
        unregister_external_parameter(module, param)
