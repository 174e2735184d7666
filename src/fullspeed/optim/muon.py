"""Muon for matrices with Adam for everything else, also on shards.

Muon needs each whole matrix. Momentum stays sharded like the parameter; only the step direction is gathered,
a batch of matrices at a time, orthogonalised on the ranks that own a piece of it, and each rank applies its
slice.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.optim.optimizer import Optimizer

from fullspeed.base.errors import ConfigError, ConfigFault, UsageError
from fullspeed.optim.moments import adam_directions, advance_moments, begin_update, with_grads
from fullspeed.optim.names import unknown_names
from fullspeed.optim.newton_schulz import orthogonalize
from fullspeed.optim.shards import ShardView, WholeParams
from fullspeed.optim.stepping import check_hyperparameters, run_closure

_GATHER_NUMEL = 2**26  # elements assembled at once; 256 MiB of fp32 bounds the memory of a step

_MUON_DEFAULTS: dict[str, Any] = {"lr": 0.02, "momentum": 0.95, "weight_decay": 0.0, "ns_method": "gram"}
_ADAM_DEFAULTS: dict[str, Any] = {"lr": 3e-4, "betas": (0.9, 0.95), "eps": 1e-10, "weight_decay": 0.0}
MUON_OPTIONS = ("lr", "muon_lr", "adam_lr", "momentum", "weight_decay", "ns_method", "betas", "eps")


class _Piece(NamedTuple):
    """A piece that waits for its matrix to be orthogonalised."""

    param: Tensor
    group: dict[str, Any]


class MuonWithAuxAdam(Optimizer):
    """Orthogonalised Nesterov momentum for groups with `use_muon`, AdamW for the others.

    m <- beta m + (1 - beta) g; d = beta m + (1 - beta) g; O = orthogonalize(d) * sqrt(max(1, rows / cols));
    p <- p * (1 - lr * weight_decay) - lr * O.

    A parameter of rank 2 is a matrix, of rank 3 a stack of matrices (experts), of rank 4 or more a
    convolution that is flattened to (out, rest). Every group carries `use_muon`. Muon groups: lr, momentum,
    weight_decay, ns_method ("gram" or "standard"); Adam groups: lr, betas, eps, weight_decay.
    State: momentum_buffer (m) or step, exp_avg, exp_avg_sq, shaped like the parameter or piece.
    """

    _shards: ShardView | None = None

    def __init__(self, param_groups: Iterable[dict[str, Any]]) -> None:
        super().__init__(param_groups, {})

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Add a group, its missing options filled in. Raises ConfigError for one that cannot work."""
        super().add_param_group(_complete(param_group))

    def bind_shards(self, shards: ShardView) -> None:
        """From now on the parameters are pieces that `shards` knows."""
        self._shards = shards

    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """Update every parameter that has a gradient. Returns what `closure` returned, if given.

        With bound shards a collective: every rank calls it, also one without gradients.
        """
        loss = run_closure(closure)
        shards = self._shards or WholeParams(self.param_groups)
        pieces: dict[int, _Piece] = {}
        directions: dict[int, Tensor] = {}
        for group in self.param_groups:
            if not group["use_muon"]:
                self._step_adam(group)
                continue
            for param, direction in self._directions(group):
                index = shards.param_index(param)
                pieces[index] = _Piece(param, group)
                directions[index] = direction
        for batch in _batches(_active(shards, pieces), shards):
            mine = {
                index: directions.pop(index).reshape(-1).to(shards.device, torch.float32)
                for index in batch
                if index in pieces
            }
            whole = shards.gather_whole(mine, batch)
            for index in mine:
                _apply(pieces[index], index, whole[index], shards)
        return loss

    def _step_adam(self, group: dict[str, Any]) -> None:
        batch = begin_update(self.state, group)
        if not batch.params:
            return
        lr = float(group["lr"])
        advance_moments(batch, *group["betas"])
        directions = adam_directions(batch, group["betas"], group["eps"])
        if group["weight_decay"]:
            torch._foreach_mul_(batch.params, 1 - lr * group["weight_decay"])
        torch._foreach_add_(batch.params, directions, alpha=-lr)

    def _directions(self, group: dict[str, Any]) -> list[tuple[Tensor, Tensor]]:
        """Advance the momentum of a group's pieces; each piece with its Nesterov direction."""
        params, grads = with_grads(group)
        if not params:
            return []
        for param in params:
            if not self.state[param]:
                self.state[param]["momentum_buffer"] = torch.zeros_like(param)
        buffers = [self.state[param]["momentum_buffer"] for param in params]
        torch._foreach_lerp_(buffers, grads, 1 - group["momentum"])
        return list(zip(params, torch._foreach_lerp(grads, buffers, group["momentum"]), strict=True))


def _active(shards: ShardView, pieces: Iterable[int]) -> list[int]:
    """Indices that some rank has a piece of in this step: what all ranks will gather, in one order."""
    mask = torch.zeros(shards.num_params(), dtype=torch.float32, device=shards.device)
    mask[list(pieces)] = 1
    shards.all_reduce_sum(mask)
    return [index for index, count in enumerate(mask.tolist()) if count]


