"""Counted operations equal closed formulas; every one is charged to the modules it belongs to."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

from fullspeed.base.errors import UsageError
from fullspeed.monitor import flops_profiler as profiling
from fullspeed.monitor.flops import FlopCounter, ModuleCost
from fullspeed.monitor.flops_profiler import FlopsProfiler, get_model_profile
from fullspeed.monitor.flops_report import amount
from fullspeed.monitor.peak import peak_flops, peak_of
from tests.models import tiny_llama


def count(model: nn.Module, *args: Any, loss: Callable[[Any], torch.Tensor] = torch.sum, **kwargs: Any) -> FlopCounter:
    """Counts of one forward and backward."""
    counter = FlopCounter(model)
    counter.start()
    loss(model(*args, **kwargs)).backward()
    counter.stop()
    return counter


def spent(cost: ModuleCost) -> tuple[int, int, int]:
    return cost.flops, cost.backward.total(), cost.recompute.total()


def test_linear() -> None:
    forward = 2 * 6 * 3 * 4
    assert spent(count(nn.Linear(3, 4), torch.ones(2, 3, 3, requires_grad=True)).total) == (forward, 2 * forward, 0)
    assert spent(count(nn.Linear(3, 4), torch.ones(2, 3, 3)).total) == (forward, forward, 0)  # no gradient of inputs
    assert count(nn.Linear(3, 4), torch.ones(2, 3)).total.num_params == 3 * 4 + 4


def test_convolution() -> None:
    # (2, 3, 9, 9) -> (2, 4, 4, 4) with kernel 3, stride 2; one multiply-add per kernel element and channel.
    forward = 2 * (2 * 4 * 4 * 4) * (3 * 3 * 3)
    total = count(nn.Conv2d(3, 4, 3, stride=2), torch.ones(2, 3, 9, 9, requires_grad=True)).total
    assert spent(total) == (forward, 2 * forward, 0)
    assert total.macs == forward // 2


class Attention(nn.Module):
    """Only the attention kernel."""

    def forward(self, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, **how: Any) -> torch.Tensor:
        return F.scaled_dot_product_attention(query, key, value, **how)


@pytest.mark.parametrize("how", [{}, {"is_causal": True}, {"attn_mask": torch.zeros(8, 8)}])
def test_attention_is_counted_once(how: dict[str, Any]) -> None:
    B, H, S, D = 2, 4, 8, 16
    query, key, value = (torch.randn(B, H, S, D, requires_grad=True) for _ in range(3))
    product = 2 * B * H * S * S * D
    # Two products forward; backward computes the scores again, then two gradients of each product.
    assert spent(count(Attention(), query, key, value, **how).total) == (2 * product, 5 * product, 0)


def test_attention_without_a_kernel_of_its_own_is_counted_once() -> None:
    query, key, value = (torch.randn(2, 4, 8, 16, requires_grad=True) for _ in range(3))
    with torch.nn.attention.sdpa_kernel(torch.nn.attention.SDPBackend.MATH):
        total = count(Attention(), query, key, value).total
    product = 2 * 2 * 4 * 8 * 8 * 16
    assert spent(total) == (2 * product, 4 * product, 0)  # this one keeps the scores


def llama_layer(B: int, S: int) -> tuple[int, int]:
    """FLOPs of (matrix products, attention) in a layer of the tiny Llama: 4 heads, 2 of keys, D = 8, M = 32, F = 52."""
    M, KV, FF, T = 32, 16, 52, B * S
    return 2 * T * (2 * M * M + 2 * M * KV + 3 * M * FF), 2 * 2 * B * 4 * S * S * 8


@pytest.mark.parametrize("attention", ["sdpa", "eager"])
def test_llama(attention: str) -> None:
    B, S = 2, 16
    model = tiny_llama(attention=attention)
    ids = torch.randint(0, 61, (B, S))
    counter = count(model, input_ids=ids, labels=ids, loss=lambda output: output.loss)
    products, attending = llama_layer(B, S)
    attending_backward = attending * 5 // 2 if attention == "sdpa" else attending * 2
    head = 2 * B * S * 32 * 61
    layer = counter.costs["model.layers.1"]
    assert spent(layer) == (products + attending, 2 * products + attending_backward, 0)
    assert spent(counter.costs["lm_head"]) == (head, 2 * head, 0)
    total = counter.total
    # The one small product of the rotary embedding: positions times 4 frequencies, without gradient.
    rotary = counter.costs["model.rotary_emb"].flops
    assert total.flops == 2 * (products + attending) + head + rotary
    assert total.backward.total() == 2 * (2 * products + attending_backward) + 2 * head
    assert rotary <= 2 * B * S * 4
    assert total.num_params == sum(param.numel() for param in model.parameters())
    assert total.num_calls == layer.num_calls == 1
    assert total.forward_s > layer.forward_s > 0


def test_bert() -> None:
    from transformers import BertConfig, BertModel

    B, S, M, FF, L, H = 2, 12, 32, 48, 3, 4
    config = BertConfig(hidden_size=M, intermediate_size=FF, num_hidden_layers=L, num_attention_heads=H, vocab_size=61)
    counter = count(BertModel(config), torch.randint(0, 61, (B, S)), loss=lambda output: output.pooler_output.sum())
    layer = 2 * B * S * (4 * M * M + 2 * M * FF) + 2 * 2 * B * S * S * M
    pooler = 2 * B * M * M
    assert counter.total.flops == L * layer + pooler
    assert counter.costs["encoder.layer.2"].flops == layer


class Checkpointed(nn.Module):
    """Two products with a nonlinearity between, recomputed in backward."""

    def __init__(self, use_reentrant: bool) -> None:
        super().__init__()
        self.inner = nn.Sequential(nn.Linear(4, 4), nn.Tanh(), nn.Linear(4, 4), nn.Tanh())
        self.use_reentrant = use_reentrant

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return checkpoint(self.inner, x, use_reentrant=self.use_reentrant)


@pytest.mark.parametrize("use_reentrant", [True, False])
def test_recomputation_is_counted_apart(use_reentrant: bool) -> None:
    counter = count(Checkpointed(use_reentrant), torch.ones(5, 4, requires_grad=True))
    one = 2 * 5 * 4 * 4
    assert spent(counter.total) == spent(counter.costs["inner"]) == (2 * one, 4 * one, 2 * one)
    assert spent(counter.costs["inner.2"]) == (one, 2 * one, one)
    assert counter.total.num_calls == counter.costs["inner"].num_calls == 1  # a recomputation is no call


class Sharing(nn.Module):
    """One layer under two parents, used by both, and a product of the model's own."""

    def __init__(self) -> None:
        super().__init__()
        shared = nn.Linear(4, 4)
        self.left, self.right = nn.Sequential(shared), nn.Sequential(shared)
        self.own = nn.Parameter(torch.ones(4, 4))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.right(self.left(x)) @ self.own


