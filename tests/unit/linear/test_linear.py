"""Linear layers with a frozen base: what they compute, what they keep, and how a model gets them."""

from __future__ import annotations

import copy
import math
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn import functional as F

from fullspeed import ConfigError, UsageError
from fullspeed.linear import (
    Init,
    LoRAConfig,
    LoRAOptimizedLinear,
    OptimizedLinear,
    QuantizationConfig,
    QuantizedLinear,
    init_lora,
    merged_state_dict,
)

FORMS = [QuantizationConfig(q_bits=8, group_size=64), QuantizationConfig(q_bits=4, group_size=32)]


def layer(lora: LoRAConfig | None = None, quant: QuantizationConfig | None = None, **more: Any) -> Any:
    """Odd sizes, so that blocks do not end where rows do; adapters that do something."""
    torch.manual_seed(0)
    made = OptimizedLinear(37, 21, lora_config=lora, quantization_config=quant, dtype=torch.float32, **more)
    if isinstance(made, LoRAOptimizedLinear):
        nn.init.normal_(made.lora_weight_2.weight)
    return made


def inputs(dtype: torch.dtype = torch.float32) -> torch.Tensor:
    return torch.randn(2, 5, 37, generator=torch.Generator().manual_seed(1)).to(dtype).requires_grad_()


def test_without_configurations_the_layer_is_an_ordinary_one() -> None:
    made = OptimizedLinear(3, 2, bias=True, dtype=torch.float32)
    assert type(made) is nn.Linear
    assert made.weight.requires_grad
    assert made.bias is not None


def test_an_adapted_layer_computes_the_formula_and_trains_only_adapters() -> None:
    made, x = layer(LoRAConfig(lora_r=4, lora_alpha=10.0)), inputs()
    first, second = made.lora_weight_1.weight, made.lora_weight_2.weight
    assert (first.shape, second.shape) == ((4, 37), (21, 4))
    expected = F.linear(x, made.weight) + 10.0 / 4 * (x @ first.T) @ second.T
    torch.testing.assert_close(made(x), expected)
    made(x).sum().backward()
    assert made.weight.grad is None
    assert first.grad.any()
    assert second.grad.any()
    torch.testing.assert_close(F.linear(x, made.merged_weight()), expected)


def test_a_fresh_adapter_changes_nothing() -> None:
    made = OptimizedLinear(37, 21, lora_config=LoRAConfig(lora_r=4), dtype=torch.float32)
    torch.testing.assert_close(made(inputs()), F.linear(inputs(), made.weight), rtol=0, atol=0)
    bound = 1 / math.sqrt(37)  # Kaiming-uniform with a = sqrt(5)
    assert 0.8 * bound < made.lora_weight_1.weight.abs().max() <= bound


@pytest.mark.parametrize("quant", FORMS, ids=lambda form: f"{form.q_bits} bits")
def test_codes_are_within_half_a_scale_of_the_weight(quant: QuantizationConfig) -> None:
    plain, made = layer(), layer(quant=quant)
    assert made.weight.dtype == torch.uint8
    assert not made.weight.requires_grad
    assert made.weight.nbytes < plain.weight.nbytes / (3 if quant.q_bits == 8 else 5)
    largest_code = {8: 127, 4: 7}[quant.q_bits]
    for values, read in zip(
        plain.weight.flatten().split(quant.group_size),
        made.full_weight().flatten().split(quant.group_size),
        strict=True,
    ):
        error = (values - read).abs().max()
        assert 0 < error <= values.abs().max() / largest_code / 2 * (1 + 1e-5)


@pytest.mark.parametrize("quant", FORMS, ids=lambda form: f"{form.q_bits} bits")
@pytest.mark.parametrize("lora", [None, LoRAConfig(lora_r=4)], ids=["base", "adapted"])
def test_a_layer_of_codes_computes_with_what_the_codes_mean(quant: QuantizationConfig, lora: LoRAConfig | None) -> None:
    made, x, other = layer(lora, quant), inputs(), inputs()
    merged = made.merged_weight()
    torch.testing.assert_close(made(x), F.linear(other, merged))
    made(x).square().sum().backward()
    F.linear(other, merged).square().sum().backward()
    torch.testing.assert_close(x.grad, other.grad, rtol=1e-4, atol=1e-4)


