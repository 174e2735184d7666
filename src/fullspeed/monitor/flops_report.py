"""The FLOPS profile as text: headline, cost by operator, by class at each depth, and by module."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from typing import NamedTuple

from fullspeed.monitor.flops import ModuleCost

_PREFIXES = ((1e12, "T"), (1e9, "G"), (1e6, "M"), (1e3, "k"), (1.0, ""), (1e-3, "m"), (1e-6, "u"))


class Facts(NamedTuple):
    """What the report says besides the costs."""

    step: int
    world_size: int
    micro_batch_size: int | None
    recompute_factor: float
    peak_flops: float | None  # of one device, a second


def amount(value: float, unit: str) -> str:
    """The value with three digits and a metric prefix: `1.29 GFLOPs`."""
    scale, prefix = next(((s, p) for s, p in _PREFIXES if abs(value) >= s), (1.0, ""))
    return f"{value / scale:.3g} {prefix}{unit}".rstrip()


def model_report(
    costs: Mapping[str, ModuleCost], facts: Facts, module_depth: int, top_modules: int, detailed: bool
) -> str:
    """The whole report; see `FlopsProfiler.print_model_profile` for the arguments."""
    parts = [
        _headline(costs[""], facts),
        f"By operator\n{_operators(costs[''])}",
        f"By class at each depth\n{aggregated_table(costs, module_depth, top_modules)}",
    ]
    if detailed:
        parts.append(f"By module\n{_tree(costs.values(), costs[''])}")
    return "\n\n".join(parts)


def _headline(total: ModuleCost, facts: Facts) -> str:
    rows = [("step", str(facts.step)), ("ranks", str(facts.world_size))]
    if facts.micro_batch_size is not None:
        rows.append(("samples per forward and rank", str(facts.micro_batch_size)))
    rows += [
        ("parameters", amount(total.num_params, "")),
        ("forward MACs per rank", amount(total.macs, "MACs")),
        ("forward FLOPs per rank", amount(total.flops, "FLOPs")),
        *_backward_rows(total, facts),
        ("forward latency", amount(total.forward_s, "s")),
    ]
    if total.forward_s:
        speed = total.flops / total.forward_s
        rows.append(("forward speed per rank", amount(speed, "FLOP/s")))
        if facts.peak_flops:
            rows.append(("share of the device's peak", f"{speed / facts.peak_flops:.1%}"))
    return _align(rows)


def _backward_rows(total: ModuleCost, facts: Facts) -> list[tuple[str, str]]:
    if total.backward:
        return [
            ("backward FLOPs per rank", amount(total.backward.total(), "FLOPs")),
            ("recomputed FLOPs per rank", amount(total.recompute.total(), "FLOPs")),
        ]
    estimate = total.flops * (2 + facts.recompute_factor)
    return [("backward FLOPs per rank", f"{amount(estimate, 'FLOPs')} (estimated: no backward was profiled)")]


def _operators(total: ModuleCost) -> str:
    every = Counter[str]()
    for count in (total.forward, total.backward, total.recompute):
        every.update(count)
    rows = [("operator", "forward", "backward", "recomputed")]
    for op, _ in every.most_common():
        parts = (total.forward[op], total.backward[op], total.recompute[op])
        forward, backward, recomputed = (amount(part, "FLOPs") for part in parts)
        rows.append((op, forward, backward, recomputed))
    return _align(rows)


def aggregated_table(costs: Mapping[str, ModuleCost], module_depth: int, top_modules: int) -> str:
    """Costs summed by class at each depth; of each depth the `top_modules` classes with the most forward FLOPs."""
    deepest = max(cost.depth for cost in costs.values())
    last = deepest if module_depth < 0 else min(module_depth, deepest)
    rows = [("depth", "class", "modules", "parameters", "MACs", "latency")]
    for depth in range(last + 1):
        by_class: dict[str, list[ModuleCost]] = {}
        for cost in costs.values():
            if cost.depth == depth:
                by_class.setdefault(cost.class_name, []).append(cost)
        dearest = sorted(by_class.items(), key=lambda item: -sum(cost.flops for cost in item[1]))
        rows += [_class_row(depth, name, members) for name, members in dearest[:top_modules]]
    return _align(rows)


def _class_row(depth: int, name: str, members: Sequence[ModuleCost]) -> tuple[str, str, str, str, str, str]:
    return (
        str(depth),
        name,
        str(len(members)),
        amount(sum(cost.num_params for cost in members), ""),
        amount(sum(cost.macs for cost in members), "MACs"),
        amount(sum(cost.forward_s for cost in members), "s"),
    )


def _tree(costs: Iterable[ModuleCost], total: ModuleCost) -> str:
    rows = [("module", "class", "parameters", "MACs", "of all", "latency", "backward", "recomputed")]
    for cost in costs:
        name = "  " * cost.depth + (cost.fqn.rsplit(".", 1)[-1] or "model")
        share = f"{cost.flops / total.flops:.1%}" if total.flops else "-"
        rows.append(
            (
                name,
                cost.class_name,
                amount(cost.num_params, ""),
                amount(cost.macs, "MACs"),
                share,
                amount(cost.forward_s, "s"),
                amount(cost.backward.total(), "FLOPs"),
                amount(cost.recompute.total(), "FLOPs"),
            )
        )
    return _align(rows)


def _align(rows: Sequence[Sequence[str]]) -> str:
    widths = [max(len(row[column]) for row in rows) for column in range(len(rows[0]))]
    return "\n".join(
        "  ".join(f"{cell:<{width}}" for cell, width in zip(row, widths, strict=True)).rstrip() for row in rows
    )
