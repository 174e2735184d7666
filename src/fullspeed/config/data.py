"""Sections about data: curriculum, sampling, dynamic batches and random layer-token dropping."""

from collections.abc import Mapping
from typing import Any, Literal

from pydantic import Field

from fullspeed.config.section import Section
from fullspeed.config.types import Count, Counts, NonNegative, Positive

ScheduleType = Literal["fixed_linear", "fixed_root", "fixed_discrete", "custom"]


class CurriculumLearning(Section):
    """Curriculum over sequence length, passed to forward as `curriculum_seqlen`."""

    enabled: bool = Field(False, description="Grow the difficulty during training.")
    curriculum_type: str = Field("seqlen", description="What difficulty means.")
    min_difficulty: Positive | None = Field(None, description="First difficulty; tokens for `seqlen`.")
    max_difficulty: Positive | None = Field(None, description="Last difficulty; tokens for `seqlen`.")
    schedule_type: ScheduleType | None = Field(None, description="Form of the growth.")
    schedule_config: Mapping[str, Any] = Field(default_factory=dict, description="Parameters of the growth.")


class CurriculumMetric(Section):
    """One measure of difficulty and how it grows."""

    index_to_sample_path: str | None = Field(None, description="File from difficulty index to samples.")
    index_to_metric_path: str | None = Field(None, description="File from difficulty index to values.")
    difficulty_type: Literal["value", "percentile"] = Field("value", description="How a difficulty selects samples.")
    clustering_type: Literal["schedule_based", "single_cluster"] = Field("schedule_based", description="Grouping.")
    min_difficulty: Positive | None = Field(None, description="First difficulty.")
    max_difficulty: Positive | None = Field(None, description="Last difficulty.")
    schedule_type: ScheduleType | None = Field(None, description="Form of the growth.")
    schedule_config: Mapping[str, Any] = Field(default_factory=dict, description="Parameters of the growth.")


class SamplingCurriculum(Section):
    """Curriculum over samples, by any number of metrics."""

    enabled: bool = Field(False, description="Draw samples by difficulty.")
    data_cluster_path: str | None = Field(None, description="Directory for the lists of samples in use.")
    curriculum_metrics: Mapping[str, CurriculumMetric] = Field(default_factory=dict, description="Metric by name.")


class DynamicBatching(Section):
    """Batches by tokens instead of samples."""

    enabled: bool = Field(False, description="Pack samples up to `max_tokens`.")
    metrics_path: str | None = Field(None, description="Directory of the sequence-length index.")
    lr_scaling_method: Literal["linear", "sqrt", "none"] = Field("linear", description="Rate by batch size.")
    min_batch_size: Positive = Field(1, description="Fewest samples in a batch.")
    max_batch_size: Positive | None = Field(None, description="Most samples in a batch.")
    sequence_picking_order: Literal["dataloader", "random", "seqlen"] = Field("dataloader", description="Order.")
    max_tokens: Positive | None = Field(None, description="Tokens per batch; required when enabled.")
    verbose: bool = Field(False, description="Print the batches made.")


class DataSampling(Section):
    """Which samples a step sees."""

    enabled: bool = Field(False, description="Use the difficulty-aware sampler.")
    num_epochs: Positive = Field(1000, description="Epochs to draw from the data.")
    num_workers: NonNegative = Field(0, description="Loader processes per rank.")
    pin_memory: bool = Field(False, description="Page-lock batches for faster copies to the device.")
    curriculum_learning: SamplingCurriculum = Field(default_factory=SamplingCurriculum, description="By difficulty.")
    dynamic_batching: DynamicBatching = Field(default_factory=DynamicBatching, description="By tokens.")


class RandomLTDScheduleConfig(Section):
    """Speed of the growth of kept tokens."""

    require_steps: Positive | None = Field(None, description="Steps until all tokens are kept.")
    seq_per_step: Positive | None = Field(None, description="Tokens added at a time.")


class RandomLTDSchedule(Section):
    """How many tokens the dropping layers keep."""

    min_value: Positive | None = Field(None, description="Tokens kept at first.")
    max_value: Positive | None = Field(None, description="Tokens kept at the end.")
    schedule_type: Literal["fixed_linear"] = Field("fixed_linear", description="Form of the growth.")
    schedule_config: RandomLTDScheduleConfig = Field(default_factory=RandomLTDScheduleConfig, description="Its speed.")


class LayerTokenLRSchedule(Section):
    """Learning rate by kept tokens."""

    enabled: bool = Field(False, description="Not supported anywhere; must be false.")
    total_layer_tokens: Positive | None = Field(None, description="Total layer tokens.")
    warmup_layer_tokens: Positive | None = Field(None, description="Layer tokens of the rise.")
    warmup_type: str | None = Field(None, description="Form of the rise.")


class RandomLTD(Section):
    """Random layer-token dropping."""

    enabled: bool = Field(False, description="Middle layers see a random part of the tokens.")
    total_layer_num: Positive | None = Field(None, description="Layers of the model.")
    random_ltd_layer_num: Positive | None = Field(None, description="Layers that drop tokens.")
    random_ltd_layer_id: Counts = Field((), description="Their indices.")
    model_mask_name: str | None = Field(None, description="Forward argument that holds the attention mask.")
    model_type: Literal["encoder", "decoder"] = Field("decoder", description="Kind of attention.")
    hidden_state_order: Literal["batch_seq_dim", "seq_batch_dim"] = Field("batch_seq_dim", description="Layout.")
    random_ltd_schedule: RandomLTDSchedule = Field(default_factory=RandomLTDSchedule, description="Tokens kept.")
    layer_token_lr_schedule: LayerTokenLRSchedule = Field(default_factory=LayerTokenLRSchedule, description="Rate.")
    global_batch_size: Positive | None = Field(None, description="Samples per step; set by the engine.")
    micro_batch_size: Positive | None = Field(None, description="Samples per forward; set by the engine.")


class DataRouting(Section):
    """Which tokens a layer sees."""

    enabled: bool = Field(False, description="Route tokens around layers.")
    random_ltd: RandomLTD = Field(default_factory=RandomLTD, description="Random layer-token dropping.")


class DataEfficiency(Section):
    """Use less data or fewer tokens for the same quality."""

    enabled: bool = Field(False, description="Switch for the whole section.")
    seed: Count = Field(1234, description="Seed of sampling and dropping.")
    data_sampling: DataSampling = Field(default_factory=DataSampling, description="Which samples a step sees.")
    data_routing: DataRouting = Field(default_factory=DataRouting, description="Which tokens a layer sees.")
