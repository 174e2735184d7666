"""Sections about splitting the model: `pipeline`, `tensor_parallel` and `expert_parallel`."""

from collections.abc import Mapping
from typing import Annotated, Any, ClassVar, Literal

from pydantic import BeforeValidator, Field

from fullspeed.config.section import Section
from fullspeed.config.types import Count, DType, NonNegative, Number, Positive, Texts, as_tuple, lower, whole

Auto = Literal["auto"]


class Pipeline(Section):
    """Pipeline parallelism; the pipeline module's own arguments decide stages and cuts."""

    stages: Auto | Positive = Field("auto", description="Number of stages; the module decides.")
    partition: str = Field("best", description="How layers are dealt to stages; the module decides.")
    seed_layers: bool = Field(False, description="Seed the generator before each layer is built.")
    activation_checkpoint_interval: NonNegative = Field(0, description="Layers per recomputed unit; 0 is off.")
    pipe_partitioned: bool = Field(True, description="Shard activations between stages over model-parallel ranks.")
    grad_partitioned: bool = Field(True, description="Shard their gradients too.")
    use_reentrant: bool | None = Field(None, description="Kind of recomputation; unset is true.")


class TensorParallelGroup(Section):
    """The lower-level form of the degree."""

    tp_size: Positive = Field(1, description="Ranks that share each layer.")
    tp_grain_size: Positive = Field(1, description="Widths are cut at multiples of this.")
    mpu: Any = Field(None, description="Object that describes model-parallel groups.")
    tp_group: Any = Field(None, description="Process group to use.")


class LayerSpec(Section):
    """How the parameters whose names match are cut."""

    patterns: Texts = Field((), description="Regular expressions that match full parameter names.")
    partition_type: Annotated[Literal["column", "row", "skip"], BeforeValidator(lower)] = Field(
        "column", description="Cut the output, cut the input, or leave whole."
    )
    shape: Annotated[tuple[Any, ...] | None, BeforeValidator(as_tuple)] = Field(
        None, description="Sub-blocks of a fused weight, such as [2, -1]."
    )
    partition_dim: Count | None = Field(None, description="Dimension to cut; unset is 0 for column, 1 for row.")
    model_types: Texts | None = Field(None, description="Only for these model types.")
    gather_output: bool = Field(False, description="Make the output whole on every rank.")
    grad_allreduce: bool = Field(False, description="Sum the gradient over the ranks.")


class PartitionConfig(Section):
    """Rules that say which layer is cut how."""

    use_default_specs: bool = Field(True, description="Keep the preset's rules besides these.")
    strict_mode: bool = Field(False, description="A layer without a rule is an error.")
    embedding_partition_dim: Count = Field(1, description="Dimension along which embeddings are cut.")
    lm_head_patterns: Texts = Field(("lm_head", "embed_out"), description="Names of the output layer.")
    layer_specs: Annotated[tuple[LayerSpec, ...], BeforeValidator(as_tuple)] = Field((), description="The rules.")


class TensorParallel(Section):
    """Split layers over ranks."""

    aliases: ClassVar[Mapping[str, str]] = {
        "tensor_parallel": "tp",
        "kernel_inject": "replace_with_kernel_inject",
    }

    autotp_size: NonNegative = Field(0, description="Ranks that share each layer; 0 and 1 are off.")
    preset_model: Literal["llama", "bloom", "chatglm", "mixtral", "deepseek_v2", "qwen2", "phi3"] | None = Field(
        None, description="Rules of a known model family."
    )
    partition_config: PartitionConfig | None = Field(None, description="Own rules; they go before a preset.")
    tp_overlap_comm: bool = Field(False, description="Overlap the sums between ranks with computation.")
    tp: TensorParallelGroup = Field(default_factory=TensorParallelGroup, description="The lower-level form.")
    dtype: DType = Field("fp16", description="Format weights are loaded in.")
    keep_module_on_host: bool = Field(False, description="Load in CPU memory and move shards only.")
    replace_with_kernel_inject: bool = Field(False, description="Replace layers by fused ones.")
    injection_policy_tuple: Any = Field(None, description="Names of layers whose outputs are summed.")
    vocab_parallel_lm_head: bool | None = Field(None, description="Shard the output layer over the vocabulary.")
    vocab_parallel_ce_backend: Literal["torch", "liger"] = Field("torch", description="Its cross-entropy.")


