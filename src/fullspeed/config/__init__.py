"""The configuration: DeepSpeed's JSON as frozen models; a mistake in it is an error that says what to do."""

from fullspeed.config.batch import Batch
from fullspeed.config.load import load_config
from fullspeed.config.ranks import check_ranks
from fullspeed.config.root import Config, require_resolved, resolve_batch, unresolved_auto
from fullspeed.config.supported import check_offload, check_supported

__all__ = [
    "Batch",
    "Config",
    "check_offload",
    "check_ranks",
    "check_supported",
    "load_config",
    "require_resolved",
    "resolve_batch",
    "unresolved_auto",
]