def test_backward_keeps_codes_and_no_weight() -> None:
    made, kept = layer(quant=FORMS[0]), []
    with torch.autograd.graph.saved_tensors_hooks(lambda tensor: kept.append(tensor) or tensor, lambda tensor: tensor):
        made(inputs())
    assert [tensor.dtype for tensor in kept] == [torch.uint8]


def test_codes_follow_the_dtype_of_the_input_and_autocast() -> None:
    made = layer(LoRAConfig(lora_r=4), FORMS[0])
    wide = made(inputs())
    narrow = copy.deepcopy(made).to(torch.bfloat16)(inputs(torch.bfloat16))
    assert narrow.dtype == torch.bfloat16
    torch.testing.assert_close(narrow.float(), wide, rtol=0.05, atol=0.1)
    x = inputs()
    with torch.autocast("cpu", torch.bfloat16):
        cast = made(x)
    assert cast.dtype == torch.bfloat16
    cast.float().sum().backward()
    torch.testing.assert_close(cast.float(), wide, rtol=0.05, atol=0.1)
    assert x.grad.dtype == torch.float32


def test_a_bias_beside_codes_is_added_and_trained() -> None:
    made = QuantizedLinear(37, 21, bias=True, quantization_config=FORMS[0], dtype=torch.float32)
    torch.testing.assert_close(made(inputs()), F.linear(inputs(), made.full_weight(), made.bias))
    made(inputs()).sum().backward()
    torch.testing.assert_close(made.bias.grad, torch.full((21,), 10.0))


@pytest.mark.parametrize("quant", [None, *FORMS], ids=["numbers", "8 bits", "4 bits"])
def test_the_state_dict_makes_the_same_layer_again(quant: QuantizationConfig | None) -> None:
    made, other = (
        layer(LoRAConfig(lora_r=4), quant),
        OptimizedLinear(37, 21, lora_config=LoRAConfig(lora_r=4), quantization_config=quant, dtype=torch.float32),
    )
    assert set(made.state_dict()) == {"weight", "lora_weight_1.weight", "lora_weight_2.weight"}
    other.load_state_dict(made.state_dict())
    torch.testing.assert_close(other(inputs()), made(inputs()), rtol=0, atol=0)


def test_the_weight_of_an_ordinary_layer_is_turned_into_codes_when_it_is_loaded() -> None:
    plain, made = (
        nn.Linear(37, 21),
        QuantizedLinear(37, 21, bias=True, quantization_config=FORMS[0], dtype=torch.float32),
    )
    made.load_state_dict(plain.state_dict())
    torch.testing.assert_close(made(inputs()), plain(inputs()), rtol=0, atol=0.02)
    assert made.weight.dtype == torch.uint8


def test_adapters_can_wait_for_init_lora() -> None:
    made = nn.Sequential(delayed(), nn.Linear(21, 2))
    with pytest.raises(UsageError, match="init_lora"):
        made(inputs())
    init_lora(made)
    assert made(inputs()).shape == (2, 5, 2)
    trained = {name for name, param in made.named_parameters() if param.requires_grad}
    assert trained == {"0.lora_weight_1.weight", "0.lora_weight_2.weight"}
    with pytest.raises(UsageError, match="no LoRAOptimizedLinear"):
        init_lora(nn.Linear(2, 2))


def delayed() -> LoRAOptimizedLinear:
    config = LoRAConfig(lora_r=4, delay_lora_init=True)
    return LoRAOptimizedLinear(37, 21, lora_config=config, quantization_config=FORMS[0], dtype=torch.float32)


class Attention(nn.Module):
    """Two layers that are named as targets, one that is not."""

    def __init__(self) -> None:
        super().__init__()
        self.q_proj = nn.Linear(8, 8, bias=False)
        self.o_proj = nn.Linear(8, 8, bias=False)
        self.head = nn.Linear(8, 3)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.head(self.o_proj(torch.tanh(self.q_proj(x))))