class ExpertParallel(Section):
    """Split experts over ranks."""

    enabled: bool = Field(False, description="Replace matching blocks by expert-parallel ones.")
    autoep_size: Positive = Field(1, description="Ranks that share the experts of a layer.")
    expert_tensor_parallel_size: Annotated[Literal[1], BeforeValidator(whole)] = Field(
        1, description="Ranks that share one expert; only 1."
    )
    validate_folding_routing: bool = Field(False, description="Check routing when axes are folded.")
    preset_model: Literal[
        "mixtral", "qwen2_moe", "qwen3_moe", "qwen3_5_moe", "deepseek_v2", "deepseek_v3", "minimax_m3"
    ] | None = Field(None, description="Rules of a known model family.")  # fmt: skip
    moe_layer_pattern: str | None = Field(None, description="Pattern of the blocks' names.")
    expert_pattern: str | None = Field(None, description="Name of the experts inside a block.")
    router_pattern: str | None = Field(None, description="Name of the gate inside a block.")
    use_grouped_mm: bool = Field(True, description="One grouped product for all local experts.")
    disable_triton_grouped_mm: bool = Field(False, description="Use torch's grouped product.")
    route_norm: bool | None = Field(None, description="Normalise the gate's weights over the chosen experts.")
    route_scale: Number = Field(1.0, description="Factor of the gate's weights.")
    score_apply: Literal["auto", "pre", "post"] = Field("auto", description="Weigh inputs or outputs of experts.")
    score_func: Literal["auto", "softmax", "sigmoid"] = Field("auto", description="From logits to weights.")
    top_k: Auto | Positive = Field("auto", description="Experts per token.")
    num_expert_groups: Positive | None = Field(None, description="Groups of experts for limited routing.")
    num_limited_groups: Positive | None = Field(None, description="Groups a token may use.")
    load_balance_coeff: None = Field(None, description="Must stay unset.")
    routed_scaling_factor: Auto | Number = Field("auto", description="Factor of the experts' sum.")
    expert_w1: str | None = Field(None, description="Name of the gate projection.")
    expert_w2: str | None = Field(None, description="Name of the down projection.")
    expert_w3: str | None = Field(None, description="Name of the up projection; null says there is none.")
    num_experts_attr: str | None = Field(None, description="Attribute of the model's config: number of experts.")
    top_k_attr: str | None = Field(None, description="Attribute of the model's config: experts per token.")
    has_shared_experts: bool | None = Field(None, description="Blocks have experts that every token uses.")
    shared_experts_pattern: str | None = Field(None, description="Their name.")
    shared_experts_gate_pattern: str | None = Field(None, description="Name of their gate.")
    combine_impl: Literal["auto", "weighted_sum", "legacy_bmm", "fused_weighted_sum"] = Field(
        "auto", description="How expert outputs are summed."
    )
    async_split_plan: bool = Field(False, description="Exchange sizes while other work goes on.")
    row_weighting_impl: Literal["auto", "eager", "fused"] = Field("auto", description="How rows are weighed.")
    gate_up_impl: Literal["separate", "fused"] = Field("separate", description="One product or two.")
    comm_backend: Literal["comm", "deepep"] = Field("comm", description="Transport of tokens.")
    comm_num_sm: Positive = Field(12, description="Multiprocessors the transport may use.")
    comm_qp_margin: NonNegative = Field(4, description="Spare queue pairs of the transport.")
    comm_max_tokens_per_rank: NonNegative = Field(0, description="Tokens a rank sends at most; 0 is unbounded.")
    expert_activation: str | None = Field(None, description="Name of the experts' activation function.")