def test_a_shared_layer_is_charged_to_whoever_calls_it() -> None:
    counter = count(Sharing(), torch.ones(5, 4, requires_grad=True))
    one = 2 * 5 * 4 * 4
    assert spent(counter.total) == (3 * one, 6 * one, 0)
    assert counter.costs["left.0"].flops == 2 * one
    assert counter.costs["right"].flops == one
    assert counter.total.num_params == 4 * 4 + 4 + 4 * 4


def test_submodules_called_on_their_own_and_losses_outside_count_rightly() -> None:
    model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4))
    counter = FlopCounter(model)
    counter.start()
    out = model[1](torch.ones(5, 4, requires_grad=True))
    (out @ torch.ones(4, 4)).sum().backward()  # a product that belongs to no module
    counter.stop()
    one = 2 * 5 * 4 * 4
    assert spent(counter.total) == spent(counter.costs["1"]) == (one, 2 * one, 0)
    assert spent(counter.costs["0"]) == (0, 0, 0)


def test_ignored_classes_and_all_below_them_are_left_out() -> None:
    model = nn.Sequential(nn.Linear(4, 4), nn.Sequential(nn.Conv1d(1, 1, 1), nn.Sequential(nn.Linear(4, 4))))
    inputs = torch.ones(5, 1, 4)
    everything, _, _ = get_model_profile(model, args=[inputs], print_profile=False, as_string=False)
    without, _, _ = get_model_profile(
        model, args=[inputs], print_profile=False, as_string=False, ignore_modules=[nn.Conv1d]
    )
    linear = 2 * 5 * 4 * 4
    assert everything == 2 * linear + 2 * 5 * 4
    assert without == 2 * linear