def _batches(indices: Sequence[int], shards: ShardView) -> Iterator[list[int]]:
    """Runs of `indices` of at most `_GATHER_NUMEL` elements, or one larger parameter alone."""
    batch: list[int] = []
    numel = 0
    for index in indices:
        more = shards.full_shape(index).numel()
        if batch and numel + more > _GATHER_NUMEL:
            yield batch
            batch, numel = [], 0
        batch.append(index)
        numel += more
    if batch:
        yield batch


def _apply(piece: _Piece, index: int, direction: Tensor, shards: ShardView) -> None:
    """Orthogonalise the whole (numel,) direction and move the piece along its slice of it."""
    param, group = piece
    shape = shards.full_shape(index)
    if len(shape) < 2:
        fix = "clear use_muon on it, or flag parameters with flag_muon_params"
        raise UsageError(f"Muon got parameter {index} of shape {tuple(shape)}; it steps matrices only: {fix}")
    matrix = direction.view(shape if len(shape) < 4 else (shape[0], -1))
    update = orthogonalize(matrix, group["ns_method"])
    scale = max(1.0, matrix.size(-2) / matrix.size(-1)) ** 0.5
    start, stop = shards.slice_of(index)
    lr = float(group["lr"])
    param.mul_(1 - lr * group["weight_decay"])
    param.add_(update.reshape(-1)[start:stop].view_as(param).to(param), alpha=-lr * scale)


def flag_muon_params(named_parameters: Iterable[tuple[str, Tensor]]) -> None:
    """Set `use_muon` where it is missing: True for rank >= 2 unless the name says embedding or LM head.

    A flag the user has set stays. Call it on the whole parameters, before anything flattens them.
    """
    for fqn, param in named_parameters:
        name = fqn.lower()
        is_matrix = param.ndim >= 2 and "embed" not in name and "lm_head" not in name
        vars(param).setdefault("use_muon", is_matrix)


def muon_param_groups(
    params: Iterable[tuple[str, Tensor]] | Iterable[Tensor] | Iterable[dict[str, Any]],
    options: Mapping[str, Any],
) -> list[dict[str, Any]]:
    """Groups for `MuonWithAuxAdam`, each given group split in two by the flags; empty ones left out.

    params: named parameters (flagged here where they are not), flagged parameters, or groups of either whose
    own entries (lr, weight_decay, name...) win over `options`. A group with a `use_muon` entry is not split
    and its parameters need no flags.
    options: `MUON_OPTIONS`; lr is for both kinds, muon_lr and adam_lr for one. Raises ConfigError for another
    name.
    """
    faults = unknown_names("optimizer.params", options, MUON_OPTIONS)
    if options.get("ns_method", "gram") not in ("gram", "standard"):
        faults.append(ConfigFault("optimizer.params.ns_method", options["ns_method"], "choose gram or standard"))
    if faults:
        raise ConfigError(faults)
    kinds = {
        True: _options_of(options, _MUON_DEFAULTS, "muon_lr"),
        False: _options_of(options, _ADAM_DEFAULTS, "adam_lr"),
    }
    entries: list[Any] = list(params)
    if not all(isinstance(entry, dict) for entry in entries):
        entries = [{"params": entries}]
    groups = []
    for entry in entries:
        if "use_muon" in entry:
            groups.append({**kinds[bool(entry["use_muon"])], **entry})
            continue
        members = [_flagged(member) for member in _as_list(entry["params"])]
        for use_muon, defaults in kinds.items():
            chosen = [param for param in members if vars(param)["use_muon"] == use_muon]
            if chosen:
                groups.append({**defaults, **entry, "params": chosen, "use_muon": use_muon})
    return groups


def _options_of(options: Mapping[str, Any], defaults: Mapping[str, Any], own_lr: str) -> dict[str, Any]:
    chosen = {name: options.get(name, default) for name, default in defaults.items()}
    return chosen | ({"lr": options[own_lr]} if own_lr in options else {})


def _as_list(params: Any) -> list[Any]:
    return [params] if isinstance(params, Tensor) else list(params)


def _flagged(member: Tensor | tuple[str, Tensor]) -> Tensor:
    if isinstance(member, tuple):
        flag_muon_params([member])
        return member[1]
    if "use_muon" not in vars(member):
        raise UsageError(
            f"a parameter of shape {tuple(member.shape)} has no use_muon flag; "
            "call flag_muon_params(model.named_parameters()) first"
        )
    return member


def _complete(group: dict[str, Any]) -> dict[str, Any]:
    """The group with defaults filled in; ConfigError without `use_muon` or for a value that cannot work."""
    if "use_muon" not in group:
        raise ConfigError([ConfigFault("use_muon", None, "every group of MuonWithAuxAdam sets it to True or False")])
    full = {**(_MUON_DEFAULTS if group["use_muon"] else _ADAM_DEFAULTS), **group}
    if full["use_muon"] and full["ns_method"] not in ("gram", "standard"):
        raise ConfigError([ConfigFault("ns_method", full["ns_method"], "choose gram or standard")])
    if full["use_muon"] and not 0 <= full["momentum"] < 1:
        raise ConfigError([ConfigFault("momentum", full["momentum"], "must be at least 0 and below 1")])
    check_hyperparameters(
        lr=full["lr"], betas=full.get("betas"), eps=full.get("eps", 0.0), weight_decay=full["weight_decay"]
    )
    return full
