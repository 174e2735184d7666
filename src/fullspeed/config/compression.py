"""Sections about smaller models: `compression_training`, and the older `quantize_training` and friends."""

from collections.abc import Mapping
from typing import Annotated, Literal

from pydantic import BeforeValidator, Field

from fullspeed.config.section import Section
from fullspeed.config.types import Counts, Fraction, NonNegative, Positive, PositiveNumber, Texts, as_tuple

Quantization = Literal["symmetric", "asymmetric"]
Rounding = Literal["nearest", "stochastic"]


class MixedQuantize(Section):
    """Blend of original and quantized weights while quantization begins."""

    enabled: bool = Field(False, description="Blend instead of switching at once.")
    quantize_change_ratio: Fraction = Field(0.001, description="Change of the blend per step.")


class WeightQuantizationShared(Section):
    """What all groups of quantized weights share."""

    enabled: bool = Field(False, description="Quantize weights while training.")
    quantizer_kernel: bool = Field(False, description="Use the fused quantizer.")
    schedule_offset: NonNegative = Field(0, description="Step at which it begins.")
    quantize_groups: Positive = Field(1, description="Scales per matrix.")
    quantize_verbose: bool = Field(False, description="Log changes of precision.")
    quantization_type: Quantization = Field("symmetric", description="One scale, or a scale and a minimum.")
    rounding: Rounding = Field("nearest", description="How values are rounded.")
    quantize_weight_in_forward: bool = Field(False, description="In forward (needs fp32) instead of the optimizer.")
    fp16_mixed_quantize: MixedQuantize = Field(default_factory=MixedQuantize, description="Blend at the start.")


class ActivationQuantizationShared(Section):
    """What all groups of quantized activations share."""

    enabled: bool = Field(False, description="Quantize activations while training.")
    quantization_type: Quantization = Field("symmetric", description="One scale, or a scale and a minimum.")
    range_calibration: Literal["dynamic", "static"] = Field("dynamic", description="When ranges are measured.")
    schedule_offset: NonNegative = Field(1000, description="Step at which it begins.")


class PruningShared(Section):
    """What all groups of pruned weights share."""

    enabled: bool = Field(False, description="Prune while training.")
    method: Literal["l1", "topk", "snip_momentum"] = Field("l1", description="How importance is measured.")
    schedule_offset: NonNegative = Field(1000, description="Step at which it begins.")
    schedule_offset_end: NonNegative | None = Field(None, description="Step at which it ends; unset is the begin.")
    schedule_offset_stride: Positive = Field(1, description="Steps between prunings.")
    block_pattern: str = Field("4x1", description="Shape of the blocks pruned together.")
    dense_ratio: Fraction = Field(0.1, description="Share of weights kept.")
    excluded_modules: Texts = Field((), description="Modules left alone.")
    num_heads: Positive | None = Field(None, description="Attention heads; for head pruning.")


class GroupParams(Section):
    """Numbers of one group of modules."""

    start_bits: Positive | None = Field(None, description="Bits at the start.")
    target_bits: Positive | None = Field(None, description="Bits at the end; required for weights.")
    quantization_period: Positive = Field(1, description="Steps between changes of precision.")
    bits: Positive | None = Field(None, description="Bits of activations.")
    dense_ratio: Fraction | None = Field(None, description="Share of weights kept.")


class Group(Section):
    """Modules that are treated alike."""

    params: GroupParams = Field(default_factory=GroupParams, description="Numbers of the group.")
    modules: Texts = Field((), description="Patterns of module names.")
    related_modules: Annotated[tuple[Texts, ...] | None, BeforeValidator(as_tuple)] = Field(
        None, description="Modules that shrink along, a list per entry of `modules`."
    )


class WeightQuantizationTechnique(Section):
    """Quantize weights."""

    shared_parameters: WeightQuantizationShared = Field(default_factory=WeightQuantizationShared, description="Common.")
    different_groups: Mapping[str, Group] = Field(default_factory=dict, description="Groups by name.")


class ActivationQuantizationTechnique(Section):
    """Quantize activations."""

    shared_parameters: ActivationQuantizationShared = Field(
        default_factory=ActivationQuantizationShared, description="Common."
    )
    different_groups: Mapping[str, Group] = Field(default_factory=dict, description="Groups by name.")


class PruningTechnique(Section):
    """Prune weights, rows, heads or channels."""

    shared_parameters: PruningShared = Field(default_factory=PruningShared, description="Common.")
    different_groups: Mapping[str, Group] = Field(default_factory=dict, description="Groups by name.")


class LayerReduction(Section):
    """Build a student with fewer layers."""

    enabled: bool = Field(False, description="Keep some of the teacher's layers.")
    keep_number_layer: Positive | None = Field(None, description="Layers of the student.")
    module_name_prefix: str = Field("", description="Name of the list of layers.")
    teacher_layer: Counts = Field((), description="Layers of the teacher to start from.")
    other_module_name: Texts = Field((), description="Further modules to copy.")


