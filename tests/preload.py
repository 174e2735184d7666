"""What the server that ranks are forked from does once, so that no rank has to. Initialises no device."""

import contextlib
import gc
import importlib

MODULES = (
    "pytest",
    "torch",
    "torch._dynamo",  # creating an optimizer imports it
    "torch.distributed.tensor",
    "torch.distributed.fsdp",
    "transformers.models.llama.modeling_llama",
    "fullspeed.comm",
    "fullspeed.config.load",
    "fullspeed.engine.initialize",
    "tests.ranks",
)

for name in MODULES:
    # A module that cannot be imported is the business of the rank that needs it: there the error is reported.
    with contextlib.suppress(Exception):
        importlib.import_module(name)
with contextlib.suppress(Exception):
    from fullspeed.config.load import load_config

    load_config({"train_batch_size": 1})  # pydantic builds validators at their first use
# Collections in ranks need not look at the modules above, nor copy the pages they are on.
gc.collect()
gc.freeze()
