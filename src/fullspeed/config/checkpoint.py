"""Sections about state on disk: `checkpoint`, `nebula`, `datastates_ckpt`; and `aio`, how files are read."""

from collections.abc import Mapping
from typing import Annotated, ClassVar, Literal

from pydantic import BeforeValidator, ConfigDict, Field

from fullspeed.config.section import Section
from fullspeed.config.types import NonNegative, Positive, lower


def capital(value: object) -> object:
    """Text with a capital first letter, for choices whose case does not matter."""
    return value.capitalize() if isinstance(value, str) else value


class ParallelWrite(Section):
    """Who writes what."""

    pipeline_stage: bool = Field(False, description="Data-parallel ranks share the writing of a stage's layers.")


class Writer(Section):
    """How bytes reach the disk."""

    type: Annotated[Literal["mock", "python", "fast"], BeforeValidator(lower)] = Field("python", description="Writer.")
    io_buffer_size: Positive = Field(64 * 2**20, description="Bytes per buffer.")
    io_buffer_double: bool = Field(True, description="Fill one buffer while the other is written.")
    show_statistics: bool = Field(False, description="Print speed after each file.")
    data_parallel: Literal["replica", "socket", "machine"] | None = Field(None, description="Ranks that share a file.")
    decoupled: bool = Field(False, description="Write in the background while training goes on.")
    io_multiplier: Positive = Field(1, description="Writers per rank.")


class Checkpoint(Section):
    """Saving and loading the training state."""

    tag_validation: Annotated[Literal["Ignore", "Warn", "Fail"], BeforeValidator(capital)] = Field(
        "Warn", description="What happens when ranks pass different tags."
    )
    layout: Annotated[Literal["fullspeed", "deepspeed"], BeforeValidator(lower)] = Field(
        "fullspeed", description="Files that are written; deepspeed costs a second write. Every layout is loaded."
    )
    load_universal: bool = Field(
        False, description="By default load the checkpoint that `latest_universal` names, where there is one."
    )
    use_node_local_storage: bool = Field(False, description="Each node's first rank writes what rank 0 would.")
    parallel_write: ParallelWrite = Field(default_factory=ParallelWrite, description="Who writes what.")
    checkpoint_serialization: bool = Field(True, description="Zip container; false is torch's old format.")
    writer: Writer | None = Field(None, description="How bytes reach the disk.")
    keep_last: Positive | None = Field(
        None, description="Checkpoints to keep of those that were the latest; older ones are removed after a save."
    )
    save_on_signal: Annotated[str, Field(min_length=1)] | Literal[False] = Field(
        False, description="Directory to save in, before leaving, when SIGTERM or SIGINT asks the job to end."
    )


class Nebula(Section):
    """Azure's asynchronous checkpoint service."""

    enabled: bool = Field(False, description="Save through the service.")
    persistent_storage_path: str | None = Field(None, description="Directory of persistent copies.")
    persistent_time_interval: Positive = Field(100, description="Seconds between persistent copies.")
    num_of_version_in_retention: Positive = Field(2, description="Copies kept.")
    enable_nebula_load: bool = Field(True, description="Load through the service.")
    nebula_load_path: str | None = Field(None, description="Directory to load from.")


class DataStates(Section):
    """The DataStates checkpoint engine; the block's presence has checkpoints written in the background."""

    model_config = ConfigDict(extra="allow")

    host_cache_size: NonNegative | None = Field(None, description="GiB of CPU memory for copies under way.")
    parser_threads: Positive | None = Field(None, description="Threads that lay out tensors.")


class Aio(Section):
    """Asynchronous file access for offload to disk."""

    aliases: ClassVar[Mapping[str, str]] = {"thread_count": "intra_op_parallelism"}

    block_size: Positive = Field(1_048_576, description="Bytes per request.")
    queue_depth: Positive = Field(8, description="Requests under way per thread.")
    intra_op_parallelism: Positive = Field(1, description="Threads per file.")
    single_submit: bool = Field(False, description="Hand requests to the system one by one.")
    overlap_events: bool = Field(True, description="Submit new requests while older ones complete.")
    use_gds: bool = Field(False, description="Read straight into GPU memory (CUDA).")