class CompressionTraining(Section):
    """Quantize, prune and distil while training."""

    weight_quantization: WeightQuantizationTechnique = Field(
        default_factory=WeightQuantizationTechnique, description="Fewer bits per weight."
    )
    activation_quantization: ActivationQuantizationTechnique = Field(
        default_factory=ActivationQuantizationTechnique, description="Fewer bits per activation."
    )
    sparse_pruning: PruningTechnique = Field(default_factory=PruningTechnique, description="Zero single weights.")
    row_pruning: PruningTechnique = Field(default_factory=PruningTechnique, description="Remove rows.")
    head_pruning: PruningTechnique = Field(default_factory=PruningTechnique, description="Remove attention heads.")
    channel_pruning: PruningTechnique = Field(default_factory=PruningTechnique, description="Remove channels.")
    layer_reduction: LayerReduction = Field(default_factory=LayerReduction, description="Fewer layers.")


class Eigenvalue(Section):
    """Curvature of the loss by power iteration, to time changes of precision."""

    enabled: bool = Field(False, description="Estimate it.")
    verbose: bool = Field(False, description="Print the estimates.")
    max_iter: Positive = Field(100, description="Iterations at most.")
    tol: PositiveNumber = Field(1e-2, description="Relative change at which iteration ends.")
    stability: PositiveNumber = Field(1e-6, description="Added to denominators.")
    gas_boundary_resolution: Positive = Field(1, description="Updates between estimates.")
    layer_name: str = Field("bert.encoder.layer", description="Name of the list of layers.")
    layer_num: NonNegative = Field(0, description="Number of layers.")


class QuantizeBits(Section):
    """Bits at both ends of the schedule."""

    start_bits: Positive = Field(16, description="Bits at the start.")
    target_bits: Positive = Field(8, description="Bits at the end.")


class QuantizeSchedule(Section):
    """When precision changes."""

    quantize_period: Positive = Field(100, description="Steps before the first change; doubles at each.")
    schedule_offset: NonNegative = Field(0, description="Step at which it begins.")


class QuantizeAlgo(Section):
    """How values are quantized."""

    q_type: Quantization = Field("symmetric", description="One scale, or a scale and a minimum.")
    rounding: Rounding = Field("nearest", description="How values are rounded.")


class QuantizeTraining(Section):
    """Mixture of quantization: lower precision step by step while training."""

    enabled: bool = Field(False, description="Quantize while training.")
    quantize_verbose: bool = Field(False, description="Log changes of precision.")
    quantizer_kernel: bool = Field(False, description="Use the fused quantizer.")
    quantize_type: Quantization = Field("symmetric", description="One scale, or a scale and a minimum.")
    quantize_bits: QuantizeBits = Field(default_factory=QuantizeBits, description="Bits at both ends.")
    quantize_schedule: QuantizeSchedule = Field(default_factory=QuantizeSchedule, description="When.")
    quantize_groups: Positive = Field(1, description="Scales per matrix.")
    quantize_algo: QuantizeAlgo = Field(default_factory=QuantizeAlgo, description="How.")
    fp16_mixed_quantize: MixedQuantize = Field(default_factory=MixedQuantize, description="Blend at the start.")
    eigenvalue: Eigenvalue = Field(default_factory=Eigenvalue, description="Time changes by curvature.")


class SparseAttention(Section):
    """Block-sparse attention patterns, for modules the user builds from them."""

    mode: Literal["fixed", "dense", "variable", "bigbird", "bslongformer"] = Field("fixed", description="Pattern.")
    block: Positive = Field(16, description="Tokens per block.")
    different_layout_per_head: bool = Field(False, description="A pattern of its own for each head.")
    num_local_blocks: Positive = Field(4, description="Blocks in a local window.")
    num_global_blocks: Positive = Field(1, description="Blocks every token sees.")
    attention: Literal["bidirectional", "unidirectional"] = Field("bidirectional", description="Direction.")
    horizontal_global_attention: bool = Field(False, description="Global blocks see every token too.")
    num_different_global_patterns: Positive = Field(1, description="Global patterns over heads.")
    num_random_blocks: NonNegative = Field(0, description="Random blocks per row.")
    local_window_blocks: Counts = Field((4,), description="Blocks per local window, in order.")
    global_block_indices: Counts = Field((0,), description="Indices of global blocks.")
    global_block_end_indices: Counts | None = Field(None, description="Ends of ranges of global blocks.")
    num_sliding_window_blocks: Positive = Field(3, description="Blocks of the sliding window.")


class ProgressiveLayerDrop(Section):
    """Drop layers at random, more and more."""

    enabled: bool = Field(False, description="Pass `pld_theta` to forward.")
    theta: Fraction = Field(0.5, description="Keep probability at the end.")
    gamma: PositiveNumber = Field(0.001, description="Speed of the change.")
