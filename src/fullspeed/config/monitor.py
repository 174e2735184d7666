"""Sections about watching a run: event sinks, timers, the communication log and profiler windows."""

from typing import Annotated, Literal

from pydantic import BeforeValidator, Field

from fullspeed.config.section import Section
from fullspeed.config.types import Counts, NonNegative, Positive, Texts, lower

LogLevel = Annotated[Literal["debug", "info", "warning", "error", "critical"], BeforeValidator(lower)]


class EventFolder(Section):
    """Events written below a folder of the run."""

    enabled: bool = Field(False, description="Write events on rank 0.")
    output_path: str = Field("", description="Directory; relative to the working directory when empty.")
    job_name: str = Field("DeepSpeedJobName", description="Sub-directory of this run.")


class TensorBoard(EventFolder):
    """Events for TensorBoard."""


class WandB(Section):
    """Events for Weights & Biases."""

    enabled: bool = Field(False, description="Send events from rank 0.")
    group: str | None = Field(None, description="Group of runs.")
    team: str | None = Field(None, description="Team or user.")
    project: str = Field("deepspeed", description="Project.")


class CSVMonitor(EventFolder):
    """Events as CSV files, one per event name."""


class JSONMonitor(EventFolder):
    """Events as JSON lines in `events.jsonl`, one object per update. FullSpeed's own; `fullspeed plot` draws it."""

    job_name: str = Field("run", description="Sub-directory of this run.")


class Dashboard(Section):
    """A table of the newest values in the terminal of rank 0. FullSpeed's own."""

    enabled: bool = Field(False, description="Show it.")
    updates_per_second: Positive = Field(2, description="Times a second the table is drawn at most.")


class Comet(Section):
    """Events for Comet."""

    enabled: bool = Field(False, description="Send events from rank 0.")
    samples_log_interval: Positive = Field(100, description="Samples between two values of one event.")
    project: str | None = Field(None, description="Project.")
    workspace: str | None = Field(None, description="Workspace.")
    api_key: str | None = Field(None, description="Key; better in Comet's own environment variable.")
    experiment_name: str | None = Field(None, description="Name shown for this run.")
    experiment_key: str | None = Field(None, description="Key of an experiment to go on with.")
    online: bool | None = Field(None, description="False writes to disk for a later upload.")
    mode: Literal["get", "create", "get_or_create"] | None = Field(
        None, description="What to do about an old experiment."
    )


class ThroughputTimer(Section):
    """The samples-per-second line."""

    enabled: bool = Field(True, description="Measure and print throughput.")
    synchronized: bool = Field(
        True, description="Wait for the device before reading the clock: exact, a little slower."
    )


class Timers(Section):
    """Timers of the engine."""

    throughput: ThroughputTimer = Field(default_factory=ThroughputTimer, description="Samples per second.")


class TorchProfiler(Section):
    """A window of updates recorded by `torch.profiler`. FullSpeed's own."""

    enabled: bool = Field(False, description="Record one window.")
    start_step: NonNegative = Field(10, description="Updates before the window.")
    num_warmup: NonNegative = Field(1, description="The last of those, traced and thrown away.")
    num_steps: Positive = Field(3, description="Updates recorded.")
    output_path: str = Field("traces", description="Directory of the traces, one Chrome trace per rank.")
    ranks: Counts = Field((0,), description="Ranks that record.")
    record_shapes: bool = Field(False, description="Note the shapes of operands.")
    profile_memory: bool = Field(False, description="Note allocations.")
    with_stack: bool = Field(False, description="Note source lines; slow.")


class CommsLogger(Section):
    """Count and time collectives."""

    enabled: bool = Field(False, description="Record every collective.")
    verbose: bool = Field(False, description="Print each one as it happens.")
    prof_all: bool = Field(True, description="Record all operations, not only `prof_ops`.")
    prof_ops: Texts = Field((), description="Names of operations to record.")
    debug: bool = Field(False, description="Add the calling function to each name.")
