"""What the server that ranks are forked from does once, so that no rank has to. Initialises no device."""

import contextlib
import gc
import importlib
import os

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
VARIABLE = "TESTS_PRELOAD"  # names of further modules, those of `PRELOAD` in the test files of this run

if os.environ.get(VARIABLE):
    # Hugging Face's libraries look for a deepspeed when they are imported, and no more.
    from fullspeed import compat

    compat.activate()
for name in (*MODULES, *os.environ.get(VARIABLE, "").split()):
    # A module that cannot be imported is the business of the rank that needs it: there the error is reported.
    with contextlib.suppress(Exception):
        importlib.import_module(name)
with contextlib.suppress(Exception):
    from fullspeed.config.load import load_config

    load_config({"train_batch_size": 1})  # pydantic builds validators at their first use
# Collections in ranks need not look at what was imported here, nor copy the pages it is on.
gc.collect()
gc.freeze()
