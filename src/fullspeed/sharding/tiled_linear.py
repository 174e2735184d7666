"""A linear layer cut into tiles, so that only one tile of a very large weight has to be whole at a time.

Letters: O out_features, I in_features, R out_splits (rows of tiles), C in_splits (columns of tiles). Tile (r, c) maps
the c-th part of the input to the r-th part of the output; outputs of a row are summed:

    y[r] = sum over c of x[c] @ W[r, c].T  + b[r]

Under stage 3 every tile is a unit of its own. Memory-centric tiling: ZeRO-Infinity, arXiv:2104.07857, section 5.1.3.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, cast

import torch
from torch import nn

from fullspeed.base.errors import UsageError


class TiledLinear(nn.Module):
    """Computes what `linear_cls(in_features, out_features, bias)` would.

    Fresh tiles are initialised by `linear_cls` for their own size; give `init_linear` to start from a whole layer.

    Args:
        in_features: I, last dimension of the input.
        out_features: O, last dimension of the output.
        bias: add a bias; it lies in the last tile of each row.
        in_splits: C, parts of the input; sizes differ by at most one.
        out_splits: R, parts of the output; sizes differ by at most one.
        input_is_already_split: forward takes a sequence of C tensors (..., I/C) instead of one (..., I).
        combine_out_splits: return one tensor (..., O) instead of a list of R tensors (..., O/R).
        linear_cls: makes a tile, called as `linear_cls(in_features, out_features, bias=..., **kwargs)`.
        init_linear: a layer to copy weight and bias from.
        **kwargs: further arguments of `linear_cls`.

    Raises:
        UsageError: a number of splits is not between 1 and the features it cuts, or `init_linear` has another shape.
    """

    def __init__(
        self,
        in_features: int,
        out_features: int,
        bias: bool = True,
        in_splits: int = 1,
        out_splits: int = 1,
        input_is_already_split: bool = False,
        combine_out_splits: bool = True,
        linear_cls: Callable[..., nn.Module] = nn.Linear,
        init_linear: nn.Module | None = None,
        **kwargs: Any,
    ) -> None:
        super().__init__()
        self.in_features, self.out_features, self.use_bias = in_features, out_features, bias
        self.in_splits, self.out_splits = in_splits, out_splits
        self.input_is_already_split, self.combine_out_splits = input_is_already_split, combine_out_splits
        self.in_sizes = _part_sizes("in", in_features, in_splits)
        self.out_sizes = _part_sizes("out", out_features, out_splits)
        self.linears = nn.ModuleList(
            nn.ModuleList(
                linear_cls(columns, rows, bias=bias and column == in_splits - 1, **kwargs)
                for column, columns in enumerate(self.in_sizes)
            )
            for rows in self.out_sizes
        )
        if init_linear is not None:
            self.copy_params_from(init_linear)

    def extra_repr(self) -> str:
        """Sizes and splits."""
        return (
            f"in_features={self.in_features}, out_features={self.out_features}, bias={self.use_bias}, "
            f"in_splits={self.in_splits}, out_splits={self.out_splits}"
        )

    def tile_rows(self) -> list[list[nn.Module]]:
        """The tiles, R rows of C."""
        return [list(cast(nn.ModuleList, row)) for row in self.linears]

    def forward(self, input_: torch.Tensor | Sequence[torch.Tensor]) -> Any:
        """(..., I), or C tensors (..., I/C), to (..., O), or a list of R tensors (..., O/R)."""
        parts = self._input_parts(input_)
        outputs = [self._row_output(row, parts) for row in self.tile_rows()]
        return self._combine(outputs)

    def _row_output(self, row: Sequence[nn.Module], parts: Sequence[torch.Tensor]) -> Any:
        total = row[0](parts[0])
        for tile, part in zip(row[1:], parts[1:], strict=True):
            total = total + tile(part)
        return total

    def _combine(self, outputs: list[torch.Tensor]) -> Any:
        return torch.cat(outputs, dim=-1) if self.combine_out_splits else outputs

    def _input_parts(self, input_: torch.Tensor | Sequence[torch.Tensor]) -> Sequence[torch.Tensor]:
        if isinstance(input_, torch.Tensor):
            if self.input_is_already_split and self.in_splits > 1:
                raise UsageError(f"input_is_already_split is set: pass {self.in_splits} tensors, not one")
            if input_.shape[-1] != self.in_features:
                raise UsageError(f"the input's last dimension is {input_.shape[-1]}, in_features is {self.in_features}")
            return torch.split(input_, self.in_sizes, dim=-1)
        if not self.input_is_already_split:
            raise UsageError("forward got several tensors; set input_is_already_split=True, or pass one tensor")
        sizes = [part.shape[-1] for part in input_]
        if sizes != self.in_sizes:
            raise UsageError(f"the parts of the input have last dimensions {sizes}, the tiles take {self.in_sizes}")
        return input_

    @torch.no_grad()
    def copy_params_from(self, other: nn.Module) -> None:
        """Copy the weight and bias of a whole layer, for example an `nn.Linear` that this one replaces.

        Args:
            other: has `weight` (O, I) and, where this layer has one, `bias` (O,).

        Raises:
            UsageError: the shapes differ, or one of the layers has a bias and the other not.
        """
        given = dict(other.named_parameters(recurse=False))
        weight, bias = given["weight"], given.get("bias")
        if tuple(weight.shape) != (self.out_features, self.in_features):
            raise UsageError(
                f"the layer to copy has a weight of shape {tuple(weight.shape)}, the tiles together "
                f"({self.out_features}, {self.in_features})"
            )
        if (bias is not None) != self.use_bias:
            raise UsageError(
                f"the layer to copy has {'no' if bias is None else 'a'} bias and bias={self.use_bias} here; "
                f"build both with or both without"
            )
        for row, of_row in zip(self.tile_rows(), weight.split(self.out_sizes, dim=0), strict=True):
            for tile, values in zip(row, of_row.split(self.in_sizes, dim=1), strict=True):
                tile.get_parameter("weight").copy_(values)
        if bias is not None:
            for row, values in zip(self.tile_rows(), bias.split(self.out_sizes), strict=True):
                row[-1].get_parameter("bias").copy_(values)


class TiledLinearReturnBias(TiledLinear):
    """For a `linear_cls` that returns (output, bias) and leaves adding the bias to its caller.

    Forward returns (output, bias): the bias is None if no tile returns one, else whole (O,), or a list of R tensors
    where `combine_out_splits` is false.
    """

    def forward(self, input_: torch.Tensor | Sequence[torch.Tensor]) -> tuple[Any, Any]:
        """As `TiledLinear.forward`, with the bias beside the output."""
        parts = self._input_parts(input_)
        rows = [self._row_output(row, parts) for row in self.tile_rows()]
        biases = [bias for _, bias in rows if bias is not None]
        return self._combine([output for output, _ in rows]), self._combine(biases) if biases else None

    def _row_output(
        self, row: Sequence[nn.Module], parts: Sequence[torch.Tensor]
    ) -> tuple[torch.Tensor, torch.Tensor | None]:
        total, bias = row[0](parts[0])
        for tile, part in zip(row[1:], parts[1:], strict=True):
            output, bias = tile(part)  # the last tile's is the row's
            total = total + output
        return total, bias


def _part_sizes(side: str, num_features: int, num_splits: int) -> list[int]:
    """Sizes of the parts, the larger ones first."""
    if not 1 <= num_splits <= num_features:
        raise UsageError(f"{side}_splits is {num_splits}; choose 1 to {side}_features = {num_features}")
    size, rest = divmod(num_features, num_splits)
    return [size + 1] * rest + [size] * (num_splits - rest)