@pytest.mark.parametrize("quant", [None, FORMS[0]], ids=["numbers", "codes"])
def test_in_the_context_targets_become_adapted_layers_that_compute_the_same(quant: QuantizationConfig | None) -> None:
    torch.manual_seed(0)
    plain = Attention()
    torch.manual_seed(0)
    with Init(LoRAConfig(lora_r=2), quant):
        model = Attention()
    assert type(nn.Linear(2, 2)) is nn.Linear
    assert type(Attention().q_proj) is nn.Linear
    assert isinstance(model.q_proj, LoRAOptimizedLinear)
    assert isinstance(model.o_proj, LoRAOptimizedLinear)
    assert type(model.head) is nn.Linear
    x = torch.randn(4, 8)
    torch.testing.assert_close(model(x), plain(x), rtol=0, atol=0 if quant is None else 0.02)
    trained = {name.split(".")[0] for name, param in model.named_parameters() if param.requires_grad}
    assert trained == {"q_proj", "o_proj"}


def test_weights_that_are_loaded_in_the_context_are_turned_into_codes_at_its_end() -> None:
    plain = Attention()
    with Init(quant_config=FORMS[0]):
        model = Attention()
        assert model.q_proj.weight.dtype == torch.float32
        model.load_state_dict(plain.state_dict())
    assert [type(child) for child in model.children()] == [QuantizedLinear] * 3
    x = torch.randn(4, 8)
    torch.testing.assert_close(model(x), plain(x), rtol=0, atol=0.03)
    assert model.head.bias.requires_grad


def test_a_context_that_finds_nothing_to_do_says_so() -> None:
    with pytest.raises(UsageError, match="lora_config, quant_config or both"):
        Init()
    with (
        pytest.raises(UsageError, match=r"name contains one of c_attn .*set target_mods"),
        Init(LoRAConfig(target_mods=["c_attn"])),
    ):
        Attention()
    with pytest.raises(ZeroDivisionError), Init(LoRAConfig()):
        raise ZeroDivisionError


def test_merging_gives_the_weights_of_the_ordinary_model() -> None:
    with Init(LoRAConfig(lora_r=2)):
        model = Attention()
    nn.init.normal_(model.q_proj.lora_weight_2.weight)
    plain = Attention()
    merged = merged_state_dict(model)
    assert list(merged) == list(plain.state_dict())
    plain.load_state_dict(merged)
    x = torch.randn(4, 8)
    torch.testing.assert_close(plain(x), model(x))
    before = model.head.weight.clone()
    merged["head.weight"].zero_()
    torch.testing.assert_close(model.head.weight, before)


@pytest.mark.parametrize(
    ("make", "said"),
    [
        (lambda: QuantizationConfig(q_bits=6), r"q_bits is 6: must be 8 or 4; codes of 6 bits \(e3m2\) are not built"),
        (lambda: QuantizationConfig(q_bits=12), r"q_bits is 12: .*e4m7"),
        (lambda: QuantizationConfig(q_bits=5), r"q_bits is 5: must be 8 or 4$"),
        (lambda: QuantizationConfig(mantissa_bits=2), r"mantissa_bits is 2: .*integers"),
        (lambda: QuantizationConfig(group_size=33), "group_size is 33: must be even"),
        (lambda: QuantizationConfig(q_dtype=torch.int8), "q_dtype is torch.int8"),
        (lambda: QuantizationConfig(q_bits=5, group_size=0), "2 faults"),
        (lambda: LoRAConfig(lora_r=0), "lora_r is 0"),
        (lambda: LoRAConfig(base_weight_sharding=0), "base_weight_sharding is 0"),
        (lambda: LoRAConfig(offload_ratio=1.5), "offload_ratio is 1.5"),
        (lambda: LoRAConfig(target_mods="q_proj"), "target_mods is 'q_proj': must be a list"),
        (lambda: OptimizedLinear(2, 2, bias=True, lora_config=LoRAConfig()), "bias is True: must be false"),
    ],
)
def test_what_cannot_be_is_refused_with_its_name_and_the_remedy(make: Any, said: str) -> None:
    with pytest.raises(ConfigError, match=said):
        make()


def test_a_base_in_host_memory_is_nothing_special_where_the_host_computes() -> None:
    made = layer(LoRAConfig(lora_r=4, offload=True, offload_ratio=0.5))
    torch.testing.assert_close(made(inputs()), layer(LoRAConfig(lora_r=4))(inputs()), rtol=0, atol=0)
