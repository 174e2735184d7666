"""What the server that ranks are forked from imports once, so that no rank has to. Initialises no device."""

import contextlib
import importlib

MODULES = (
    "pytest",
    "torch",
    "torch._dynamo",  # creating an optimizer imports it
    "torch.distributed.tensor",
    "torch.distributed.fsdp",
    "fullspeed.comm",
    "fullspeed.engine.initialize",
    "tests.ranks",
)

for name in MODULES:
    # A module that cannot be imported is the business of the rank that needs it: there the error is reported.
    with contextlib.suppress(Exception):
        importlib.import_module(name)