def test_counting_ends_when_it_is_stopped_even_after_an_error() -> None:
    class Failing(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.inner = nn.Linear(4, 4)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            raise ValueError(f"shape {tuple(self.inner(x).shape)}")

    model = Failing()
    counter = FlopCounter(model)
    counter.start()
    with pytest.raises(ValueError, match="shape"):
        model(torch.ones(2, 4))
    with pytest.raises(ValueError, match="shape"):
        model(torch.ones(2, 4))
    counter.stop()
    assert counter.total.flops == 2 * (2 * 2 * 4 * 4)
    counter.stop()
    model.inner(torch.ones(2, 4))
    assert counter.total.flops == 2 * (2 * 2 * 4 * 4)
    assert not model._forward_hooks
    assert not model._forward_pre_hooks


def test_profiler_names() -> None:
    model = nn.Linear(3, 4)
    profiler = FlopsProfiler(model)
    with pytest.raises(UsageError, match="nothing was profiled"):
        profiler.get_total_flops()
    profiler.start_profile()
    with pytest.raises(UsageError, match="counting already"):
        profiler.start_profile()
    model(torch.ones(2, 3))
    profiler.reset_profile()
    model(torch.ones(2, 3))
    profiler.stop_profile()
    model(torch.ones(2, 3))
    assert (profiler.get_total_flops(), profiler.get_total_macs(), profiler.get_total_params()) == (48, 24, 16)
    assert (profiler.get_total_flops(True), profiler.get_total_macs(True)) == ("48 FLOPs", "24 MACs")
    assert profiler.get_total_duration() > 0
    assert profiler.get_total_duration(as_string=True).endswith("s")
    profiler.end_profile()
    with pytest.raises(UsageError, match="nothing was profiled"):
        profiler.get_total_params()


def test_the_report_has_every_part(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    file = tmp_path / "deep" / "report.txt"
    model = tiny_llama()
    ids = torch.randint(0, 61, (2, 16))
    flops, macs, params = get_model_profile(
        model, kwargs={"input_ids": ids}, module_depth=3, top_modules=2, output_file=str(file)
    )
    text = file.read_text()
    assert (flops, macs, params) == ("1.29 MFLOPs", "644 kMACs", "20.2 k")
    assert "estimated: no backward was profiled" in text
    by_class = text.split("By class at each depth\n")[1].split("\n\n")[0].splitlines()
    assert [line.split()[:3] for line in by_class[1:4]] == [
        ["0", "LlamaForCausalLM", "1"],
        ["1", "LlamaModel", "1"],
        ["1", "Linear", "1"],
    ]
    assert by_class[-1].startswith("3")
    by_module = text.split("By module\n")[1].splitlines()
    assert len(by_module) == 1 + len(list(model.named_modules()))
    said: list[str] = []
    monkeypatch.setattr(profiling, "log_dist", said.append)
    profiler = FlopsProfiler(model)
    profiler.start_profile()
    model(input_ids=ids, labels=ids).loss.backward()
    profiler.stop_profile()
    profiler.print_model_profile(detailed=False)
    profiler.print_model_aggregated_profile(module_depth=0)
    assert "estimated" not in said[0]
    assert "By module" not in said[0]
    assert said[1].count("\n") == 2


def test_generation_counts_every_forward() -> None:
    model = tiny_llama()
    ids = torch.randint(1, 61, (1, 8))
    kwargs = {"max_new_tokens": 3, "do_sample": False, "attention_mask": torch.ones_like(ids), "pad_token_id": 0,
              "eos_token_id": None}  # fmt: skip
    flops, _, _ = get_model_profile(
        model, args=[ids], kwargs=kwargs, mode="generate", warm_up=0, print_profile=False, as_string=False
    )
    products, _ = llama_layer(1, 8)
    a_token, _ = llama_layer(1, 1)
    heads = 3 * 2 * 32 * 61
    attention = 2 * 4 * 8 * 2 * (8 * 8 + 9 + 10) * 2  # two layers; with a cache, one query to all keys
    floor = 2 * (products + 2 * a_token) + heads + attention
    assert floor <= flops <= floor * 1.01  # the rotary embedding


def test_wrong_arguments_are_refused() -> None:
    with pytest.raises(UsageError, match="needs an input"):
        get_model_profile(nn.Linear(3, 4))
    with pytest.raises(UsageError, match="mode is 'train'"):
        get_model_profile(nn.Linear(3, 4), (2, 3), mode="train")  # type: ignore[arg-type]


def test_an_input_shape_is_filled_in_the_dtype_of_the_model() -> None:
    assert get_model_profile(nn.Linear(3, 4).double(), (2, 3), print_profile=False, as_string=False)[0] == 48


def test_amounts_and_peaks() -> None:
    assert [amount(value, "B") for value in (0, 12, 1234, 5.6e9, 2e-4)] == [
        "0 B",
        "12 B",
        "1.23 kB",
        "5.6 GB",
        "200 uB",
    ]
    assert peak_of("NVIDIA H100 80GB HBM3", torch.bfloat16) == 989.4e12
    assert peak_of("NVIDIA H100 PCIe", torch.float16) == 756e12
    assert peak_of("NVIDIA A100-SXM4-40GB", torch.float32) == 156e12
    assert peak_of("NVIDIA A100-SXM4-40GB", torch.int8) is None
    assert peak_of("Unheard-of 9000", torch.bfloat16) is None
    assert peak_flops(torch.device("cpu"), torch.float32) is None
